"""`unskip reproduce`: lists, makes and refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unskip.cli.commands import app
from unskip.reproduce import REPRODUCTIONS


def test_without_a_name_the_names_are_listed() -> None:
    result = CliRunner().invoke(app, ["reproduce"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in REPRODUCTIONS)
    assert "plainnet: Table I, II, III, A1" in result.stdout


def test_a_figure_is_made_with_its_options(tmp_path: Path) -> None:
    arguments = ["seqnet-figure1", "--repeats", "2", "--depth", "4", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == 0
    assert "log-rate" in result.stdout
    assert str(tmp_path / "seqnet-figure1.png") in result.stdout
    assert (tmp_path / "seqnet-figure1.png").is_file()


def test_a_wrong_name_option_or_value_is_refused() -> None:
    assert CliRunner().invoke(app, ["reproduce", "seqnet-figure9"]).exit_code == 2
    assert CliRunner().invoke(app, ["reproduce", "seqnet-figure1", "--repaets", "2"]).exit_code == 2
    result = CliRunner().invoke(app, ["reproduce", "seqnet-figure1", "--repeats", "1"])
    assert isinstance(result.exception, ValueError)


def test_what_can_not_be_is_said_before_it_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "pnnh-figure1", "--depth", "57"])
    assert "depth=57 must be 6N + 2" in str(result.exception)
    text = tmp_path / "text.safetensors"
    text.write_text("not weights")
    words = ["noise-figure3", "--plain", str(text), "--residual", str(text), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["reproduce", *words])
    assert isinstance(result.exception, ValueError)
    assert "text.safetensors holds no weights of simplified_plain20" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--epochs", "0"], "epochs=0 must be between 1 and 1,000,000; leave it out for the paper's number."),
        (["--weight-decay", "-1"], "weight_decay=-1.0 must be between 0 and 100; leave it out for the paper's."),
        (["--rows", "foo"], "reproduce: --rows has 'foo', and there is no such row to run."),
        (["--data", "empty"], "data_batch_1 is missing; empty must hold the folder cifar-10-batches-py with "),
        (
            ["--data", "nowhere"],
            "data: --data nowhere does not exist; it must hold the folder cifar-10-batches-py with",
        ),
        (
            [],
            "data: dataset='cifar10' needs --data DIR, which must hold the folder cifar-10-batches-py with ",
        ),
    ],
)
def test_a_table_says_which_option_is_wrong(
    words: list[str], sentence: str, tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert sentence in refused(["reproduce", "pnnh-table1", *words])
