"""Zhang et al. 2024, Table 4 (Appendix C): the 110-layer PNNH network with coders of six pretext tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, one_of, reproduction
from unskip.reproduce.trained import Row, Trained, train_table
from unskip.train.recipe import load_recipe

PRETEXT = {  # the paper's tasks in our names
    "rectified normal": "rectified_normal",
    "no coder": "none",
    "no task": "random",
    "normal": "normal",
    "uniform": "uniform",
    "identity": "identity",
}


@dataclass(frozen=True, kw_only=True)
class Table4(Trained):
    """What can be set."""

    method: Annotated[
        str,
        "the method: pnnh_paper is the paper's literal setting, pnnh our defaults but for the coder",
        one_of("pnnh_paper", "pnnh"),
    ] = "pnnh_paper"
    depth: Annotated[int, "layers: 20, 32, 44, 56 or 110", one_of(20, 32, 44, 56, 110)] = 110


def table4_rows(method: str, depth: int) -> list[Row]:
    """The paper's six, and the pair average, which `pnnh` has by default."""
    tasks = {str(printed["task"]): printed["accuracy"] for printed in paper_table("pnnh", "4").rows}
    rows = []
    for task, accuracy in [*tasks.items(), ("ours: averages of channel pairs", None)]:
        name = PRETEXT.get(task, "group_average")
        error = round(100 - accuracy, 2) if isinstance(accuracy, float) else accuracy
        options = {"pretext": name}
        recipe = load_recipe("cifar10-pnnh-110", model=f"resnet{depth}", method=method, options=options)
        rows.append(Row(name=name, label=task, recipe=recipe, error=error))
    return rows


@reproduction("pnnh-table4", settings=Table4, trains=True)
def table4(settings: Table4, folder: Path) -> Outcome:
    table = train_table("pnnh-table4", settings, table4_rows(settings.method, settings.depth), folder)
    means = {row.label: mean for row in table.rows if (mean := table.mean(row.name)) is not None}
    order = sorted(means, key=lambda label: means[label])
    return table.outcome(
        [f"From best to worst, method {settings.method}, {settings.depth} layers: {', '.join(order)}."]
    )
