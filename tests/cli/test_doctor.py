"""`unskip doctor`, from words to a page."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unskip.cli.commands import app
from unskip.doctor.page import MAX_BYTES


def test_a_page_a_table_and_an_answer(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    words = [
        "doctor",
        "resnet20",
        "--method",
        "plain",
        "--against",
        "resnet20",
        "--batch-size",
        "16",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert "resnet20, plain" in result.stdout
    assert "noise to signal" in result.stdout
    assert "scikit-learn's digits, resized to 32 x 32 px, 16 x 3 x 32 x 32" in result.stdout
    assert f"Page: {out}" in result.stdout.replace("\n", "")
    page = out.read_text()
    assert len(page.encode()) < MAX_BYTES
    assert page.count('<article class="verdict') == 2
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_json_on_stdout_is_json_alone() -> None:
    words = ["doctor", "tests.doctor.small:mlp", "--json", "--seed", "3"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    read = json.loads(result.stdout)
    assert read["name"] == "tests.doctor.small:mlp"
    assert read["batch"] == [64, 64]
    assert read["verdict"]["outcome"] in ("trains", "doubtful", "fails")
    again = CliRunner().invoke(app, words, catch_exceptions=False)
    assert again.stdout == result.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["resnet111"], "there is no network named 'resnet111'"),
        (["resnet20", "--out", "there.html"], "'there.html' is there already"),
        (["resnet20", "--out", "report.json"], "'report.json' must end in .html"),
        (["resnet20", "--seed", "-1"], "--seed -1 must not be negative"),
        (["resnet20", "--method", "pnhh"], "Did you mean 'pnnh'?"),
        (
            ["res2net50_26w_4s", "--method", "pnnh"],
            "`unskip plainify res2net50_26w_4s --method pnnh --no-strict -o FILE` leaves",
        ),
        (["tests.doctor.small:mlp", "--input-size", "63"], "can't read a batch of shape 2x63"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_code_2(
    words: list[str], sentence: str, tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    (tmp_path / "there.html").write_text("old")
    assert sentence in refused(["doctor", *words])
