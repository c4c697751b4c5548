"""Oyedotun et al. 2020, ICPR, Table III (section VI.C): CIFAR-10 with and without skip connections."""

from pathlib import Path

from unskip.reproduce.papers import Cell, paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, train_table
from unskip.train.recipe import load_recipe

# By the paper's model and layers: our network and the recipe that trains it.
RUN: dict[tuple[Cell, Cell], tuple[str, str]] = {
    ("ResNet", 56): ("resnet56", "cifar10-resnet-110"),
    ("ResNet", 110): ("resnet110", "cifar10-resnet-110"),
    ("PlainNet-BN", 56): ("plain_resnet56", "cifar10-plain-110"),
    ("Proposed PlainNet", 50): ("plainnet50", "cifar10-plainnet-50"),
}


def table3_rows() -> list[Row]:
    rows = []
    for printed in paper_table("plainnet", "III").rows:
        paper, layers = printed["model"], printed["layers"]
        model, recipe = RUN.get((paper, layers), ("", ""))
        rows.append(
            Row(
                name=model or f"{paper} {layers}",
                label=f"{paper}, {layers} layers",
                recipe=load_recipe(recipe, model=model) if model else None,
                error=printed["test_error"],
                params=printed["params"],
            )
        )
    return rows


@reproduction("plainnet-table3", settings=Trained, trains=True)
def table3(settings: Trained, folder: Path) -> Outcome:
    return train_table("plainnet-table3", settings, table3_rows(), folder).outcome()
