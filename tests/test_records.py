"""Every published number names a record that exists, and every record says how it was made."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from unskip.models.weights import names_with_weights, weights_of

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
# Old entries of CHANGELOG.md may name scripts that are gone.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = [path for path in sorted((ROOT / "src").rglob("*")) if path.suffix in (".py", ".toml", ".md")]
READMES = [*sorted(RECORDS.glob("*/README.md")), *sorted(RECORDS.glob("*.md")), ROOT / "benchmarks/verdict/README.md"]
FOLDER = re.compile(r"\b\d{4}-\d{2}-\d{2}_[\w-]+\b")  # a record's name, with or without its path
PATH = re.compile(r"\bbenchmarks/[\w./-]*\w")
FILE = re.compile(r"\b(?:benchmarks|docs|src|tests)/[\w./-]*\w")
COMMAND = re.compile(
    r"\bunskip (?:train|demo|doctor|plainify|plan|fold|export|bench|reproduce)\b|\bpython [\w/.]+\.py\b|\bpytest -"
)
REMOVED = re.compile(r"\bat commit [0-9a-f]{7}\b")
pytestmark = pytest.mark.skipif(not RECORDS.is_dir(), reason="benchmarks/ is in the repository, not in the sdist")
SCRIPTS = [path for path in sorted((ROOT / "benchmarks").rglob("*.py")) if path.stem != "networks"]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_name_records_scripts_and_files_that_exist(page: Path) -> None:
    text = page.read_text()
    assert [found for found in FILE.findall(text) if not (ROOT / found).exists()] == []
    assert [found for found in FOLDER.findall(text) if not (RECORDS / found).is_dir()] == []


def test_source_names_records_and_scripts_that_exist() -> None:
    missing = {
        name(path): found
        for path in CODE
        for found in PATH.findall(path.read_text())
        if not (ROOT / found).exists() or found == "benchmarks/records"
    }
    allowed = {"src/unskip/models/weights.py": "benchmarks/records"}  # the folder as such
    assert missing == allowed


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_records_name_files_that_exist_or_the_commit_that_has_them(readme: Path) -> None:
    text = readme.read_text()
    gone = [found for found in PATH.findall(text) if not (ROOT / found).exists()]
    assert not gone or REMOVED.search(text), f"{gone} are gone; say at which commit they can be found"
    assert [found for found in FOLDER.findall(text) if not (RECORDS / found).is_dir()] == []


def test_every_record_names_the_command_that_made_it() -> None:
    folders = [path for path in RECORDS.iterdir() if path.is_dir()]
    assert len(folders) > 30
    assert [path.name for path in folders if not FOLDER.fullmatch(path.name)] == []
    assert [path.name for path in folders if not (path / "README.md").is_file()] == []
    assert [path.name for path in folders if not COMMAND.search((path / "README.md").read_text())] == []


@pytest.mark.parametrize("model", names_with_weights())
def test_shipped_weights_name_a_record_that_exists(model: str) -> None:
    weights = weights_of(model)
    assert weights is not None
    assert (RECORDS / weights.record / "README.md").is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_scripts_of_benchmarks_start(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their imports and options are up to date."""
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith("usage:")
