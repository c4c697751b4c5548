"""`unskip models`, as a program that others read."""

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from unskip.cli.commands import app
from unskip.models import ENTRIES, OTHERS


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
    assert all(re.search(rf"\b{name}\b", run.stdout) for name in [*ENTRIES, *OTHERS])


def test_a_family_of_timms_is_listed_and_says_what_skips_it_has() -> None:
    result = CliRunner().invoke(app, ["models", "*a0", "--family", "repvgg*"])
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if "repvgg_a0" in line]
    assert "repvgg (timm)" in line
    assert "while training" in line
    assert "9.109" in line  # RepVGG's paper: 9.11 M while training, 8.30 M folded
    assert "densenet121" not in result.stdout


def test_a_wrong_family_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"no family matches 'mobilenet'. Did you mean 'mobilenetv2'\?"):
        CliRunner().invoke(app, ["models", "--family", "mobilenet"], catch_exceptions=False)
    with pytest.raises(ValueError, match=r"no name in family 'wrn' matches 'resnet\*'"):
        CliRunner().invoke(app, ["models", "resnet*", "--family", "wrn"], catch_exceptions=False)


def test_a_wrong_pattern_is_one_sentence_without_a_traceback(refused: Callable[[list[str]], str]) -> None:
    said = refused(["models", "pnhh_resnet110"])
    assert "no name matches 'pnhh_resnet110'. Did you mean 'pnnh_resnet110'?" in said
    assert "Traceback" not in said
