"""Zhang et al. 2024, Table 4 (Appendix C): the 110-layer PNNH network with coders of six pretext tasks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import Row, Trained, chosen, outcome, summary, train_rows
from unskip.train.recipe import load_recipe

PRETEXT = {  # our names for the paper's tasks
    "rectified normal": "rectified_normal",
    "no coder": "none",
    "no task": "random",
    "normal": "normal",
    "uniform": "uniform",
    "identity": "identity",
}
METHODS = ("pnnh_paper", "pnnh")


@dataclass(frozen=True, kw_only=True)
class Table4(Trained):
    """What can be set."""

    method: Annotated[
        str, "the method: pnnh_paper is the paper's literal setting, pnnh our defaults but for the coder"
    ] = "pnnh_paper"
    depth: Annotated[int, "layers: 20, 32, 44, 56 or 110"] = 110

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise ValueError(f"pnnh-table4: method={self.method!r} must be {' or '.join(METHODS)}.")
        if self.depth not in (20, 32, 44, 56, 110):
            raise ValueError(f"pnnh-table4: depth={self.depth} must be 20, 32, 44, 56 or 110.")


def table4_rows(method: str, depth: int) -> list[Row]:
    """The paper's six, and the pair average, which `pnnh` has by default."""
    rows = []
    for printed in paper_table("pnnh", "4").rows:
        accuracy = printed["accuracy"]
        rows.append(
            Row(
                name=PRETEXT[str(printed["task"])],
                label=str(printed["task"]),
                error=round(100 - accuracy, 2) if isinstance(accuracy, float) else accuracy,
            )
        )
    rows.append(Row(name="group_average", label="ours: averages of channel pairs"))

    def recipe(row: Row) -> Row:
        options = {"pretext": row.name}
        base = load_recipe("cifar10-pnnh-110", model=f"resnet{depth}", method=method, options=options)
        return Row(name=row.name, label=row.label, error=row.error, recipe=base)

    return [recipe(row) for row in rows]


@reproduction("pnnh-table4", config=Table4, trains=True)
def table4(config: Table4, folder: Path) -> Outcome:
    rows = chosen(table4_rows(config.method, config.depth), config)
    runs = train_rows(rows, config, folder)
    means = {row.label: summary(runs[row.name]).mean for row in rows}
    order = sorted(means, key=lambda label: (means[label] is None, means[label]))
    findings = [f"From best to worst, method {config.method}, {config.depth} layers: {', '.join(order)}."]
    return outcome("pnnh-table4", config, rows, runs, findings=findings)
