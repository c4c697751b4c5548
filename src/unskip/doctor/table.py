"""The report in a terminal: one line for each measure."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unskip.doctor.page import FATES, measures
from unskip.measures import Series

if TYPE_CHECKING:
    from unskip.doctor.report import Report

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 20  # characters that a course over depth takes
STYLES = {"trains": "green", "doubtful": "yellow", "fails": "red"}
COLORS = ("blue", "dark_orange3")  # of the first network and of the second, as on the page


def verdict_lines(report: "Report") -> Group:
    """The verdict: fate, sentence, what would help."""
    verdict = report.verdict
    sign, words = FATES[verdict.fate]
    head = Text.assemble(
        (f"{sign} {words}", f"bold {STYLES[verdict.fate]}"), ("  ", ""), (report.name, "bold"),
        (f"  (how sure: {100 * verdict.confidence:.0f} %)", "dim"),
    )  # fmt: skip
    lines = [Text(verdict.sentence), *(Text(f"- {remedy}") for remedy in verdict.remedies)]
    shape = " x ".join(map(str, report.batch))
    lines.append(Text(f"Looked at with {report.data}, {shape}.", style="dim"))
    return Group(head, *(Padding(line, (0, 0, 0, 2), expand=False) for line in lines), Text())


def table(reports: Sequence["Report"]) -> Table:
    """Each measure's course over depth and its ends; one network has its extremes too, two share a scale."""
    lines = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    lines.add_column("measure", min_width=12, max_width=28)
    if len(reports) > 1:
        lines.add_column("network", max_width=20, no_wrap=True, overflow="ellipsis")
    lines.add_column("over depth", no_wrap=True)
    ends = ("first", "last", "lowest", "highest")[: 4 if len(reports) == 1 else 2]
    for column in ends:
        lines.add_column(column, justify="right", no_wrap=True)
    for name in measures(reports):
        title = name.replace("_", " ")
        shared = [report.measured.series[name] for report in reports if name in report.measured.series]
        for report, color in zip(reports, COLORS, strict=False):
            series = report.measured.series.get(name)
            if series is None:
                continue
            who = [Text(report.name, style=color)] if len(reports) > 1 else []
            lines.add_row(Text(title), *who, Text(sparkline(series, shared), style=color), *_ends(series, len(ends)))
            title = ""
    return lines


def _ends(series: Series, count: int) -> list[str]:
    known = [value for value in series.values if not math.isnan(value)]
    return [f"{v:.3g}" for v in (known[0], known[-1], min(known), max(known))[:count]] if known else ["-"] * count


def sparkline(series: Series, shared: Sequence[Series] = (), width: int = WIDTH) -> str:
    """A series as a row of bars, on the scale that it shares with others. Where nothing was measured is a space."""
    log = series.log
    finite = [v for s in (shared or [series]) for v in s.values if math.isfinite(v) and (v > 0 or not log)]
    if not finite:
        return ""
    scale = math.log10 if log else float
    low, high = scale(min(finite)), scale(max(finite))
    cells = []
    count = len(series.values)
    width = min(width, count)
    for cell in range(width):
        part = [v for v in series.values[cell * count // width : (cell + 1) * count // width] if not math.isnan(v)]
        heights = [_height(v, low, high, log) for v in part]
        cells.append(BARS[round(sum(heights) / len(heights) * (len(BARS) - 1))] if heights else " ")
    return "".join(cells)


def _height(value: float, low: float, high: float, log: bool) -> float:
    """Where a value stands between the lowest and the highest, 0 to 1."""
    if value == math.inf:
        return 1.0
    if value == -math.inf or (log and value <= 0):
        return 0.0
    at = math.log10(value) if log else value
    return (at - low) / (high - low) if high > low else 0.0
