"""Our headline on CIFAR-10: the wide PNNH-110 beside ResNet-110, after 30 and after 200 epochs, by one recipe.

After 30 epochs a tenth of the training images is held out for validation; after 200 all of them are trained on.
"""

from dataclasses import dataclass
from pathlib import Path

from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, chosen, difference, outcome, train_rows
from unskip.train.recipe import load_recipe

MODELS = {"resnet110": "ResNet-110", "pnnh_resnet110_wide": "PNNH-110, wide", "pnnh_resnet20_wide": "PNNH-20, wide"}


@dataclass(frozen=True, kw_only=True)
class Headlines(Trained):
    """What can be set. `--epochs` is for trying it out: it shortens every row."""


def headline_rows() -> list[Row]:
    """One row for each model and length."""
    return [
        Row(
            name=f"{model}_{epochs}",
            label=f"{label}, {epochs} epochs",
            recipe=load_recipe(
                "cifar10-pnnh-110-wide", model=model, epochs=epochs, val_fraction=0.1 if epochs == 30 else 0.0
            ),
        )
        for epochs in (30, 200)
        for model, label in MODELS.items()
    ]


@reproduction("cifar10-headlines", config=Headlines, trains=True)
def headlines(config: Headlines, folder: Path) -> Outcome:
    rows = chosen(headline_rows(), config)
    runs = train_rows(rows, config, folder)
    findings = [
        sentence
        for epochs in (30, 200)
        for sentence in difference(
            rows, runs, f"pnnh_resnet110_wide_{epochs}", f"resnet110_{epochs}",
            f"PNNH-110 wide less ResNet-110 after {epochs} epochs",
        )
    ]  # fmt: skip
    return outcome("cifar10-headlines", config, rows, runs, findings=findings)
