"""Oyedotun et al. 2020, Figures 1 and 9 (sections IV.B and VI.C): error by depth, initialisation and BatchNorm.

MLPs of ReLUs from three initialisations without BatchNorm, with BatchNorm, and the proposed PlainNet. Figure 1 is
Figure 9 with one initialisation. The paper gives a range of learning rates and no schedule: each network trains at
every rate of `rates`, constant, and the one with the lowest training loss stands, since the claim is about
optimisation. BatchNorm's statistics are recalibrated, without which deep networks are not the ones that were trained.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from unskip._core.drawing import FAINT, INK, OTHER, PLAIN, PNNH, RESIDUAL, dress, legend, panels
from unskip.reproduce.images import IN_MEMORY
from unskip.reproduce.registry import Limit, Outcome, between, reproduction
from unskip.reproduce.trained import Row, Trained, train_table
from unskip.train.many import Finished
from unskip.train.recipe import load_recipe

VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # label, colour, options of `plainnet_mlp`
    "uniform": ("uniform ±0.05", FAINT, {"norm": False, "activation": "relu", "init": "uniform"}),
    "glorot": ("Glorot", OTHER, {"norm": False, "activation": "relu", "init": "glorot"}),
    "he": ("He", PLAIN, {"norm": False, "activation": "relu", "init": "he"}),
    "bn": ("BatchNorm", RESIDUAL, {"norm": True, "activation": "relu", "init": "he"}),
    "proposed": ("proposed", PNNH, {"norm": True, "activation": "lrelu", "init": "he"}),
}
FAILED = 50.0  # percent training error above which we say that a network does not train


def numbers(text: str, kind: type) -> list[Any]:
    """The numbers in a list with commas; [] where it is none."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        return []


def list_of(kind: type, least: float, most: float, example: str) -> Limit:
    def holds(text: str) -> bool:
        found = numbers(text, kind)
        return bool(found) and all(least <= value <= most for value in found)

    return Limit(holds, f"numbers from {least:g} to {most:g} with commas between, such as {example}")


@dataclass(frozen=True, kw_only=True)
class Figure9(Trained):
    """What can be set."""

    depths: Annotated[str, "hidden layers, with commas between", list_of(int, 1, 10_000, "'3,10,50'")] = (
        "3,5,10,15,20,40,50,100"
    )
    width: Annotated[int, "units of a hidden layer", between(1, 100_000)] = 300
    size: Annotated[int, "side of the images in px: 16 for USPS, 32 for COIL-20", between(1, 1024)] = 16
    rates: Annotated[str, "learning rates to choose from", list_of(float, 1e-12, 100, "'0.01,0.001'")] = "0.01,0.001"
    seeds: Annotated[int, "runs of each network", between(1, 1000)] = 1
    dataset: Annotated[
        str, "the data set: npz (usps.npz: x_train, y_train, x_test, y_test); digits, to try it out", IN_MEMORY
    ] = "npz"


def name_of(variant: str, depth: int, rate: float) -> str:
    return f"{variant}-{depth}-{rate:g}"


def figure9_rows(settings: Figure9) -> list[Row]:
    """One row for each variant, depth and rate."""
    base = load_recipe("usps-plainnet-100", schedule="constant", min_lr=0.0, val_fraction=0.0)
    rows = []
    for variant, (label, _, options) in VARIANTS.items():
        recipe = base.replace(
            max_norm=base.optimizer.max_norm if variant == "proposed" else 0.0,
            recalibrate_batchnorm=base.run.recalibrate_batchnorm if options["norm"] else 0,
            image_size=settings.size,
        )
        for depth in numbers(settings.depths, int):
            shape = {"depth": depth, "width": settings.width, "img_size": settings.size}
            for rate in numbers(settings.rates, float):
                at_rate = recipe.replace(options={**options, **shape}, lr=rate)
                name = name_of(variant, depth, rate)
                rows.append(Row(name=name, label=f"{label}, {depth} layers, rate {rate:g}", recipe=at_rate))
    return rows


def training_error(run: Finished) -> float:
    """In percent, over the last epoch; guessing where the run diverged."""
    return run.epochs[-1]["error"] if run.epochs and run.test_error is not None else 100.0


def training_loss(run: Finished) -> float:
    return run.epochs[-1]["loss"] if run.epochs and run.test_error is not None else float("inf")


def best(runs: Sequence[Sequence[Finished]]) -> Sequence[Finished]:
    """The runs of the rate with the lowest mean training loss."""
    return min(runs, key=lambda seeds: statistics.fmean(training_loss(run) for run in seeds))


@reproduction("plainnet-figure9", settings=Figure9, trains=True)
def figure9(settings: Figure9, folder: Path) -> Outcome:
    table = train_table("plainnet-figure9", settings, figure9_rows(settings), folder)
    depths, rates = numbers(settings.depths, int), numbers(settings.rates, float)
    title = f"Error of MLPs by depth ({settings.dataset}, {settings.width} units a layer)"
    figure, axes = panels(1, 2, size=(9.2, 3.9), title=title)
    findings = []
    for variant, (label, colour, _) in VARIANTS.items():
        points = []
        for depth in depths:
            found = [table.runs.get(name_of(variant, depth, rate), []) for rate in rates]
            if not (known := [runs for runs in found if runs]):
                continue
            runs = best(known)
            tested = [100.0 if run.test_error is None else run.test_error for run in runs]
            points.append((depth, statistics.fmean(map(training_error, runs)), statistics.fmean(tested)))
        if not points:
            continue
        at, *errors_by_axes = zip(*points, strict=True)
        for ax, errors in zip(axes, errors_by_axes, strict=True):
            ax.plot(at, errors, "o-", color=colour, markersize=4, linewidth=1.3, label=label)
        deepest = max((depth for depth, error, _ in points if error < FAILED), default=0)
        each = ", ".join(f"{depth}: {error:.1f} / {test:.1f}" for depth, error, test in points)
        trains = f"The deepest that trains (training error below {FAILED:g} %) has {deepest} layers"
        grows = len(points) > 1 and all(b[2] >= a[2] for a, b in pairwise(points))
        findings.append(
            f"{label}, layers and training / test error %: {each}. {trains if deepest else 'None trains'}"
            f"{'; the test error grows with every step' if grows else ''}."
        )
    for ax, what in zip(axes, ("training", "test"), strict=True):
        dress(ax, x="hidden layers", y=f"{what} error (%)", title=what, log_x=True)
        ax.set_xticks(depths, [str(depth) for depth in depths])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.tick_params(axis="x", colors=INK)
    legend(axes[0])
    chosen = replace(table, rows=[row for row in table.rows if table.runs.get(row.name)])
    return chosen.outcome(findings, datasets=("npz",), figure=figure)
