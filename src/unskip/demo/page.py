"""The demo's picture and page: learning curves, noise-to-signal ratio by depth, and the plain network's second try."""

import html
import json
from collections.abc import Callable
from importlib import resources
from io import BytesIO, StringIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unskip.demo.story import DEPTH, NOISE, VARIANTS, Story, versions
from unskip.train.checkpoint import write_atomically

INK, SOFT, GRID = "#1e293b", "#64748b", "#e2e8f0"
SIZES = {"on-wide": (8.2, 3.8), "on-narrow": (4.2, 3.6)}  # inches, of 96 pixels where the page is that wide
FAILS = 20  # points behind the others from which on we say that the plain network fails


def write(story: Story, out: Path) -> tuple[Path, Path]:
    """Writes the picture, the page and the numbers as JSON into a folder; returns the paths of the first two."""
    files = {
        "demo.png": draw(story),
        "index.html": page(story).encode(),
        "demo.json": json.dumps(story.summary(), indent=1).encode(),
    }
    for name, data in files.items():
        write_atomically(out / name, lambda file, data=data: file.write(data))  # type: ignore[misc]
    return out / "demo.png", out / "index.html"


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
        style = "--" if track.variant.factor > 1 else "-"
        label = track.variant.title
        axes.plot(
            [r["epoch"] for r in rows], [r["error"] for r in rows], style, color=track.variant.color, lw=2, label=label
        )
    axes.axhline(story.chance_error, color=SOFT, lw=1, ls=":")
    axes.text(0.99, story.chance_error, "guessing ", color=SOFT, fontsize=8, ha="right", va="bottom",
              transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_ylim(0, 100)
    axes.set_xlim(left=1)
    finish(axes, "How they learn", "epoch", "training error (%)")
    axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.86))


def draw_depth(axes: Axes, story: Story) -> None:
    """The noise-to-signal ratio at initialisation, before any training."""
    for variant in VARIANTS[:3]:
        ratio = story.facts[variant.network].noise_to_signal
        axes.plot(list(ratio), list(ratio.values()), color=variant.color, lw=2, label=variant.title)
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
    names = [track.variant.title.replace(", ", ",\n") for _, track in tracks]
    errors = [story.error(key) for key, _ in tracks]
    axes.barh(names, errors, color=[track.variant.color for _, track in tracks], height=0.6)
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
            f"The plain network ends {story.gap:.0f} points behind the worse of the two others. Its training error is "
            f"{train:.1f} % as well: what fails is training itself. {more}"
        )
    return (
        f"This time the plain network ends only {story.gap:.1f} points behind the worse of the two others. Other seeds "
        "(unskip demo --seed 1) usually show a larger gap."
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
    cards = "".join(
        f'<div class="card" style="--c:{track.variant.color}"><h3>{html.escape(track.variant.title)}</h3>'
        f'<p class="big">{story.error(key):.1f}<small> %</small></p><p>test error after {track.epochs} epochs</p></div>'
        for key, track in story.tracks.items()
    )
    tracks = story.tracks.values()
    facts = [story.facts[track.variant.network] for track in tracks]
    heads = "".join(f'<th scope="col">{html.escape(track.variant.title)}</th>' for track in tracks)
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
    made = html.escape(", ".join(f"{name} {value}" for name, value in versions().items()))
    return _asset("page.html").format(
        css=_asset("page.css"),
        story=story,
        optimizer=story.recipe.optimizer,
        run=story.recipe.run,
        depth=DEPTH,
        noise=100 * NOISE,
        headline=html.escape(headline(story)),
        verdict=html.escape(verdict(story)),
        cards=cards,
        curves=drawing(draw_curves, story),
        by_depth=drawing(draw_depth, story),
        ends={variant.key: story.facts[variant.network].at_the_end for variant in VARIANTS[:3]},
        heads=heads,
        rows=rows,
        commands=html.escape(commands),
        made=made,
    )


def _asset(name: str) -> str:
    return (resources.files("unskip.demo") / "assets" / name).read_text(encoding="utf-8")
