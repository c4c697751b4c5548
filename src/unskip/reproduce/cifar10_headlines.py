"""Our headline on CIFAR-10: the wide PNNH-110 beside ResNet-110, after 30 and after 200 epochs, by one recipe.

After 30 epochs a tenth of the training images is held out for validation; after 200 all of them are trained on.
`--epochs`, which shortens every row, is for trying it out.
"""

from pathlib import Path

from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, train_table
from unskip.train.recipe import load_recipe

MODELS = {"resnet110": "ResNet-110", "pnnh_resnet110_wide": "PNNH-110, wide", "pnnh_resnet20_wide": "PNNH-20, wide"}
VAL_FRACTION = {30: 0.1, 200: 0.0}  # by epochs


def headline_rows() -> list[Row]:
    """One row for each model and length."""
    rows = []
    for epochs, val_fraction in VAL_FRACTION.items():
        for model, label in MODELS.items():
            recipe = load_recipe("cifar10-pnnh-110-wide", model=model, epochs=epochs, val_fraction=val_fraction)
            rows.append(Row(name=f"{model}_{epochs}", label=f"{label}, {epochs} epochs", recipe=recipe))
    return rows


@reproduction("cifar10-headlines", settings=Trained, trains=True)
def headlines(settings: Trained, folder: Path) -> Outcome:
    table = train_table("cifar10-headlines", settings, headline_rows(), folder)
    return table.outcome(
        table.difference(
            f"pnnh_resnet110_wide_{n}", f"resnet110_{n}", f"PNNH-110 wide less ResNet-110 after {n} epochs"
        )
        for n in VAL_FRACTION
    )
