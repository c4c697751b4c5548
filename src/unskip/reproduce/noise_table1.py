"""Yu and Tomasi 2019, arXiv:1905.10944, Table 1 (section A): simplified plain and residual networks on CIFAR-10."""

from pathlib import Path

from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, train_table
from unskip.train.recipe import load_recipe


def table1_rows() -> list[Row]:
    """Plain networks of 20 and 32 layers and residual ones have the larger learning rate, as section A says."""
    rows = []
    table = paper_table("noise_stability", "1")
    for depth in (printed["depth"] for printed in table.rows):
        for kind, column in (("plain", "plain"), ("resnet", "residual")):
            slow = kind == "plain" and depth == 44
            recipe = "cifar10-simplified-plain-44" if slow else "cifar10-simplified-resnet-20"
            name = f"simplified_{kind}{depth}"
            error = round(100 * table.value(f"{column}_error", depth=depth), 2)
            label = f"{column}, {depth} layers"
            rows.append(Row(name=name, label=label, recipe=load_recipe(recipe, model=name), error=error))
    return rows


@reproduction("noise-table1", settings=Trained, trains=True)
def table1(settings: Trained, folder: Path) -> Outcome:
    return train_table("noise-table1", settings, table1_rows(), folder).outcome()
