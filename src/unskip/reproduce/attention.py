"""GPTs without skips beside residual ones, on a text: rows of methods, depths, and a grid of learning rates for each.

Every row trains at every rate with seed 0. The other seeds train at the best rate of the row, by the validation loss of
its best epoch, so that each is at its own best. `unskip.models.gpt` is the network, docs/attention.md has the methods.
"""

import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unskip.data.sets import load
from unskip.io.load import load_model
from unskip.reproduce.registry import Outcome, between, one_of, reproduction
from unskip.reproduce.starts import prediction_lines, predictions
from unskip.reproduce.trained import Trained, flags, train, with_time_left
from unskip.ship import loss_in_bits
from unskip.train.many import Finished
from unskip.train.optim import CAPTURABLE
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
CALIBRATED = 128  # texts that ranges of what layers read are taken from


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
            raise ValueError("reproduce: int8 needs the trained weights, which results_only drops; leave one out.")


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
        cuda_graph=settings.gpu and settings.cuda_graph and "muon" in CAPTURABLE,  # the same for all runs at once
        compile="blocks" if settings.compile else "no",
        keep="last",  # what is compared is the validation loss of the best epoch, which needs no weights
        save_seconds=300.0,  # a pause saves too
    )


def best_epoch(run: Finished) -> Mapping[str, Any]:
    """The epoch with the least validation loss, which is infinite where the run diverged."""
    known = [row for row in run.epochs if row.get("val_loss") is not None]
    return min(known, key=lambda row: row["val_loss"], default={"val_loss": float("inf")})


def best(run: Finished) -> float:
    """The validation loss of the best epoch."""
    loss: float = best_epoch(run)["val_loss"]
    return loss


@reproduction(NAME, settings=AttentionSettings, trains=True)
def attention(settings: AttentionSettings, folder: Path) -> Outcome:
    rows = parse(settings.rows, "rows", str, tuple(ROWS)) if settings.rows else list(ROWS)
    depths = parse(settings.depths, "depths", int)
    optimizers = parse(settings.optimizers, "optimizers", str, ("muon", "adamw"))
    rates = {name: parse(getattr(settings, f"{name}_rates"), f"{name}_rates", float) for name in optimizers}
    cells = [Cell(row=row, depth=d, optimizer=o) for d in depths for o in optimizers for row in rows]
    first = {cell.name(rate, 0): recipe_of(cell, rate, 0, settings) for cell in cells for rate in rates[cell.optimizer]}
    began = time.monotonic()
    runs, ended = train(first, settings, folder / "runs")
    chosen = {}
    for cell in cells:
        losses = {rate: best(runs[n]) for rate in rates[cell.optimizer] if (n := cell.name(rate, 0)) in runs}
        if losses:
            chosen[cell] = min(losses, key=lambda rate: losses[rate])
    if ended is None:
        more = {
            cell.name(rate, seed): recipe_of(cell, rate, seed, settings)
            for seed in range(1, settings.seeds)
            for cell, rate in chosen.items()
        }
        found, ended = train(more, with_time_left(settings, began), folder / "runs")
        runs |= found
    found_of = predictions(first, runs, settings.data, settings.predict)
    folders = {cell: folder / "runs" / cell.name(rate, 0) for cell, rate in chosen.items()}
    extra = [*prediction_lines(found_of, settings.predict), *in_bits(folders, settings, first)]
    shown = outcome(settings, chosen, rates, runs, extra)
    numbers = {**shown.numbers, "predictions": {name: asdict(each) for name, each in found_of.items()}}
    return replace(shown, ended=ended, numbers=numbers if found_of else shown.numbers)


def in_bits(folders: Mapping[Cell, Path], settings: AttentionSettings, recipes: Mapping[str, Recipe]) -> list[str]:
    """A table of losses on the validation text in float and in few bits, a line for each cell; [] unless asked for."""
    if not settings.int8:
        return []
    data, length = load(next(iter(recipes.values())).data, settings.data), settings.context
    held = (data.test if data.val is None else data.val).labels
    count = (len(held) - 1) // length
    x, y = (held[start : start + count * length].view(count, length) for start in (0, 1))
    learnt = data.train.labels[: CALIBRATED * length]
    calibrate = learnt[: len(learnt) // length * length].view(-1, length)
    lines = ["", "| layers | row | optimizer | float | W8A8 | W8A6 |", "|---:|---|---|---:|---:|---:|"]
    for cell, folder in folders.items():
        model = load_model(str(folder), command="reproduce").model.eval()
        found = loss_in_bits(model, calibrate, (x, y))
        cells = (f"{loss:.4f} ({found.increase(bits):+.4f})" for bits, loss in found.quantized.items())
        lines.append(
            f"| {cell.depth} | {ROWS[cell.row][0]} | {cell.optimizer} | {found.exact:.4f} | {' | '.join(cells)} |"
        )
    about = f"Losses on {count:,} texts; linear layers in few bits (`unskip.ship.loss_in_bits`)"
    return [*lines, "", f"{about}, ranges from {len(calibrate)} texts of the training part."]


def outcome(
    settings: AttentionSettings,
    chosen: Mapping[Cell, float],
    rates: Mapping[str, list[float]],
    runs: Mapping[str, Finished],
    extra: Iterable[str] = (),
) -> Outcome:
    """The table, and `extra` lines behind it."""
    lines = [
        "| layers | row | optimizer | best rate | validation loss | less residual's | training loss then | weights |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    seeds = {
        cell: [runs[name] for seed in range(settings.seeds) if (name := cell.name(rate, seed)) in runs]
        for cell, rate in chosen.items()
    }
    means = {cell: statistics.fmean(map(best, of)) for cell, of in seeds.items()}
    for cell, of in seeds.items():
        losses = [best(run) for run in of]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 and max(losses) < float("inf") else ""
        base = min((v for c, v in means.items() if c.row == "residual" and c.depth == cell.depth), default=None)
        trained = [epoch["loss"] for run in of if "loss" in (epoch := best_epoch(run))]
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
        f"tokens in nats, of the best epoch on validation. {len(runs)} runs are done."
    )
    command = f"`unskip reproduce {NAME} {flags(settings)}`: {seconds:.0f} s of training in all."
    grid = {
        name: {"losses": [row.get("val_loss") for row in run.epochs], "seconds": run.seconds, "loss": best(run)}
        for name, run in runs.items()
    }
    return Outcome(
        lines=(*lines, about, *extra),
        numbers={"runs": grid, "parameters": {name: run.parameters for name, run in runs.items()}},
        readme=(
            *(about, "", *lines, *extra, "", "## How", command),
            "`results.json` has the losses of every epoch of every run.",
        ),
        figure=draw(chosen, rates, runs) if chosen else None,
    )


def draw(cells: Iterable[Cell], rates: Mapping[str, list[float]], runs: Mapping[str, Finished]) -> Figure:
    """The best validation loss over the depth, a panel for each optimizer, where there are several depths.

    Below it, or alone, the loss over the learning rate, a panel for each depth and optimizer.
    """
    cells = list(cells)
    panels = list(dict.fromkeys((cell.depth, cell.optimizer) for cell in cells))
    optimizers, depths = list(dict.fromkeys(o for _, o in panels)), sorted({depth for depth, _ in panels})
    figure = Figure(figsize=(4.2 * max(len(panels), 1), 3.8 * (1 + (len(depths) > 1))), dpi=120, layout="constrained")
    *above, below = figure.subfigures(1 + (len(depths) > 1), 1, squeeze=False)[:, 0]

    def losses_of(cell: Cell) -> dict[float, float]:
        return {rate: best(runs[n]) for rate in rates[cell.optimizer] if (n := cell.name(rate, 0)) in runs}

    def line(place: Axes, row: str, points: Mapping[Any, float]) -> None:
        colour = COLOURS[list(ROWS).index(row)]
        place.plot([*points], [*points.values()], "o-", ms=4, lw=1.4, label=row, color=colour)
        place.grid(color="#e5e7eb")

    for part in above:
        for place, optimizer in zip(
            part.subplots(1, len(optimizers), squeeze=False, sharey=True)[0], optimizers, strict=True
        ):
            for row in dict.fromkeys(cell.row for cell in cells):
                own = sorted((c for c in cells if (c.row, c.optimizer) == (row, optimizer)), key=lambda c: c.depth)
                line(place, row, {cell.depth: min(losses_of(cell).values()) for cell in own})
            place.set(title=f"{optimizer}, best rate", xscale="log", xlabel="layers")
            place.set_xticks(depths, labels=[*map(str, depths)])
            place.minorticks_off()
    for place, (depth, optimizer) in zip(
        below.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True
    ):
        for cell in cells:
            if (cell.depth, cell.optimizer) == (depth, optimizer):
                line(place, cell.row, losses_of(cell))
        place.set(title=f"{depth} layers, {optimizer}", xscale="log", xlabel="learning rate")
    for part in (*above, below):
        part.axes[0].set_ylabel("validation loss (nats)")
        part.axes[-1].legend(frameon=False, fontsize=7)
    return figure
