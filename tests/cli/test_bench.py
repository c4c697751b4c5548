"""`unskip bench` on the command line."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.processes import start_command
from unskip.bench.compare import BenchRow, Comparison
from unskip.bench.runner import Case, Runner
from unskip.cli.commands import app

QUICK = ["--device", "cpu", "--batch", "2", "--size", "8", "--rounds", "1", "--seconds", "0.01", "--no-compile"]


def test_table_and_files(tmp_path: Path) -> None:
    words = ["bench", "resnet20", "plain_resnet20", *QUICK, "--train", "--layers", "own", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert re.search(r"plain_resnet20 +│ train, eager", result.output)
    assert "infer" not in result.output
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["setting"]["batch"] == 2
    assert found["setting"]["layers"] == "own"
    assert found["input"] == [3, 8, 8]
    assert (tmp_path / "bench.png").exists()


@pytest.mark.full
def test_json_and_a_limit_of_memory() -> None:
    words = ["bench", "resnet20", "plain_resnet20", *QUICK, "--train", "--json", "--fit", "5MB"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    networks = json.loads(result.stdout)["networks"]
    assert all(about["largest_batch"] >= 2 for about in networks)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["resnet20"], "two networks or more"),
        (["resnet20", "pnnh_resnet18"], "reads images of 3x32x32 and 'pnnh_resnet18' of 3x224x224"),
        (["resnet20", "plain_resnet20", "--precision", "int4"], "precision='int4'"),
        (["resnet20", "plain_resnet20", "--layers", "other"], "layers='other' must be one of same, fast, own"),
        (["resnet20", "plain_resnet20", "--fit", "much"], "no amount of memory"),
        (["resnet20", "plain_resnet21"], "plain_resnet21"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", *words])
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)


def test_a_folder_that_can_not_be_written_is_refused_before_anything_is_timed(tmp_path: Path) -> None:
    words = ["bench", "resnet20", "plain_resnet20", *QUICK, "-o"]
    (tmp_path / "file").write_text("mine")
    result = CliRunner().invoke(app, [*words, str(tmp_path / "file")])
    assert isinstance(result.exception, ValueError)
    assert "can't be written: File exists" in str(result.exception)
    result = CliRunner().invoke(app, [*words, "/proc/self"])  # there, and nobody's to write to
    assert isinstance(result.exception, ValueError)
    assert "the folder /proc/self can't be written" in str(result.exception)
    (tmp_path / "bench.json").write_text("mine")
    result = CliRunner().invoke(app, [*words, str(tmp_path)])
    assert isinstance(result.exception, ValueError)
    assert "is there already" in str(result.exception)
    assert "--force" in str(result.exception)
    assert (tmp_path / "bench.json").read_text() == "mine"


def test_ctrl_c_before_the_first_round_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(self: Comparison, case: Case, row: BenchRow) -> Runner:
        if len(self.rows) > 1:
            raise KeyboardInterrupt
        return real(self, case, row)

    real = Comparison._ready
    monkeypatch.setattr(Comparison, "_ready", ready)
    words = ["bench", "resnet20", "plain_resnet20", *QUICK, "--train", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 130
    assert not result.stdout
    assert not list(tmp_path.iterdir())


def test_ctrl_c_prints_what_there_is_and_ends_with_130(tmp_path: Path) -> None:
    """A real process and a real signal, after the first rounds."""
    words = ["resnet20", "plain_resnet20", *QUICK, "--train", "--rounds", "10000", "--out", str(tmp_path / "out")]
    command = start_command("bench", *words, cwd=tmp_path)
    file, began = tmp_path / "out" / "bench.json", time.monotonic()
    while not (file.exists() and json.loads(file.read_text())["rows"][-1]["rounds"]):
        assert command.process.is_alive(), command.finish()
        assert time.monotonic() - began < 120
        time.sleep(0.05)
    command.send(signal.SIGINT)
    code, out, err = command.finish()
    assert code == 130, err
    assert re.search(r"plain_resnet20 +│ train, eager +│ +\d", out)
    assert "Written: " in out
    assert err.strip().endswith("Interrupted. Nothing is left half written; the same command begins anew.")
    rows = json.loads(file.read_text())["rows"]
    assert [row["network"] for row in rows] == words[:2]
    assert all(row["images_per_s"] for row in rows)
