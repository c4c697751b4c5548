"""The demo's picture and page: learning curves, the near/far ratio by depth, and the plain network's second try."""

import html
from collections.abc import Callable
from io import BytesIO, StringIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unskip.demo.story import DEPTH, NOISE, WAYS, Story, versions

INK, SOFT, GRID = "#1e293b", "#64748b", "#e2e8f0"
SIZES = {"on-wide": (8.2, 3.8), "on-narrow": (4.2, 3.6)}  # inches, of 96 pixels where the page is that wide
FAILS = 20  # points behind the others from which on we say that the plain network fails


def draw(story: Story) -> bytes:
    """One PNG with the whole story."""
    figure = Figure(figsize=(13, 4.6), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    curves, depth, bars = figure.subplots(1, 3, width_ratios=(1.25, 1.25, 0.9))
    draw_curves(curves, story)
    draw_depth(depth, story)
    draw_bars(bars, story)
    figure.suptitle(headline(story), fontsize=14, color=INK, weight="bold", x=0.01, ha="left")
    data = BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def draw_curves(axes: Axes, story: Story) -> None:
    """Training error over epochs: what fails is training itself, so it is the training error that shows it."""
    for track in story.tracks.values():
        rows = track.epoch_rows
        style = "--" if track.way.longer > 1 else "-"
        label = track.way.title
        axes.plot(
            [r["epoch"] for r in rows], [r["error"] for r in rows], style, color=track.way.color, lw=2, label=label
        )
    axes.axhline(story.chance_error, color=SOFT, lw=1, ls=":")
    axes.text(0.99, story.chance_error, "guessing ", color=SOFT, fontsize=8, ha="right", va="bottom",
              transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_ylim(0, 100)
    axes.set_xlim(left=1)
    finish(axes, "How they learn", "epoch", "training error (%)")
    axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.86))


def draw_depth(axes: Axes, story: Story) -> None:
    """The near/far ratio at initialisation, before any training."""
    for way in WAYS[:3]:
        layers = story.facts[way.network].layers
        axes.plot(layers.depth, layers.ratio, color=way.color, lw=2, label=way.title)
    axes.axhline(1, color=SOFT, lw=1, ls=":")
    axes.text(1, 1.06, "as far apart as two different images", color=SOFT, fontsize=8, va="bottom")
    axes.set_yscale("log")
    axes.set_ylim(top=2)
    finish(
        axes,
        f"What {100 * NOISE:g} % noise becomes, before any training",
        "layer",
        "distance, noisy copy / other image",
    )
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def draw_bars(axes: Axes, story: Story) -> None:
    tracks = list(story.tracks.items())[::-1]
    names = [track.way.title.replace(", ", ",\n") for _, track in tracks]
    errors = [story.error(key) for key, _ in tracks]
    axes.barh(names, errors, color=[track.way.color for _, track in tracks], height=0.6)
    for at, error in enumerate(errors):
        axes.text(error + 1.5, at, f"{error:.1f} %", va="center", fontsize=10, color=INK)
    axes.set_xlim(0, 100)
    finish(axes, "What they get wrong", "test error (%)", "")


def finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x, color=SOFT)
    axes.set_ylabel(y, color=SOFT)
    axes.tick_params(colors=SOFT)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)


def headline(story: Story) -> str:
    plain, pnnh, residual = (story.error(key) for key in ("plain", "pnnh", "residual"))
    numbers = f"plain {plain:.0f} %, PNNH {pnnh:.1f} %, residual {residual:.1f} % test error"
    if story.gap >= FAILS:
        return f"{DEPTH} layers, no skip connections, and still it trains: {numbers}"
    return f"{DEPTH} layers, three ways: {numbers}"


def verdict(story: Story) -> str:
    """What happened, in words that the numbers decide."""
    plain, longer = story.error("plain"), story.error("plain-3x")
    train = story.tracks["plain"].epoch_rows[-1]["error"]
    if story.gap >= FAILS:
        behind = longer > max(story.error("pnnh"), story.error("residual")) + 5
        end = "which is still not where the others are" if behind else "so with patience it gets there, at a price"
        more = f"Three times the epochs bring it from {plain:.1f} to {longer:.1f} %, {end}."
        return (
            f"The plain network ends {story.gap:.0f} points behind the worse of the two others. It errs on "
            f"{train:.1f} % of its training images too: what fails is training itself. {more}"
        )
    return (
        f"This time the plain network ends only {story.gap:.1f} points behind the worse of the two others. Other seeds "
        "(`unskip demo --seed 1`) usually show a larger gap."
    )


def drawing(draw_one: Callable[[Axes, Story], None], story: Story) -> str:
    """A figure of the page, once for wide screens and once for narrow ones, where its letters keep their size."""
    return "".join(f'<div class="{name}">{svg(draw_one, story, size)}</div>' for name, size in SIZES.items())


def svg(draw_one: Callable[[Axes, Story], None], story: Story, size: tuple[float, float]) -> str:
    figure = Figure(figsize=size, layout="constrained", facecolor="none")
    axes = figure.subplots()
    draw_one(axes, story)
    axes.set_title("", loc="left")  # the page has headings of its own
    axes.set_facecolor("none")
    legend = axes.get_legend()
    assert legend is not None
    legend.remove()  # a plot by itself has room for it above the lines
    figure.legend(loc="outside upper left", ncols=round(size[0] / 2), frameon=False, fontsize=9)
    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]


def page(story: Story) -> str:
    """A page that needs nothing but itself."""
    ends = {way.key: story.facts[way.network].layers.ratio[-1] for way in WAYS[:3]}
    cards = "".join(
        f'<div class="card" style="--c:{track.way.color}"><h3>{html.escape(track.way.title)}</h3>'
        f'<p class="big">{story.error(key):.1f}<small> %</small></p><p>test error after {track.epochs} epochs</p></div>'
        for key, track in story.tracks.items()
    )
    tracks = story.tracks.values()
    facts = [story.facts[track.way.network] for track in tracks]
    heads = "".join(f'<th scope="col">{html.escape(track.way.title)}</th>' for track in tracks)
    cells = {
        "layers": [str(DEPTH) for _ in tracks],
        "trained parameters": [f"{fact.trained:,}" for fact in facts],
        "frozen weights": [f"{fact.frozen:,}" for fact in facts],
        "skips": [html.escape(fact.skips) for fact in facts],
        "epochs": [str(track.epochs) for track in tracks],
        "training error": [f"{track.epoch_rows[-1]['error']:.1f} %" for track in tracks],
        "test error": [f"{story.error(key):.1f} %" for key in story.tracks],
    }
    rows = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{value}</td>" for value in values)}</tr>'
        for name, values in cells.items()
    )
    # Ends in the folder of the run, which is there now and would be refused: another one.
    commands = "\n".join(" ".join([*track.command[:-1], f"runs/{key}"]) for key, track in story.tracks.items())
    train, val, test = story.sizes
    made = ", ".join(f"{name} {value}" for name, value in versions().items())
    optimizer, run = story.recipe.optimizer, story.recipe.run
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>unskip demo: {DEPTH} layers three ways</title><style>{STYLE}</style></head><body><main>
<p class="eyebrow">unskip demo</p>
<h1>{html.escape(headline(story))}</h1>
<p class="lead">{html.escape(verdict(story))}</p>
<div class="cards">{cards}</div>

<h2>How they learn</h2>
<p>One recipe for all: SGD with momentum {optimizer.momentum:g}, batch {run.batch}, learning rate {optimizer.lr:g} with
{optimizer.warmup_epochs:g} epochs of warm-up and a cosine, weight decay {optimizer.weight_decay:g}, {run.epochs}
epochs. It is the CIFAR recipe of the PNNH paper at half its batch and half its learning rate; the dashed line is the
plain network with three times the epochs. Plain and residual differ in the skip connections and in nothing else. PNNH
has none either; half of each block is a fixed coder, so it trains half the parameters.</p>
<figure>{drawing(draw_curves, story)}</figure>

<h2>Why the plain one fails</h2>
<p>Take an image and a copy with {100 * NOISE:g} % noise that nobody can see, and follow both through the network
<em>before any training</em>. Behind each block, divide their distance by the distance of two different images (medians
over a batch, BatchNorm in training mode). Near 0 the network still knows which image it looks at. At 1 a trifle of
noise has become as large as the difference between a 3 and an 8: the input is lost, and what the last layers could
learn is noise.
At the last block the ratio is <b>{ends["plain"]:.2f}</b> for the plain network, <b>{ends["pnnh"]:.2f}</b> with PNNH and
<b>{ends["residual"]:.2f}</b> with skip connections.</p>
<figure>{drawing(draw_depth, story)}</figure>
<p>A residual network keeps its input by adding it to each block's output. PNNH keeps it without that addition: half of
a block's hidden units are a fixed, shared coder that carries the input on, the other half learn. Side by side the
two are one ordinary block of two convolutions, so the network that ships is plain.</p>

<h2>The comparison</h2>
<div class="wide"><table><thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody></table></div>
<p class="small">Training error: mean over the last epoch, in training mode. Guessing errs in
{story.chance_error:.0f} %.</p>

<h2>What this is, and what it is not</h2>
<p>scikit-learn's digits, 8 &times; 8 pixels: {train:,} images to train on, {val} to choose on, {test} to test on.
One seed ({story.seed}), so a test error is uncertain by a few points; nothing here was chosen on the test images. It
shows a mechanism, not a benchmark: how close PNNH comes to residual networks on real tasks is in the project's
records.</p>
<p>Run any part of it again:</p><pre>{html.escape(commands)}</pre>
<p class="small">{story.seconds:.0f} s in all; {html.escape(made)}.</p>
</main></body></html>
"""


STYLE = """
:root { color-scheme: light dark; --ink: #1e293b; --soft: #64748b; --line: #e2e8f0; --back: #f8fafc; --card: #fff; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e2e8f0; --soft: #94a3b8; --line: #334155; --back: #0b1120; --card: #172033; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
.eyebrow { margin: 0; color: var(--soft); letter-spacing: .08em; text-transform: uppercase; font-size: .8rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: .3rem 0 1rem; }
h2 { margin: 2.6rem 0 .4rem; font-size: 1.25rem; }
p { max-width: 46rem; }
.lead { font-size: 1.1rem; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1rem; margin: 1.8rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-top: 4px solid var(--c); border-radius: .6rem;
  padding: .9rem 1.1rem; }
.card h3 { margin: 0; font-size: .95rem; font-weight: 600; min-height: 1.6em; }
.card p { margin: 0; color: var(--soft); font-size: .85rem; }
.card .big { color: var(--c); font-size: 2.3rem; font-weight: 700; line-height: 1.25; }
.card .big small { font-size: 1.1rem; font-weight: 500; }
figure { margin: 1.2rem 0; background: #fff; border: 1px solid var(--line); border-radius: .6rem; padding: 1rem; }
figure svg { width: 100%; height: auto; display: block; }
.on-narrow { display: none; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; background: var(--card); border: 1px solid var(--line);
  font-size: .92rem; }
th, td { padding: .5rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { white-space: normal; }
tbody th { color: var(--soft); font-weight: 500; text-align: left; }
thead th { width: 19%; vertical-align: bottom; }
pre { background: #0f172a; color: #e2e8f0; padding: 1rem; border-radius: .6rem; overflow-x: auto; font-size: .82rem; }
.small { color: var(--soft); font-size: .85rem; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.5rem; }
  .cards { grid-template-columns: 1fr 1fr; }
  figure { padding: .5rem; }
  .on-wide { display: none; }
  .on-narrow { display: block; }
  table { font-size: .75rem; }
  th, td { padding: .4rem .3rem; }
}
@media print {
  :root { --back: #fff; }
  @page { margin: 14mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  p { max-width: none; }
  figure, .card, tr { break-inside: avoid; }
  h2 { break-after: avoid; margin-top: 1.6rem; }
  .card { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  pre { color: inherit; background: none; border: 1px solid var(--line); white-space: pre-wrap; }
}
"""
