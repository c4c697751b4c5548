"""The report in a terminal: the verdict, and a table with one row per measure."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unskip.doctor.page import TEXTS, measures
from unskip.measures import Series

if TYPE_CHECKING:
    from unskip.doctor.report import Report

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 20  # characters of a sparkline
STYLES = {"trains": "green", "doubtful": "yellow", "fails": "red"}
COLORS = ("blue", "dark_orange3")  # of the first and second model, as on the page


def verdict_lines(report: "Report") -> Group:
    """The verdict for a terminal: outcome, summary, remedies."""
    verdict = report.verdict
    head = Text.assemble(
        (" ".join(TEXTS["outcomes"][verdict.outcome]), f"bold {STYLES[verdict.outcome]}"), "  ", (report.name, "bold"),
        (f"  (confidence: {100 * verdict.confidence:.0f} %)", "dim"),
    )  # fmt: skip
    lines = [Text(verdict.summary), *(Text(f"- {remedy}") for remedy in verdict.remedies)]
    lines.append(Text(f"Measured on {report.data}, {' x '.join(map(str, report.batch))}.", style="dim"))
    return Group(head, *(Padding(line, (0, 0, 0, 2), expand=False) for line in lines), Text())


def table(reports: Sequence["Report"], names: Sequence[str] = ()) -> Table:
    """A row per measure: a sparkline over depth, first and last value, and for one model also the extremes.

    Measures beyond their limits come first, marked with a cross. Two models share a scale. `names` are the measures to
    show, all unless given.
    """
    alone = len(reports) == 1
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("measure", min_width=12, max_width=28)
    if not alone:
        rows.add_column("network", max_width=20, no_wrap=True, overflow="ellipsis")
    rows.add_column("over depth", no_wrap=True)
    columns = ("first", "last", "lowest", "highest")[: 4 if alone else 2]
    for column in columns:
        rows.add_column(column, justify="right", no_wrap=True)
    crossed = dict.fromkeys(name for report in reports for name in report.verdict.measures)
    known_names = [name for name in measures(reports) if not names or name in names]
    for name in [*(name for name in crossed if name in known_names), *(n for n in known_names if n not in crossed)]:
        found = [
            (report, report.measured.series.get(name), color) for report, color in zip(reports, COLORS, strict=False)
        ]
        shared = [series for _, series, _ in found if series is not None]
        title = Text(name.replace("_", " "))
        if name in crossed:
            title = Text.assemble((TEXTS["outcomes"]["fails"][0], "red"), " ", title)
        for report, series, color in found:
            if series is None:
                continue
            known = [value for value in series.values if not math.isnan(value)]
            ends = [f"{v:.3g}" for v in (known[0], known[-1], min(known), max(known))] if known else ["-"] * 4
            model = [] if alone else [Text(report.name, style=color)]
            rows.add_row(title, *model, Text(sparkline(series, shared), style=color), *ends[: len(columns)])
            title = Text()
    return rows


def sparkline(series: Series, shared: Sequence[Series] = (), width: int = WIDTH) -> str:
    """A series as a row of bars, on a scale shared with other series. NaN is a space."""
    log = series.log
    finite = [v for s in (shared or [series]) for v in s.values if math.isfinite(v) and (v > 0 or not log)]
    if not finite:
        return ""
    scale = math.log10 if log else float
    low, high = scale(min(finite)), scale(max(finite))

    def height(value: float) -> float:
        """The position of a value between the lowest and the highest, 0 to 1."""
        if math.isinf(value) or (log and value <= 0):
            return float(value > 0)
        return (scale(value) - low) / (high - low) if high > low else 0.0

    cells = []
    count = len(series.values)
    width = min(width, count)
    for cell in range(width):
        part = series.values[cell * count // width : (cell + 1) * count // width]
        heights = [height(value) for value in part if not math.isnan(value)]
        cells.append(BARS[round(sum(heights) / len(heights) * (len(BARS) - 1))] if heights else " ")
    return "".join(cells)
