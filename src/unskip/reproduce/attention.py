"""GPTs without skips beside residual ones, on a text: rows of methods, depths, and a grid of learning rates for each.

Every row trains at every rate with seed 0. The other seeds train at the best rate of the row, by the validation loss of
its best epoch, so that each is at its own best. `unskip.models.gpt` is the network, docs/attention.md has the methods.
"""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unskip.data.sets import load
from unskip.io.load import load_model
from unskip.reproduce.registry import Outcome, between, one_of, reproduction
from unskip.reproduce.starts import Prediction, prediction_lines, predictions
from unskip.reproduce.trained import Trained, flags, train
from unskip.ship import loss_in_bits
from unskip.train.many import Finished
from unskip.train.recipe import Recipe, load_recipe

NAME = "attention"
SHAPED = {"attention": "shaped"}
# label, name of the network, its options; `half` has learners of 2.5 C hidden units
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "residual": ("residual", "gpt_small_char", {}),
    "residual_narrow": ("residual, MLPs of 2.5 C, parameters of the half carry", "gpt_small_char", {"mlp_ratio": 2.5}),
    "plain": ("no skips, nothing else", "plain_gpt_small_char", {}),
    "shaped_mlp": ("shaped attention, ordinary MLP", "plain_gpt_small_char", SHAPED),
    "shaped_half": ("shaped attention, half carried", "pnnh_gpt_small_char", SHAPED),
    "shaped_random": ("the same, learners from random weights", "pnnh_gpt_small_char", {"linear_start": False}),
    "shaped_full": ("shaped attention, full carry (upper bound)", "full_carry_gpt_small_char", SHAPED),
    "value_skipinit": ("Value-SkipInit, half carried", "pnnh_gpt_small_char", {"attention": "value_skipinit"}),
    "espa": ("E-SPA, half carried", "pnnh_gpt_small_char", {"attention": "espa"}),
    "cut": ("Cutting the Skip, ordinary MLP", "plain_gpt_small_char", {"attention": "cut"}),
}
COLOURS = [f"C{i}" for i in range(10)]


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(Trained):
    """What can be set."""

    epochs: Annotated[int | None, "times that the text is gone through", between(1, 1_000_000)] = 15
    dataset: Annotated[str, "the data set, a text", one_of("text")] = "text"
    depths: Annotated[str, "layers, with commas between"] = "24,48"
    width: Annotated[int, "channels; a multiple of the heads", between(8, 8192)] = 384
    heads: Annotated[int, "heads", between(1, 512)] = 6
    context: Annotated[int, "tokens in a row", between(2, 8192)] = 256
    batch: Annotated[int, "texts in an update", between(1, 65536)] = 64
    optimizers: Annotated[str, "muon, adamw or both, with a comma between"] = "muon,adamw"
    muon_rates: Annotated[str, "learning rates for Muon"] = "5e-4,1e-3,2e-3"
    adamw_rates: Annotated[str, "learning rates for AdamW"] = "1e-4,3e-4,1e-3"
    clip: Annotated[float, "largest norm of the gradient; 0: off", between(0, 1e6)] = 1.0
    eps: Annotated[float, "AdamW's eps", between(1e-16, 1.0)] = 1e-8
    warmup: Annotated[float, "share of the updates in which the learning rate rises", between(0, 1)] = 0.1
    predict: Annotated[
        int, "say which runs start from their first updates, so many, made once more on the CPU; 0: don't",
        between(0, 10_000),
    ] = 0  # fmt: skip
    int8: Annotated[
        bool, "measure each row's loss with W8A8 and W8A6, at its best rate and for seed 0; not with --results-only"
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.int8 and self.results_only:
            raise ValueError(
                "reproduce: int8 needs the trained weights, which results_only drops; leave one of them out."
            )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A row at a depth with an optimizer."""

    row: str
    depth: int
    optimizer: str

    def name(self, rate: float, seed: int) -> str:
        return f"{self.row}_{self.depth}_{self.optimizer}_{rate:g}_s{seed}"


def parse(text: str, option: str, kind: type, known: tuple[str, ...] = ()) -> list[Any]:
    """Numbers or names with commas between."""
    try:
        found = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or any(known and part not in known for part in found) or (not known and min(found) <= 0):
        words = f"some of {', '.join(known)}" if known else "numbers above 0"
        raise ValueError(f"reproduce: {option}={text!r} must be {words}, with commas between.")
    return found


def recipe_of(cell: Cell, rate: float, seed: int, settings: AttentionSettings) -> Recipe:
    """The recipe of one run: shakespeare-pnnh-24 but for what the row, the grid and the machine want."""
    _, model, options = ROWS[cell.row]
    sizes = {"width": settings.width, "depth": cell.depth, "heads": settings.heads, "context": settings.context}
    muon = cell.optimizer == "muon"
    epochs = settings.epochs or 1
    return load_recipe(
        "shakespeare-pnnh-24",
        model=model,
        options={**sizes, **options},
        context=settings.context,
        batch=settings.batch,
        epochs=epochs,
        seed=seed,
        optimizer=cell.optimizer,
        lr=rate,
        min_lr=rate / 10,
        momentum=0.95 if muon else 0.9,
        nesterov=muon,
        eps=settings.eps,
        clip=settings.clip,
        weight_decay=0.1 if settings.weight_decay is None else settings.weight_decay,
        warmup_epochs=settings.warmup * epochs,
        device="auto" if settings.gpu else "cpu",
        precision="bf16" if settings.gpu else "fp32",
        compile="blocks" if settings.compile else "no",
        save_seconds=60.0,
    )


CALIBRATED = 128  # texts that ranges of what layers read are taken from


CALIBRATED = 128  # texts that ranges of what layers read are taken from


def in_bits(folders: Mapping[Cell, Path], recipes: Mapping[str, Recipe], settings: AttentionSettings) -> list[str]:
    """A table of losses on the validation text in float and in few bits, a line for each cell; [] unless asked for."""
    if not settings.int8:
        return []
    recipe = next(iter(recipes.values()))
    data, length = load(recipe.data, settings.data), settings.context
    held = (data.test if data.val is None else data.val).labels
    learnt = data.train.labels[: CALIBRATED * length]
    count = (len(held) - 1) // length
    test = tuple(held[start : start + count * length].view(count, length) for start in (0, 1))
    calibrate = learnt[: len(learnt) // length * length].view(-1, length)
    lines = ["", "| layers | row | optimizer | float | W8A8 | W8A6 |", "|---:|---|---|---:|---:|---:|"]
    for cell, folder in folders.items():
        model = load_model(str(folder), command="reproduce").model.eval()
        found = loss_in_bits(model, calibrate, test)  # type: ignore[arg-type]
        cells = (f"{loss:.4f} ({found.increase(bits):+.4f})" for bits, loss in found.quantized.items())
        lines.append(
            f"| {cell.depth} | {ROWS[cell.row][0]} | {cell.optimizer} | {found.exact:.4f} | {' | '.join(cells)} |"
        )
    about = f"Losses on {count:,} texts; linear layers in few bits (`unskip.ship.loss_in_bits`)"
    return [*lines, "", f"{about}, ranges from {len(calibrate)} texts of the training part."]


def best(run: Finished) -> float:
    """The validation loss of the best epoch; infinite where the run diverged."""
    return min((row["val_loss"] for row in run.epochs if row.get("val_loss") is not None), default=float("inf"))


@reproduction(NAME, settings=AttentionSettings, trains=True)
def attention(settings: AttentionSettings, folder: Path) -> Outcome:
    rows = parse(settings.rows, "rows", str, tuple(ROWS)) if settings.rows else list(ROWS)
    depths = parse(settings.depths, "depths", int)
    optimizers = parse(settings.optimizers, "optimizers", str, ("muon", "adamw"))
    rates = {name: parse(getattr(settings, f"{name}_rates"), f"{name}_rates", float) for name in optimizers}
    cells = [Cell(row=row, depth=d, optimizer=o) for d in depths for o in optimizers for row in rows]
    first = {cell.name(rate, 0): recipe_of(cell, rate, 0, settings) for cell in cells for rate in rates[cell.optimizer]}
    runs = train(first, settings, folder / "runs")
    chosen = {c: min(rates[c.optimizer], key=lambda rate, c=c: best(runs[c.name(rate, 0)])) for c in cells}  # type: ignore[misc]
    more = {
        cell.name(rate, seed): recipe_of(cell, rate, seed, settings)
        for seed in range(1, settings.seeds)
        for cell, rate in chosen.items()
    }
    runs |= train(more, settings, folder / "runs") if more else {}
    more_lines = in_bits({cell: folder / "runs" / cell.name(rate, 0) for cell, rate in chosen.items()}, first, settings)
    return outcome(
        settings, cells, chosen, rates, runs, predictions(first, runs, settings.data, settings.predict), more_lines
    )


def outcome(
    settings: AttentionSettings,
    cells: list[Cell],
    chosen: Mapping[Cell, float],
    rates: Mapping[str, list[float]],
    runs: Mapping[str, Finished],
    predicted: Mapping[str, Prediction],
    bits: list[str],
) -> Outcome:
    lines = [
        "| layers | row | optimizer | best rate | validation loss | less residual's | training loss then | weights |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    seeds = {cell: [runs[cell.name(rate, seed)] for seed in range(settings.seeds)] for cell, rate in chosen.items()}
    means = {cell: statistics.fmean(map(best, of)) for cell, of in seeds.items()}
    for cell, of in seeds.items():
        losses = [best(run) for run in of]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 and max(losses) < float("inf") else ""
        base = min((v for c, v in means.items() if c.row == "residual" and c.depth == cell.depth), default=None)
        trained = [min(run.epochs, key=lambda row: row["val_loss"])["loss"] for run in of if run.epochs]
        weights = next((f"{run.parameters:,}" for run in of if run.parameters), "")
        lines.append(
            f"| {cell.depth} | {ROWS[cell.row][0]} | {cell.optimizer} | {chosen[cell]:g} | {means[cell]:.3f}{spread} | "
            f"{'' if base is None else f'{means[cell] - base:+.3f}'} | "
            f"{f'{statistics.fmean(trained):.3f}' if trained else 'diverged'} | {weights} |"
        )
    seconds = sum(run.seconds for run in runs.values())
    about = (
        f"Width {settings.width}, context {settings.context}, batch {settings.batch}, {settings.epochs} epochs, "
        f"{settings.seeds} seeds at each row's best rate; ± is the standard deviation over them. Losses are means over "
        "tokens in nats, of the best epoch on validation."
    )
    command = f"`unskip reproduce {NAME} {flags(settings)}`: {seconds:.0f} s of training in all."
    grid = {
        name: {"losses": [row.get("val_loss") for row in run.epochs], "seconds": run.seconds, "loss": best(run)}
        for name, run in runs.items()
    }
    found = [*prediction_lines(predicted, settings.predict), *bits]
    numbers: dict[str, Any] = {"runs": grid, "parameters": {name: run.parameters for name, run in runs.items()}}
    if predicted:
        numbers["predictions"] = {name: asdict(each) for name, each in predicted.items()}
    return Outcome(
        lines=(*lines, about, *found),
        numbers=numbers,
        readme=(
            about,
            "",
            *lines,
            *found,
            "",
            "## How",
            command,
            "`results.json` has the losses of every epoch of every run.",
        ),
        figure=draw(cells, rates, runs),
    )


def draw(cells: list[Cell], rates: Mapping[str, list[float]], runs: Mapping[str, Finished]) -> Figure:
    """The best validation loss over the depth at each row's best rate, where there are several depths.

    Below it, where there are several learning rates, the loss over them, a panel for each depth and optimizer.
    """
    depths, optimizers = sorted({cell.depth for cell in cells}), list(dict.fromkeys(cell.optimizer for cell in cells))
    panels = [(depth, optimizer) for optimizer in optimizers for depth in depths]
    rows = [
        kind for kind, there in (("depth", len(depths) > 1), ("rate", any(len(r) > 1 for r in rates.values()))) if there
    ]
    rows = rows or ["rate"]
    wide = max(len(optimizers) if kind == "depth" else len(panels) for kind in rows)
    figure = Figure(figsize=(max(4.6, 3.2 * wide), 3.8 * len(rows)), dpi=120, layout="constrained")
    parts = dict(zip(rows, figure.subfigures(len(rows), 1, squeeze=False)[:, 0], strict=True))

    def lowest(cell: Cell) -> float:
        return min(best(runs[cell.name(rate, 0)]) for rate in rates[cell.optimizer])

    def line(place: Axes, row: str, xs: list[float], ys: list[float]) -> None:
        place.plot(xs, ys, "o-", ms=4, lw=1.4, label=row, color=COLOURS[list(ROWS).index(row)])

    names = list(dict.fromkeys(cell.row for cell in cells))
    for kind, part in parts.items():
        shown = [(0, optimizer) for optimizer in optimizers] if kind == "depth" else panels
        axes = part.subplots(1, len(shown), squeeze=False, sharey=True)[0]
        for place, (depth, optimizer) in zip(axes, shown, strict=True):
            for row in names:
                own = {cell.depth: cell for cell in cells if (cell.row, cell.optimizer) == (row, optimizer)}
                if kind == "depth":
                    line(place, row, [*map(float, depths)], [lowest(own[d]) for d in depths])
                else:
                    losses = [best(runs[own[depth].name(rate, 0)]) for rate in rates[optimizer]]
                    line(place, row, rates[optimizer], losses)
            if kind == "depth":
                place.set(title=optimizer, xscale="log", xlabel="layers")
                place.set_xticks(depths, labels=map(str, depths))
                place.minorticks_off()
            else:
                place.set(title=f"{depth} layers, {optimizer}", xscale="log", xlabel="learning rate")
            place.grid(color="#e5e7eb")
        axes[0].set_ylabel("validation loss (nats)")
        axes[-1].legend(frameon=False, fontsize=7)
    return figure
