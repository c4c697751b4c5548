"""Zhang et al. 2024, Table 1 (section 5.2): CIFAR test errors of residual, plain and PNNH networks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, chosen, difference, outcome, train_rows
from unskip.train.recipe import load_recipe

# By the paper's words for an architecture; the print has two DiracNets, one after the other.
RUN = {
    "ResNet-110": ["resnet110"],
    "Plain-110": ["plain_resnet110"],
    "Plain-110 + PNNH": ["pnnh_resnet110"],
    "WRN-28-10": ["wrn28_10"],
    "Plain(WRN-28-10) + PNNH": ["pnnh_wrn28_10"],
    "DiracNet": ["dirac_wrn28_5", "dirac_wrn28_10"],
}


@dataclass(frozen=True, kw_only=True)
class Table1(Trained):
    """What can be set. On CIFAR-100 the paper's column for it is shown."""


def table1_rows(dataset: str = "cifar10") -> list[Row]:
    """The paper's rows, and ours that explain them: its literal setting, the wide network, the upper bound."""
    column = "c100" if dataset == "cifar100" else "c10"
    rows = []
    left = {architecture: iter(networks) for architecture, networks in RUN.items()}
    for printed in paper_table("pnnh", "1").rows:
        architecture = str(printed["architecture"])
        network = next(left[architecture]) if architecture in left else None
        rows.append(
            Row(
                name=network or architecture,
                label=architecture,
                recipe=None if network is None else load_recipe("cifar10-pnnh-110", model=network),
                error=printed[f"{column}_error"],
                spread=printed[f"{column}_spread"],
                params=printed["params"],
            )
        )
    wide = "pnnh_resnet110_wide"
    ours: dict[str, tuple[str, dict[str, Any]]] = {
        wide: ("ours: PNNH-110, wide", {"model": wide}),
        "pnnh_paper_resnet110": (
            "ours: PNNH-110, the paper's literal setting",
            {"model": "resnet110", "method": "pnnh_paper"},
        ),
        "residual_half_resnet110": (
            "ours: upper bound, the learners of PNNH-110 beside whole skips",
            {"model": "resnet110", "method": "residual_half"},
        ),
    }
    for name, (label, fields) in ours.items():
        rows.append(Row(name=name, label=label, recipe=load_recipe("cifar10-pnnh-110", **fields)))
    return rows


@reproduction("pnnh-table1", config=Table1, trains=True)
def table1(config: Table1, folder: Path) -> Outcome:
    rows = chosen(table1_rows(config.dataset), config)
    runs = train_rows(rows, config, folder)
    findings = [
        *difference(rows, runs, "pnnh_resnet110", "resnet110", "PNNH-110 less ResNet-110"),
        *difference(rows, runs, "pnnh_resnet110_wide", "resnet110", "PNNH-110 wide less ResNet-110"),
        *difference(rows, runs, "pnnh_wrn28_10", "wrn28_10", "PNNH on WRN-28-10 less WRN-28-10"),
    ]
    return outcome("pnnh-table1", config, rows, runs, findings=findings, datasets=("cifar10", "cifar100"))
