"""Oyedotun et al. 2020, Table II (section VI.C): 100-layer MLPs on USPS, with and without BatchNorm, LReLU, max-norm.

1. Select: each row at seven learning rates of the paper's range [0.0001-0.1], one seed, on nine tenths of the training
   images. The rate with the lowest validation error is the row's.
2. Final: each row at its rate, on all training images, otherwise by the recipe `usps-plainnet-100`. Errors are those of
   the last epoch, with BatchNorm recalibrated on the training images.

The paper mentions no schedule. `--schedule constant` takes its range for rates to choose from; `cosine` also as the
range that the rate falls through, from the chosen one to 0.0001.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, chosen, outcome, run_recipe, train, train_rows
from unskip.train.recipe import Recipe, load_recipe

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # the paper's range, two to a decade
MIN_LR = 1e-4  # where a falling rate ends: the lower end of the range


@dataclass(frozen=True, kw_only=True)
class Table2(Trained):
    """What can be set."""

    select_epochs: Annotated[int, "epochs of the runs that choose the learning rate"] = 100
    schedule: Annotated[str, "schedule of the learning rate: constant, or cosine down to 0.0001"] = "constant"
    depth: Annotated[int, "layers"] = 100
    dataset: Annotated[str, "the data set: npz (usps.npz: x_train, y_train, x_test, y_test); digits, to try it out"] = (
        "npz"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.select_epochs, self.depth) < 1:
            raise ValueError(
                f"plainnet-table2: select_epochs={self.select_epochs} and depth={self.depth} must be at least 1."
            )
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"plainnet-table2: schedule={self.schedule!r} must be constant or cosine.")


def table2_rows(config: Table2) -> list[Row]:
    """The paper's rows. A row's name is its components."""
    options = {"depth": config.depth, **({"img_size": 8} if config.dataset == "digits" else {})}
    base = load_recipe(
        "usps-plainnet-100", schedule=config.schedule, min_lr=MIN_LR if config.schedule == "cosine" else 0.0,
        val_fraction=0.0,
    )  # fmt: skip
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


def select_rates(rows: list[Row], config: Table2, folder: Path) -> dict[str, float]:
    """The learning rate of each row with the lowest validation error. A diverged run counts as 100 %."""
    recipes: dict[str, Recipe] = {}
    for row in rows:
        assert row.recipe is not None
        base = run_recipe(row.recipe, config, seed=0).replace(epochs=config.select_epochs, val_fraction=0.1)
        recipes |= {f"{row.name} lr {lr:g}": base.replace(lr=lr) for lr in RATES}
    runs = train(recipes, config, folder / "select")

    def error(row: Row, lr: float) -> float:
        found = runs[f"{row.name} lr {lr:g}"].val_error
        return 100.0 if found is None else found

    return {row.name: min(RATES, key=lambda lr: error(row, lr)) for row in rows}


@reproduction("plainnet-table2", config=Table2, trains=True)
def table2(config: Table2, folder: Path) -> Outcome:
    rows = chosen(table2_rows(config), config)
    rates = select_rates(rows, config, folder)
    at_rate = [
        Row(name=row.name, label=f"{row.label}, rate {rates[row.name]:g}", error=row.error,
            recipe=row.recipe.replace(lr=rates[row.name]) if row.recipe else None)
        for row in rows
    ]  # fmt: skip
    runs = train_rows(at_rate, config, folder)
    findings = [
        f"{config.depth} layers, {config.schedule} rate, chosen on validation after {config.select_epochs} epochs: "
        f"{', '.join(f'{name} {lr:g}' for name, lr in rates.items())}."
    ]
    return outcome("plainnet-table2", config, at_rate, runs, findings=findings, datasets=("npz",))
