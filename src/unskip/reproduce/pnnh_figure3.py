"""Zhang et al. 2024, Figure 3 (section 5.2): CIFAR-10 error against parameters, by depth, with and without skips.

The paper prints no numbers for this figure; those of its Table 1 at 110 layers are drawn beside ours.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from unskip._core.drawing import INK, OTHER, PNNH, RESIDUAL, dress, legend, panels
from unskip.reproduce.pnnh_table1 import table1_rows
from unskip.reproduce.registry import Outcome, between, reproduction
from unskip.reproduce.trained import Row, Trained, summary, train_table
from unskip.train.recipe import load_recipe

DEPTHS = (20, 32, 44, 56, 110)
KINDS = {  # name of a depth's network: label, colour
    "resnet{}": ("ResNet", RESIDUAL),
    "pnnh_resnet{}": ("PNNH", PNNH),
    "pnnh_resnet{}_wide": ("PNNH, wide", OTHER),
}


@dataclass(frozen=True, kw_only=True)
class Figure3(Trained):
    """What can be set."""

    seeds: Annotated[int, "runs of each network", between(1, 1000)] = 1


def figure3_rows() -> list[Row]:
    printed = {row.name: row for row in table1_rows()}
    rows = []
    for kind, (label, _) in KINDS.items():
        for depth in DEPTHS:
            name = kind.format(depth)
            row = printed.get(name, Row(name=name, label=""))
            recipe = load_recipe("cifar10-pnnh-110", model=name)
            rows.append(replace(row, label=f"{label}-{depth}", recipe=recipe))
    return rows


@reproduction("pnnh-figure3", settings=Figure3, trains=True)
def figure3(settings: Figure3, folder: Path) -> Outcome:
    table = train_table("pnnh-figure3", settings, figure3_rows(), folder)
    figure, (axes,) = panels(1, 1, size=(6.4, 4.4), title=f"Error against parameters, by depth ({settings.dataset})")
    findings = []
    for kind, (label, colour) in KINDS.items():
        points = []
        for depth in DEPTHS:
            runs = table.runs.get(kind.format(depth), [])
            found, counted = summary(runs), next((run.parameters for run in runs if run.parameters), None)
            if found.mean is not None and counted is not None:
                points.append((depth, counted / 1e6, found.mean, found.spread or 0.0))
        if not points:
            continue
        depths, params, errors, spreads = zip(*points, strict=True)
        axes.errorbar(params, errors, spreads, fmt="o-", color=colour, markersize=4, linewidth=1.2, label=label)
        for depth, x, y in zip(depths, params, errors, strict=True):
            axes.annotate(str(depth), (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8, color=INK)
        steps = [f"{depth}: {error:.2f}" for depth, error in zip(depths, errors, strict=True)]
        better = all(later <= earlier for earlier, later in pairwise(errors))
        each = "; each no worse than the one before" if better else "; not every one better than the one before"
        findings.append(f"{label}, layers and test error %: {', '.join(steps)}{each if len(steps) > 1 else ''}.")
    for row in table.rows:
        if isinstance(row.error, float) and isinstance(row.params, float) and settings.dataset == "cifar10":
            colour = PNNH if row.name.startswith("pnnh") else RESIDUAL
            axes.plot([row.params], [row.error], "*", color=colour, markersize=9)
            axes.annotate("paper", (row.params, row.error), textcoords="offset points", xytext=(5, -9), fontsize=8)
    dress(axes, x="trained parameters (millions)", y="test error (%)", log_x=True)
    legend(axes)
    return table.outcome(findings, figure=figure)
