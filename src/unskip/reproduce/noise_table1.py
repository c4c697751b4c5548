"""Yu and Tomasi 2019, arXiv:1905.10944, Table 1 (section A): simplified plain and residual networks on CIFAR-10."""

from dataclasses import dataclass
from pathlib import Path

from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, chosen, outcome, train_rows
from unskip.train.recipe import load_recipe


@dataclass(frozen=True, kw_only=True)
class Table1(Trained):
    """What can be set."""


def table1_rows() -> list[Row]:
    """Plain networks of 20 and 32 layers and residual ones have the larger learning rate, as section A says."""
    rows = []
    for printed in paper_table("noise_stability", "1").rows:
        depth = printed["depth"]
        for kind, column in (("plain", "plain"), ("resnet", "residual")):
            slow = kind == "plain" and depth == 44
            base = load_recipe("cifar10-simplified-plain-44" if slow else "cifar10-simplified-resnet-20")
            error = printed[f"{column}_error"]
            assert isinstance(error, float)  # a fraction
            rows.append(
                Row(
                    name=f"simplified_{kind}{depth}",
                    label=f"{column}, {depth} layers",
                    recipe=base.replace(model=f"simplified_{kind}{depth}"),
                    error=round(100 * error, 2),
                )
            )
    return rows


@reproduction("noise-table1", config=Table1, trains=True)
def table1(config: Table1, folder: Path) -> Outcome:
    rows = chosen(table1_rows(), config)
    return outcome("noise-table1", config, rows, train_rows(rows, config, folder))
