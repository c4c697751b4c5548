"""`unskip models`, as a program that others read."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from unskip.cli import app
from unskip.models import ENTRIES


def unskip(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "unskip", *arguments], capture_output=True, text=True, timeout=300)


def test_paper_and_ours_side_by_side_for_all_eight_networks() -> None:
    result = CliRunner().invoke(app, ["models", "--paper", "pnnh_*"])
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if "pnnh_" in line]
    assert len(lines) == 8
    paper = {"pnnh_resnet110": "0.88", "pnnh_wrn28_10": "18.3", "pnnh_resnet18": "6.4", "pnnh_swin_tiny": "27.3"}
    for name, millions in paper.items():
        (line,) = [line for line in lines if f" {name} " in line]
        assert re.search(rf"\s{re.escape(millions)}\s", line)
    (swin,) = [line for line in lines if "swin" in line]
    assert "attention skips kept: 12" in swin


@pytest.mark.full
def test_every_name_is_listed() -> None:
    run = unskip("models")
    assert run.returncode == 0
    assert all(re.search(rf"\b{name}\b", run.stdout) for name in ENTRIES)


def test_a_wrong_pattern_is_one_sentence_without_a_traceback() -> None:
    run = unskip("models", "pnhh_resnet110")
    assert run.returncode == 2
    assert "no name matches 'pnhh_resnet110'. Did you mean 'pnnh_resnet110'?" in run.stderr
    assert "Traceback" not in run.stderr
    assert not run.stdout
