"""Oyedotun et al. 2020, ICPR, Table III (section VI.C): CIFAR-10 with and without skip connections."""

from dataclasses import dataclass
from pathlib import Path

from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, chosen, outcome, train_rows
from unskip.train.recipe import load_recipe

# By the paper's model and layers: our network and the recipe that it trains by.
RUN = {
    ("ResNet", 56): ("resnet56", "cifar10-resnet-110"),
    ("ResNet", 110): ("resnet110", "cifar10-resnet-110"),
    ("PlainNet-BN", 56): ("plain_resnet56", "cifar10-plain-110"),
    ("Proposed PlainNet", 50): ("plainnet50", "cifar10-plainnet-50"),
}


@dataclass(frozen=True, kw_only=True)
class Table3(Trained):
    """What can be set. Without --epochs each row has as many as its own recipe."""


def table3_rows() -> list[Row]:
    rows = []
    for printed in paper_table("plainnet", "III").rows:
        model, layers = str(printed["model"]), printed["layers"]
        network, recipe = RUN.get((model, layers), (None, ""))  # type: ignore[arg-type]
        rows.append(
            Row(
                name=network or f"{model} {layers}",
                label=f"{model}, {layers} layers",
                recipe=None if network is None else load_recipe(recipe, model=network),
                error=printed["test_error"],
                params=printed["params"],
            )
        )
    return rows


@reproduction("plainnet-table3", config=Table3, trains=True)
def table3(config: Table3, folder: Path) -> Outcome:
    rows = chosen(table3_rows(), config)
    return outcome("plainnet-table3", config, rows, train_rows(rows, config, folder))
