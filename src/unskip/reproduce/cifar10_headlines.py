"""Our headlines on CIFAR-10: PNNH-110 beside residual networks of its depth and of its size, by one recipe.

After 30 epochs a tenth of the training images is held out for validation; after 200 all of them are trained on. What is
to close the rest of the gap to ResNet-110 is compared after 30 epochs, by validation loss, which tells networks apart
that errors don't. `--rows` chooses; `--epochs`, which shortens every row, is for trying it out.
"""

from pathlib import Path
from typing import Any

from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, train_table
from unskip.train.recipe import load_recipe

MODELS = {  # by row: label and network
    "resnet110": ("ResNet-110", "resnet110"),
    "pnnh_resnet110_wide": ("PNNH-110, wide", "pnnh_resnet110_wide"),
    "pnnh_resnet110": ("PNNH-110", "pnnh_resnet110"),
    "pnnh_resnet20_wide": ("PNNH-20, wide", "pnnh_resnet20_wide"),
    "resnet56": ("ResNet-56, 0.85 M", "resnet56"),
    "resnet110_thin": ("ResNet-110 at 12/24/48, 0.97 M", "resnet110:widths=[12,24,48]"),
}
VAL_FRACTION = {30: 0.1, 200: 0.0}  # by epochs

# What changes in the recipe of the wide PNNH-110, by row; with "twin" also in that of ResNet-110.
W2, CONV2 = "*.learner.conv2.weight", "*.conv2.weight"
GAP: dict[str, tuple[str, dict[str, Any]]] = {
    "norm_after_w2": ("a norm after W_2 too", {"model": "pnnh_resnet110_wide:norm=both"}),
    "norm_after_w2_alone": (
        "a norm after W_2, none before pooling",
        {"model": "pnnh_resnet110_wide:norm=both,head_norm=false"},
    ),
    "w2_slow": ("W_2 at half the rate", {"lr_scales": {W2: 0.5}}),
    "w2_fast": ("W_2 at twice the rate", {"lr_scales": {W2: 2.0}}),
    "decay_1e-3": ("weight decay 1e-3", {"weight_decay": 1e-3}),
    "shape_2x": (
        "widths 32/64/128, learners 8/16/31",
        {"model": "pnnh_resnet110_wide:widths=[32,64,128],hidden={32=8,64=16,128=31}"},
    ),
    "shape_2.5x": (
        "widths 40/80/160, learners 8/14/24",
        {"model": "pnnh_resnet110_wide:widths=[40,80,160],hidden={40=8,80=14,160=24}"},
    ),
    "batch_64": ("batch 64, rate 0.05: more noise of batch norms", {"batch": 64, "lr": 0.05}),
    "ema": ("the average of the weights, decay 0.999", {"ema": 0.999}),
    "warmup_5": ("a warm-up of 5 epochs", {"warmup_epochs": 5.0}),
}
TWINS = ("decay_1e-3", "batch_64", "ema", "warmup_5")  # that ResNet-110 gets too


def headline_rows() -> list[Row]:
    """One row for each model and length, then the experiments after 30 epochs."""

    def row(name: str, label: str, epochs: int, **changes: Any) -> Row:
        recipe = load_recipe("cifar10-pnnh-110-wide", epochs=epochs, val_fraction=VAL_FRACTION[epochs], **changes)
        return Row(name=f"{name}_{epochs}", label=f"{label}, {epochs} epochs", recipe=recipe)

    rows = [row(name, label, n, model=model) for n in VAL_FRACTION for name, (label, model) in MODELS.items()]
    for name, (label, changes) in GAP.items():
        rows.append(row(name, f"PNNH-110, wide: {label}", 30, **changes))
        if name in TWINS:
            rows.append(row(f"resnet110_{name}", f"ResNet-110: {label}", 30, model="resnet110", **changes))
    return rows


@reproduction("cifar10-headlines", settings=Trained, trains=True)
def headlines(settings: Trained, folder: Path) -> Outcome:
    table = train_table("cifar10-headlines", settings, headline_rows(), folder)
    pairs = {"ResNet-110": "resnet110", "ResNet-56": "resnet56", "ResNet-110 at 12/24/48": "resnet110_thin"}
    differences = [
        table.difference(f"pnnh_resnet110_wide_{n}", f"{name}_{n}", f"PNNH-110 wide less {label} after {n} epochs")
        for n in VAL_FRACTION
        for label, name in pairs.items()
    ]
    return table.outcome([*differences, *table.validation()])
