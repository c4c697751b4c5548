"""Tables on terminals of any width, and off them."""

from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

FOLDED = 16  # characters that are left of a column whose words may be broken


def console_for_tables(width: int) -> Console:
    """On a terminal its own width. Off one nobody sees it, and a wrapped table can't be read by programs: `width`."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=width, highlight=False)


def fitted(table: Table, console: Console, spare: Sequence[str]) -> Table:
    """The table without as many of its spare columns, the first first, as hide its words and numbers; it says which."""
    left_out: list[str] = []
    for header in spare:
        if _needed(table, console) <= console.width:
            break
        if header in (column.header for column in table.columns):
            table.columns = [column for column in table.columns if column.header != header]
            left_out.append(header)
    if left_out:
        words = f"A wider terminal shows {', '.join(left_out)} too."
        table.caption = f"{table.caption} {words}" if table.caption else words
    return table


def _needed(table: Table, console: Console) -> int:
    """Characters that a line takes when columns that may wrap are as narrow as their longest word, or FOLDED."""
    width = 1
    for column in table.columns:
        sizes = [Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells)]
        widest = max(size.maximum if column.no_wrap else size.minimum for size in sizes)
        width += 3 + (min(widest, FOLDED) if column.overflow == "fold" else widest)
    return width
