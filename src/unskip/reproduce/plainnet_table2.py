"""Oyedotun et al. 2020, Table II (section VI.C): 100-layer MLPs on USPS, with and without BatchNorm, LReLU, max-norm.

1. Select: each row at seven learning rates of the paper's range [0.0001-0.1], one seed, on nine tenths of the training
   images. The rate with the lowest validation error is the row's.
2. Final: each row at its rate, on all training images, otherwise by the recipe `usps-plainnet-100`. Errors are those of
   the last epoch, with BatchNorm recalibrated on the training images.

The paper mentions no schedule. `--schedule constant` takes its range for rates to choose from; `cosine` also as the
range that the rate falls through, from the chosen one to 0.0001.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from unskip.reproduce.images import IN_MEMORY
from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, between, one_of, reproduction
from unskip.reproduce.trained import Row, Trained, chosen, run_recipe, train, train_table, with_time_left
from unskip.train.recipe import load_recipe

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # the paper's range, two to a decade
MIN_LR = 1e-4  # where a falling rate ends: the lower end of the range


@dataclass(frozen=True, kw_only=True)
class Table2(Trained):
    """What can be set."""

    select_epochs: Annotated[int, "epochs of the runs that choose the learning rate", between(1, 1_000_000)] = 100
    schedule: Annotated[
        str, "schedule of the learning rate: constant, or cosine down to 0.0001", one_of("constant", "cosine")
    ] = "constant"
    depth: Annotated[int, "layers", between(1, 10_000)] = 100
    dataset: Annotated[
        str,
        "the data set: npz (usps.npz: x_train, y_train, x_test, y_test); digits, to try it out",
        IN_MEMORY,
    ] = "npz"


def table2_rows(settings: Table2) -> list[Row]:
    """The paper's rows. A row's name is its components."""
    options = {"depth": settings.depth, **({"img_size": 8} if settings.dataset == "digits" else {})}
    min_lr = MIN_LR if settings.schedule == "cosine" else 0.0
    base = load_recipe("usps-plainnet-100", schedule=settings.schedule, min_lr=min_lr, val_fraction=0.0)
    rows = []
    for printed in paper_table("plainnet", "II").rows:
        name = str(printed["components"])
        parts = name.split(" + ")
        recipe = base.replace(
            options={**options, "norm": "BN" in parts, "activation": "lrelu" if "LReLU" in parts else "relu"},
            max_norm=base.optimizer.max_norm if "max-norm" in parts else 0.0,
            recalibrate_batchnorm=base.run.recalibrate_batchnorm if "BN" in parts else 0,
        )
        rows.append(Row(name=name, label=name, recipe=recipe, error=printed["test_error"]))
    return rows


def select_rates(rows: list[Row], settings: Table2, folder: Path) -> dict[str, float]:
    """The learning rate of each row with the lowest validation error. A diverged run counts as 100 %."""
    recipes = {
        f"{row.name} lr {lr:g}": run_recipe(row.recipe, settings, seed=0).replace(
            epochs=settings.select_epochs, val_fraction=0.1, lr=lr
        )
        for row in rows
        if row.recipe is not None
        for lr in RATES
    }
    runs, ended = train(recipes, settings, folder / "select")
    if ended is not None:
        raise ended
    if len(runs) < len(recipes):
        raise ValueError(
            f"reproduce: {len(recipes) - len(runs)} of the {len(recipes)} runs that choose the learning rates are not "
            "in the folder; leave --no-train out."
        )

    def error(row: Row, lr: float) -> float:
        found = runs[f"{row.name} lr {lr:g}"].val_error
        return 100.0 if found is None else found

    return {row.name: min(RATES, key=lambda lr: error(row, lr)) for row in rows}


@reproduction("plainnet-table2", settings=Table2, trains=True)
def table2(settings: Table2, folder: Path) -> Outcome:
    rows = chosen(table2_rows(settings), settings)
    began = time.monotonic()
    rates = select_rates(rows, settings, folder)
    at_rate = []
    for row in rows:
        assert row.recipe is not None
        lr = rates[row.name]
        at_rate.append(replace(row, label=f"{row.label}, rate {lr:g}", recipe=row.recipe.replace(lr=lr)))
    finding = (
        f"{settings.depth} layers, {settings.schedule} rate, chosen on validation after {settings.select_epochs} "
        f"epochs: {', '.join(f'{name} {lr:g}' for name, lr in rates.items())}."
    )
    table = train_table("plainnet-table2", with_time_left(settings, began), at_rate, folder)
    return replace(table, settings=settings).outcome([finding], datasets=("npz",))
