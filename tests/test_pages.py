"""Every block of code in README and docs runs as pasted, in the order of its page and in one empty folder.

A block says its language: `python` runs in one namespace for the page, `sh` in a shell. Comments before it, which no
reader of the page sees:

    <!-- hidden          a block that runs with the others: what the page takes for given, or what it promises
    CODE
    -->
    <!-- file: NAME -->         the block is that file, and is imported or run later on the page
    <!-- not run: REASON -->    what it needs is not here; its commands are parsed all the same
"""

import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import typer

from tests.processes import paste
from unskip.cli.commands import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- hidden\n(?P<hidden>.*?)^-->$|<!-- file: (?P<file>\S+) -->$|<!-- not run: (?P<reason>[^>]+) -->$"
    r"|^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=fence)$)",
    re.MULTILINE | re.DOTALL,
)
SHOWN = ("text", "toml", "ini", "c++")  # what a page shows and nobody runs
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="the pages are in the repository")


class Block(NamedTuple):
    code: str
    language: str
    line: int
    file: str = ""
    reason: str = ""

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and not self.reason


def blocks(page: Path) -> list[Block]:
    """The blocks of a page with what the comments before them say."""
    text = page.read_text(encoding="utf-8")
    found, file, reason = [], "", ""
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        if match["hidden"] is not None:
            found.append(Block(match["hidden"], "python", line))
        elif match["file"] or match["reason"]:
            file, reason = match["file"] or "", match["reason"] or ""
        else:
            found.append(Block(match["code"], match["language"].strip(), line, file, reason))
            file = reason = ""
    return found


def commands(code: str) -> list[list[str]]:
    """The words of each line that calls unskip; a line that ends in a backslash goes on."""
    lines = code.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if "unskip" in line]
    found = []
    for line in words:
        for at, word in enumerate(line):
            if word == "unskip":
                end = next((i for i, w in enumerate(line) if i > at and w in ("&&", "|", ";", ">")), len(line))
                found.append(line[at + 1 : end])
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is_and_its_commands_parse(page: Path) -> None:
    """Also the commands of blocks that can't run here: no option may be misspelt."""
    for block in blocks(page):
        known = block.language.startswith("{") or block.language in ("python", "sh", *SHOWN)
        assert known, f"{name(page)}:{block.line}: a block of {block.language!r}; say python, sh or text"
        if block.language == "python":
            compile(block.code, name(page), "exec")
        for words in commands(block.code) if block.language == "sh" else ():
            if words[:1] not in ([], ["demo"]) and "..." not in words:
                parse(words, f"{name(page)}:{block.line}")


def parse(words: list[str], where: str) -> None:
    """Has the command line parsed, without anything being run."""
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group) or hasattr(command, "commands"), where
    own = command.commands[words[0]]  # type: ignore[attr-defined]
    with own.make_context(words[0], words[1:], resilient_parsing=False):
        pass


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.runs for b in blocks(page))], ids=name)
def test_a_page_runs_as_pasted(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.code, encoding="utf-8")
        elif block.runs and block.language == "python":
            # In its own line numbers, so that an error names the line of the page.
            exec(compile("\n" * (block.line - 1) + textwrap.dedent(block.code), name(page), "exec"), names)
        elif block.runs:
            paste(f"set -e\n{block.code}", tmp_path)
