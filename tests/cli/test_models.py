"""`unskip models`, as a program that others read."""

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import timm
from typer.testing import CliRunner

from unskip.cli.commands import app
from unskip.models import ENTRIES, OTHERS, list_models
from unskip.models.about import LISTING, listed
from unskip.models.weights import names_with_weights


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


SAMPLE = ("resnet20", "pnnh_resnet20_wide", "plainnet_mlp", "repvgg_a0")


@pytest.mark.parametrize("names", [SAMPLE, pytest.param((*ENTRIES, *OTHERS), marks=pytest.mark.full)])
def test_the_numbers_are_those_of_the_networks(names: tuple[str, ...]) -> None:
    """unskip.models.about.write_listing writes them anew."""
    lines = {line["name"]: line for line in json.loads(LISTING.read_text())}
    assert list(lines) == [*ENTRIES, *OTHERS]
    assert [name for name in names if lines[name] != listed(name)] == []


def test_filters_sorts_and_json() -> None:
    result = CliRunner().invoke(
        app, ["models", "*20*", "--plain", "--family", "cifar_resnet", "--sort", "trained", "--json"]
    )
    lines = json.loads(result.stdout)
    assert len(lines) > 3
    assert [line["trained"] for line in lines] == sorted(line["trained"] for line in lines)
    assert {(line["skips"], line["family"]) for line in lines} == {("none", "cifar_resnet")}
    assert all("20" in line["name"] for line in lines)
    shown = CliRunner().invoke(app, ["models", "--pretrained"]).stdout
    assert sorted(re.findall(r"^│ (\w+)", shown, re.MULTILINE)) == names_with_weights()
    with pytest.raises(ValueError, match="--sort 'size' is not known"):
        CliRunner().invoke(app, ["models", "--sort", "size"], catch_exceptions=False)


def test_names_from_python() -> None:
    assert list_models("pnnh_*_wide", pretrained=True) == ["pnnh_resnet20_wide", "pnnh_resnet110_wide"]
    assert list_models(family="*timm*") == list(OTHERS)
    assert all(timm.is_model(name) for name in list_models())


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
