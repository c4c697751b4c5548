"""The tables that the four papers print, as data: `paper_table("pnnh", "1")`.

One file a paper, tables/PAPER.toml, all laid out alike:

    source = "Zhang et al. 2024"
    [[tables]]
    number, section, about    as the paper counts them; `about` says in our words what the table shows, and how measured
    columns                   { key, about, unit } each; the spread of a column is a column of its own
    rows                      one array a row, a cell for each column

The unit "words" marks a column of strings and "yes/no" one of booleans. All others hold numbers, with the digits of the
print; `1` is the unit of counts and fractions. Where the paper prints no number a cell is "" (None once read), and
where the network does not train, "diverges".
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from unskip._core.text import nearest

STATES = ("made", "refuted", "open", "needs ImageNet", "needs COCO", "nothing to run")
AUTHORS = {
    "pnnh": "Zhang et al. 2024",
    "noise_stability": "Yu and Tomasi 2019",
    "plainnet": "Oyedotun et al. 2020",
    "seqnet": "Hu",
}
PAPERS = tuple(AUTHORS)
Cell = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """What the cells under one heading are."""

    key: str
    about: str
    unit: str  # "words", "yes/no", or the unit of its numbers


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One table of a paper."""

    paper: str  # one of PAPERS
    source: str  # the paper's text and the section
    number: str  # as printed: "1", "II", "A1"
    about: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Cell], ...]  # by the columns' keys, in the order of the print

    def row(self, **where: Cell) -> Mapping[str, Cell]:
        """The one row with these cells: `table.row(architecture="DiracNet", params=36.5)`."""
        for key in where:
            self._check(key)
        found = [row for row in self.rows if all(row[key] == cell for key, cell in where.items())]
        if len(found) != 1:
            asked = ", ".join(f"{key}={cell!r}" for key, cell in where.items()) or "no cell"
            first = self.columns[0].key
            known = ", ".join(repr(row[first]) for row in self.rows)
            raise ValueError(
                f"{self._name} has {len(found)} rows with {asked}; name cells that one row alone has. Its {first} are: "
                f"{known}."
            )
        return found[0]

    def value(self, key: str, /, **where: Cell) -> float:
        """The number under `key` in the one row with these cells."""
        self._check(key)
        cell = self.row(**where)[key]
        if isinstance(cell, bool) or not isinstance(cell, int | float):
            printed = "nothing" if cell is None else repr(cell)
            raise ValueError(f"{self._name} has {printed} under {key!r} in that row, no number; `row` gives the cells.")
        return float(cell)

    @property
    def _name(self) -> str:
        return f"paper_table: Table {self.number} of {self.paper!r}"

    def _check(self, key: str) -> None:
        known = [column.key for column in self.columns]
        if key not in known:
            raise ValueError(f"{self._name} has no column {key!r}.{nearest(key, known)}")


def paper_table(paper: str, number: str) -> PaperTable:
    """A table by its paper (one of PAPERS) and its number as printed: `paper_table("plainnet", "II")`."""
    tables = paper_tables(paper)
    if number not in tables:
        raise ValueError(f"paper_table: {paper!r} has no Table {number!r}.{nearest(str(number), list(tables))}")
    return tables[number]


@cache
def paper_tables(paper: str) -> Mapping[str, PaperTable]:
    """All tables of a paper, by number."""
    if paper not in PAPERS:
        raise ValueError(f"paper_table: there is no paper {paper!r}.{nearest(paper, list(PAPERS))}")
    file = resources.files("unskip") / "reproduce" / "tables" / f"{paper}.toml"
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    tables = {}
    for entry in data["tables"]:
        columns = tuple(Column(**column) for column in entry["columns"])
        keys = [column.key for column in columns]
        rows = [
            MappingProxyType({key: None if cell == "" else cell for key, cell in zip(keys, row, strict=True)})
            for row in entry["rows"]
        ]
        tables[entry["number"]] = PaperTable(
            paper=paper,
            source=f"{data['source']}, section {entry['section']}",
            number=entry["number"],
            about=entry["about"],
            columns=columns,
            rows=tuple(rows),
        )
    return MappingProxyType(tables)


@dataclass(frozen=True, kw_only=True)
class PaperItem:
    """A table or figure of a paper, and where its reproduction stands."""

    paper: str  # one of PAPERS
    item: str  # "Table 1", "Figure 1 (left)"
    about: str  # what it shows
    state: str  # one of STATES
    command: str = ""  # what makes it
    record: str = ""  # the name of the record
    note: str = ""  # what is missing, smaller or different; what refutes it

    @property
    def source(self) -> str:
        return f"{AUTHORS[self.paper]}, {self.item}"


@cache
def paper_items() -> tuple[PaperItem, ...]:
    """Every table and figure of the four papers, in the papers' order."""
    text = (resources.files("unskip") / "reproduce" / "papers_list.toml").read_text(encoding="utf-8")
    return tuple(PaperItem(**item) for item in tomllib.loads(text)["items"])


def items_markdown() -> list[str]:
    """`paper_items` as the table of docs/figures.md."""
    lines = ["| | what | state | made by | record | note |", "|---|---|---|---|---|---|"]
    for item in paper_items():
        command, record = (f"`{word}`" if word else "" for word in (item.command, item.record))
        about = item.about.replace("|", "\\|")
        lines.append(f"| {item.source} | {about} | {item.state} | {command} | {record} | {item.note} |")
    return lines
