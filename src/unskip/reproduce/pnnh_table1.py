"""Zhang et al. 2024, Table 1 (section 5.2): CIFAR test errors of residual, plain and PNNH networks.

On CIFAR-100 the paper's column for it is shown.
"""

from pathlib import Path
from typing import Any

from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, train_table
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
ALGORITHM_1 = {"transition": "coded", "fit": "sgd"}  # coded transitions have the parameters that the paper prints
OURS: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # by row: label, model, method, options
    "pnnh_resnet110_wide": ("PNNH-110, wide", "pnnh_resnet110_wide", "", {}),
    "pnnh_algorithm1_resnet110": (
        "PNNH-110, the literal paper: coders by plain SGD as in Algorithm 1, coded transitions",
        "resnet110",
        "pnnh_paper",
        ALGORITHM_1,
    ),
    "pnnh_paper_resnet110": ("PNNH-110, as pnnh_paper has it: coders on the floor", "resnet110", "pnnh_paper", {}),
    "residual_half_resnet110": (
        "upper bound, the learners of PNNH-110 beside whole skips",
        "resnet110",
        "residual_half",
        {},
    ),
}


def table1_rows(dataset: str = "cifar10") -> list[Row]:
    """The paper's rows, and ours that explain them: its literal setting, the wide network, the upper bound."""
    column = "c100" if dataset == "cifar100" else "c10"
    rows = []
    left = {architecture: iter(models) for architecture, models in RUN.items()}
    for printed in paper_table("pnnh", "1").rows:
        architecture = str(printed["architecture"])
        model = next(left[architecture]) if architecture in left else None
        rows.append(
            Row(
                name=model or architecture,
                label=architecture,
                recipe=None if model is None else load_recipe("cifar10-pnnh-110", model=model),
                error=printed[f"{column}_error"],
                spread=printed[f"{column}_spread"],
                params=printed["params"],
            )
        )
    for name, (label, model, method, options) in OURS.items():
        recipe = load_recipe("cifar10-pnnh-110", model=model, method=method, options=options)
        rows.append(Row(name=name, label=f"ours: {label}", recipe=recipe))
    return rows


@reproduction("pnnh-table1", settings=Trained, trains=True)
def table1(settings: Trained, folder: Path) -> Outcome:
    table = train_table("pnnh-table1", settings, table1_rows(settings.dataset), folder)
    findings = [
        table.difference("pnnh_resnet110", "resnet110", "PNNH-110 less ResNet-110"),
        table.difference("pnnh_resnet110_wide", "resnet110", "PNNH-110 wide less ResNet-110"),
        table.difference("pnnh_algorithm1_resnet110", "resnet110", "PNNH-110, the literal paper, less ResNet-110"),
        table.difference("pnnh_algorithm1_resnet110", "plain_resnet110", "the same less Plain-110"),
        table.difference("pnnh_wrn28_10", "wrn28_10", "PNNH on WRN-28-10 less WRN-28-10"),
    ]
    return table.outcome(findings, datasets=("cifar10", "cifar100"))
