"""The papers' tables as data: laid out alike, true to the print, and what the library repeats of them is the same."""

import re
import tomllib
from collections import Counter
from dataclasses import FrozenInstanceError
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer

from unskip.cli.commands import app
from unskip.models import ENTRIES
from unskip.reproduce import (
    PAPERS,
    REPRODUCTIONS,
    PaperItem,
    PaperTable,
    items_markdown,
    paper_items,
    paper_table,
    paper_tables,
)
from unskip.reproduce.papers import STATES

TEXTS = Path(__file__).parents[3] / "shared" / "papers"
ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
UNITS = {"words", "yes/no", "%", "points", "million", "images/s", "px", "1"}
TABLES = [(paper, number) for paper in PAPERS for number in paper_tables(paper)]
every_table = pytest.mark.parametrize(("paper", "number"), TABLES, ids=lambda word: word)


def test_every_table_is_there() -> None:
    assert {paper: list(paper_tables(paper)) for paper in PAPERS} == {
        "pnnh": ["1", "2", "3", "4"],
        "noise_stability": ["1", "2", "3", "4", "5"],
        "plainnet": ["I", "II", "III", "A1"],
        "seqnet": ["1", "2", "3", "4", "5"],
    }
    files = {file.name for file in (resources.files("unskip") / "reproduce" / "tables").iterdir()}
    assert files == {f"{paper}.toml" for paper in PAPERS}


@every_table
def test_layout(paper: str, number: str) -> None:
    table = paper_table(paper, number)
    assert (table.paper, table.number) == (paper, number)
    assert re.fullmatch(r"[A-Z][\w .]+, [\w.:/-]+, section [A-Z0-9.]+", table.source), "author and year, link, section"
    assert table.about[0].isupper()
    assert not table.about.endswith(".")
    keys = [column.key for column in table.columns]
    assert len(set(keys)) == len(keys)
    assert all(key.isidentifier() for key in keys)
    assert len({tuple(row.items()) for row in table.rows}) == len(table.rows)
    for column in table.columns:
        assert column.unit in UNITS
        cells = [row[column.key] for row in table.rows]
        if column.unit in ("words", "yes/no"):
            assert {type(cell) for cell in cells} == {str if column.unit == "words" else bool}
        else:
            numbers = [cell for cell in cells if cell not in (None, "diverges")]
            assert numbers, column
            assert {type(cell) for cell in numbers} <= {int, float}


@pytest.mark.parametrize(
    ("paper", "number", "key", "where", "printed"),
    [
        ("pnnh", "1", "c10_error", {"architecture": "Plain-110 + PNNH"}, 6.37),
        ("pnnh", "1", "c10_spread", {"architecture": "Plain-110 + PNNH"}, 0.06),
        ("pnnh", "1", "c10_error", {"architecture": "ResNet-110"}, 6.61),
        ("pnnh", "1", "c100_error", {"architecture": "DiracNet", "params": 36.5}, 21.54),
        ("pnnh", "1", "c100_spread", {"architecture": "Plain(WRN-28-10) + PNNH"}, 0.17),
        ("pnnh", "2", "training_speed", {"model": "ResNet-50"}, 169),
        ("pnnh", "2", "error", {"model": "Plain-34 + PNNH"}, 27.5),
        ("pnnh", "2", "params", {"model": "Plain Swin-T + PNNH"}, 27.3),
        ("pnnh", "4", "accuracy", {"task": "normal"}, 88.37),
        ("pnnh", "4", "change", {"task": "identity"}, -0.41),
        ("noise_stability", "1", "plain_error", {"depth": 44}, 0.2213),
        ("noise_stability", "1", "residual_cost", {"depth": 32}, 0.04903),
        ("noise_stability", "2", "plain_loss", {"depth": 20}, 0.04132),
        ("noise_stability", "3", "t_200", {"statistic": "mass of all weights"}, 20_000),
        ("noise_stability", "3", "p_200", {"statistic": "mean"}, -0.0061),
        ("noise_stability", "4", "residual_decay", {"phase": "before", "depth": 44}, 3.118e-6),
        ("noise_stability", "5", "dominant_error", {"depth": 20}, 0.3152),
        ("plainnet", "I", "params", {"depth": 50}, 4.78),
        ("plainnet", "II", "test_error", {"components": "BN + LReLU + max-norm"}, 5.48),
        ("plainnet", "II", "train_error", {"components": "LReLU"}, 92.37),
        ("plainnet", "III", "test_error", {"model": "ResNet", "layers": 110}, 6.43),
        ("plainnet", "III", "params", {"model": "Proposed PlainNet"}, 0.72),
        ("plainnet", "A1", "outputs", {"kind": "convolution", "index": 36}, 80),
        ("plainnet", "A1", "size", {"kind": "max-pooling", "index": 2}, 7),
        ("seqnet", "1", "layers34", {"model": "SeqNet"}, 75.7),
        ("seqnet", "1", "layers101", {"model": "ISONet"}, 71.0),
        ("seqnet", "2", "mask_ap75", {"model": "SeqNet50 3X"}, 38.5),
        ("seqnet", "3", "accuracy", {"choice": "second layer"}, 76.7),
        ("seqnet", "4", "on", {"layers": 34}, 75.3),
        ("seqnet", "5", "accuracy", {"conv2": False, "conv4": False}, 76.9),
    ],
)
def test_spot_values(paper: str, number: str, key: str, where: dict[str, Any], printed: float) -> None:
    assert paper_table(paper, number).value(key, **where) == printed


# ---------------------------------------------------------------- against the papers' own text


# Printed in rows for columns, with the size first, or as three tables side by side.
OTHERWISE_LAID_OUT = {("plainnet", "I"), ("plainnet", "A1"), ("seqnet", "3")}


def lines_of(table: PaperTable) -> list[str]:
    """The paper's text, which a checkout has beside it only where the papers are at hand."""
    text = TEXTS / Path(table.source.split(",")[0]).name
    if not text.exists():
        pytest.skip(f"The text of {table.source.split(',')[0]} does not lie beside this checkout.")
    return text.read_text(encoding="utf-8").splitlines()


def printed_table(lines: list[str], number: str) -> str:
    """The rows of a table as text: lines with tabs just above or below its caption."""
    (caption,) = (i for i, line in enumerate(lines) if re.match(rf"table {number}[.:] ", line, re.IGNORECASE))
    for step in (-1, 1):
        i = caption + step
        while not lines[i].strip():
            i += step
        block = []
        while "\t" in lines[i]:
            block.append(lines[i])
            i += step
        if block:
            return "\n".join(block[::step])
    raise AssertionError(f"There are no rows beside the caption of Table {number}.")


def numbers_in(text: str) -> list[str]:
    """Numbers as printed. A minus counts as a sign only at the start of a cell: ResNet-110 has none."""
    text = re.sub(r" \\times 10\^\{(-\d+)\}", r"e\1", text)
    text = re.sub(r"\t(\d+) (\d{3})(?=\t|\n|$)", r"\t\1\2", text)  # 20 000
    return re.findall(r"(?<![\d.])(?:(?<=\t)-)?\d+(?:\.\d+)?(?:e-\d+)?", text)


def raw_cells(paper: str, number: str) -> list[str]:
    """All cells of the data file that are numbers, with their digits as strings."""
    file = resources.files("unskip") / "reproduce" / "tables" / f"{paper}.toml"
    data = tomllib.loads(file.read_text(encoding="utf-8"), parse_float=lambda digits: (digits,))
    (table,) = (table for table in data["tables"] if table["number"] == number)
    cells = [cell for row in table["rows"] for cell in row]
    return [cell[0] if isinstance(cell, tuple) else str(cell) for cell in cells if type(cell) in (int, tuple)]


@every_table
def test_numbers_are_those_of_the_print(paper: str, number: str) -> None:
    """Numbers of the data are printed in that table, as often and in this order; no decimal of the print is missing."""
    if (paper, number) == ("pnnh", "3"):  # symbols in words; the print has no caption for it
        assert not raw_cells(paper, number)
        return
    printed = numbers_in(printed_table(lines_of(paper_table(paper, number)), number))
    ours = raw_cells(paper, number)
    assert not Counter(ours) - Counter(printed)
    if (paper, number) not in OTHERWISE_LAID_OUT:
        left = iter(printed)
        assert all(digits in left for digits in ours), "The order is another one."
    words = {"0.25"} if (paper, number) == ("noise_stability", "3") else set()  # in the name of a row
    decimals = Counter(digits for digits in printed if "." in digits and digits not in words)
    assert not decimals - Counter(ours)


def test_quoted_rows_are_those_that_name_a_paper() -> None:
    table = paper_table("pnnh", "1")
    lines = printed_table(lines_of(table), "1").splitlines()[2:]  # below a heading of two lines
    named = [re.search(r"\(.+, (19|20)\d\d\)", line) is not None or line.startswith("\t") for line in lines]
    assert [row["quoted"] for row in table.rows] == named


@pytest.mark.parametrize("paper", PAPERS)
def test_every_caption_of_the_print_has_its_table(paper: str) -> None:
    tables = paper_tables(paper)
    lines = lines_of(next(iter(tables.values())))
    captions = {match[1] for line in lines if (match := re.match(r"table ([0-9A-Z]+)[.:] ", line, re.IGNORECASE))}
    assert captions
    assert captions <= tables.keys()


# ---------------------------------------------------------------- what repeats them

# Where the parameters that `unskip models` shows as the paper's are printed: paper, table, row.
PNNH_1, PNNH_2 = (("pnnh", number) for number in "12")
PARAMS: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "resnet110": (PNNH_1, {"architecture": "ResNet-110"}),
    "plain_resnet110": (PNNH_1, {"architecture": "Plain-110"}),
    "pnnh_resnet110": (PNNH_1, {"architecture": "Plain-110 + PNNH"}),
    "dirac_wrn28_5": (PNNH_1, {"architecture": "DiracNet", "c10_error": 5.16}),
    "wrn28_10": (PNNH_1, {"architecture": "WRN-28-10"}),
    "pnnh_wrn28_10": (PNNH_1, {"architecture": "Plain(WRN-28-10) + PNNH"}),
    "dirac_wrn28_10": (PNNH_1, {"architecture": "DiracNet", "c10_error": 4.75}),
    "pnnh_resnet18": (PNNH_2, {"model": "Plain-18 + PNNH"}),
    "plain_resnet34": (PNNH_2, {"model": "Plain-34"}),
    "pnnh_resnet34": (PNNH_2, {"model": "Plain-34 + PNNH"}),
    "dirac_resnet34": (PNNH_2, {"model": "DiracNet-34"}),
    "plain_resnet50": (PNNH_2, {"model": "Plain-50"}),
    "pnnh_resnet50": (PNNH_2, {"model": "Plain-50 + PNNH"}),
    "pnnh_resnet101": (PNNH_2, {"model": "Plain-101 + PNNH"}),
    "pnnh_mobilenetv2": (PNNH_2, {"model": "Plain-MobileNet-V2 + PNNH"}),
    "pnnh_swin_tiny": (PNNH_2, {"model": "Plain Swin-T + PNNH"}),
    "plainnet50": (("plainnet", "III"), {"model": "Proposed PlainNet"}),
}


def test_parameters_of_named_networks_are_the_papers() -> None:
    named = {name: entry.paper_params for name, entry in ENTRIES.items() if entry.paper_params is not None}
    assert named == {name: paper_table(*table).value("params", **row) for name, (table, row) in PARAMS.items()}


# ---------------------------------------------------------------- what a user gets wrong


def test_what_a_user_gets_wrong_is_said() -> None:
    table = paper_table("pnnh", "1")
    for wrong, message in (
        (lambda: paper_table("pnn", "1"), r"there is no paper 'pnn'\. Did you mean 'pnnh'"),
        (lambda: paper_table("plainnet", "2"), r"'plainnet' has no Table '2'\. Known: I, II, III, A1\."),
        (lambda: table.row(architectur="ResNet-110"), r"no column 'architectur'\. Did you mean 'architecture'"),
        (lambda: table.value("c1_error", architecture="ResNet-110"), r"no column 'c1_error'"),
        (lambda: table.row(architecture="DiracNet"), r"Table 1 of 'pnnh' has 2 rows with architecture='DiracNet'"),
        (lambda: table.row(architecture="VGG"), r"has 0 rows with architecture='VGG'.*'ResNet-110'"),
        (lambda: table.value("c100_error", architecture="Plain-110"), r"has 'diverges' under 'c100_error'"),
        (lambda: table.value("c100_error", architecture="RepVGG-A2"), r"has nothing under 'c100_error'"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_tables_cannot_be_changed() -> None:
    table = paper_table("seqnet", "1")
    with pytest.raises(FrozenInstanceError):
        table.number = "2"  # type: ignore[misc]
    with pytest.raises(TypeError):
        table.rows[0]["model"] = "ours"  # type: ignore[index]


ITEMS = paper_items()
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_table_and_figure_has_a_state() -> None:
    """As many as the papers' texts have; the tables are those whose numbers we hold."""
    assert {item.state for item in ITEMS} <= set(STATES)
    assert len({(item.paper, item.item) for item in ITEMS}) == len(ITEMS)
    tables = {
        paper: [i.item.removeprefix("Table ") for i in ITEMS if (i.paper, i.item[0]) == (paper, "T")]
        for paper in PAPERS
    }
    assert tables == {paper: list(paper_tables(paper)) for paper in PAPERS}
    figures = {paper: {i.item.split()[1] for i in ITEMS if (i.paper, i.item[0]) == (paper, "F")} for paper in PAPERS}
    counts = {"pnnh": 6, "noise_stability": 13, "plainnet": 10, "seqnet": 10}
    wanted = {paper: {str(number) for number in range(1, count + 1)} for paper, count in counts.items()}
    wanted["plainnet"].add("A1")
    assert figures == wanted


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.source)
def test_nothing_is_made_without_a_record_and_a_command(item: PaperItem) -> None:
    if item.command:
        program, verb, *name = item.command.split()
        assert program == "unskip"
        assert verb in COMMANDS
        assert verb != "reproduce" or name[0] in REPRODUCTIONS
    if item.record and RECORDS.is_dir():
        assert (RECORDS / item.record / "README.md").is_file()
    if item.state in ("made", "refuted"):
        assert item.command
        assert item.record
    if item.state == "refuted":
        assert item.note, "what refutes it"
    if item.state == "nothing to run":
        assert not item.record


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="docs/ is in the repository")
def test_the_page_shows_the_list() -> None:
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert "\n".join(items_markdown()) in page, "paste what unskip.reproduce.items_markdown() returns"
