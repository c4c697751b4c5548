"""What tests of commands share."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unskip.cli import main


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    """Runs a command in `tmp_path` that must end with code 2 and change nothing there; returns its sentence."""

    def run(words: list[str]) -> str:
        before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["unskip", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        shown = capsys.readouterr()
        assert not shown.out
        assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before
        return shown.err.replace("\n", " ")

    return run
