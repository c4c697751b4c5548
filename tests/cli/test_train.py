"""`unskip train` as a user runs it: result line, exit codes, signals, resume, and what is said when it is wrong."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.processes import start_command
from tests.train.small import SMALL, write_npz
from unskip.cli import main
from unskip.train.recipe import recipe_names


def in_process(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of the command line, run here."""
    monkeypatch.setattr(sys, "argv", ["unskip", "train", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(SMALL.replace(epochs=20, save_steps=5).to_toml())
    return file


def test_a_run_is_stopped_resumed_and_prints_one_line(recipe: Path, tmp_path: Path) -> None:
    first = start_command("train", str(recipe), "--seed", "3", cwd=tmp_path)
    checkpoint = tmp_path / "runs" / "mine" / "checkpoint.pt"
    began = time.monotonic()
    while not checkpoint.exists():
        assert first.process.is_alive()
        assert time.monotonic() - began < 120
        time.sleep(0.01)
    first.send(signal.SIGINT)
    code, out, err = first.finish()
    assert (code, out) == (75, "")
    assert "stopped by SIGINT after update" in err
    assert "--resume auto" in err

    code, out, err = start_command("train", str(recipe), "--seed", "3", "--resume", "auto", cwd=tmp_path).finish()
    assert code == 0, err
    assert out.count("\n") == 1
    assert "tests.train.small:norm_net on digits: test error" in out
    assert "Going on after update" in err
    assert "epoch 20/20" in err  # plain lines: stderr is no terminal
    assert "\x1b" not in err
    result = json.loads((checkpoint.parent / "result.json").read_text())
    assert f"test error {result['test_error']:.2f} %" in out
    assert result["steps"] == 400


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epoch", "3"], "there is no option --epoch. Did you mean 'epochs'?"),
        (["nope"], "there is no recipe named 'nope'"),
        (["--epochs", "many"], "epochs='many' must be a whole number"),
        (["--dataset", "cifar10"], "dataset='cifar10' needs --data DIR, which must hold"),
        (["--dataset", "cifar10", "--data", "/no/such/folder"], "--data /no/such/folder does not exist; it must"),
        (["--dta", "x"], "there is no option --dta. Did you mean 'data'?"),
        (["--data", "/dev"], "Images lie in a folder for each class, at least two of them, for instance /dev/cat/"),
        (["--data", "nowhere"], "--data nowhere does not exist."),
        (["--dataset", "digits", "--data", "/dev"], "'digits' is embedded"),
        (["--model", "resnet57"], "there is no network named 'resnet57'"),
        (["--resume", "yes"], "resume='yes' must be 'never' or 'auto'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_process(words, monkeypatch) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []  # nothing was written


def test_list_and_show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import tomllib

    assert in_process(["--list"], monkeypatch) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == recipe_names()
    assert in_process(["cifar10-pnnh-110", "--epochs", "7", "--show"], monkeypatch) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert (shown["run"]["epochs"], shown["network"]["model"]) == (7, "pnnh_resnet110")


def test_divergence_has_its_own_exit_code(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert in_process([str(recipe), "--lr", "1e30", "--warmup-epochs", "0"], monkeypatch) == 3
    assert "unskip doctor" in capsys.readouterr().err


def test_own_data_and_network(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_npz(tmp_path / "mine.npz")
    words = [
        str(recipe),
        "--dataset",
        "npz",
        "--data",
        str(file),
        "--batch",
        "8",
        "--out",
        "here",
        "--precision",
        "fp64",
    ]
    assert in_process(words, monkeypatch) == 0
    out = capsys.readouterr().out
    assert "on npz: test error" in out
    assert float(out.split("test error ")[1].split(" ")[0]) <= 10  # brightness tells the class
    assert (tmp_path / "here" / "curves.png").exists()


def test_a_progress_bar_on_a_terminal(recipe: Path, tmp_path: Path) -> None:
    """Under a real pseudo-terminal: epoch, loss, error, images/s and the time left."""
    import pty
    import select

    parent, child = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "120"}
    command = start_command("train", str(recipe), cwd=tmp_path, err=os.ttyname(child), environment=environment)
    began = time.monotonic()
    while not command.out.exists():  # the terminal must not close before it is open there too
        assert time.monotonic() - began < 120
        time.sleep(0.01)
    while os.stat(f"/proc/{command.process.pid}/fd/2").st_rdev != os.fstat(child).st_rdev:
        time.sleep(0.01)
    os.close(child)
    seen = b""
    while True:
        ready, _, _ = select.select([parent], [], [], 0.2)
        if ready:
            try:
                seen += os.read(parent, 65536)
            except OSError:
                break
        elif not command.process.is_alive():
            break
    os.close(parent)
    assert command.finish()[0] == 0
    text = seen.decode(errors="replace")
    for word in ("epoch", "loss", "error", "images/s", "/400"):
        assert word in text
