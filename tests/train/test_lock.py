"""Two processes in one folder: exactly one trains, and a lock that a dead one has left is in nobody's way."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import start_command
from tests.train.small import REGISTERED, SMALL, start
from unskip.train import run
from unskip.train.checkpoint import RunFolder
from unskip.train.display import Display
from unskip.train.lock import Lock

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), *sys.path])  # so that processes run the code that is tested
LONG = SMALL.replace(epochs=15, save_steps=10)


def wait_for(file: Path) -> None:
    began = time.monotonic()
    while not file.exists():
        assert time.monotonic() - began < 120
        time.sleep(0.01)


def command(folder: Path, *more: str) -> list[str]:
    (folder / "mine.toml").write_text(LONG.to_toml())
    return [sys.executable, "-m", "unskip", "train", str(folder / "mine.toml"), "--out", str(folder / "run"), *more]


def test_a_second_process_gets_a_sentence_and_touches_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = start(LONG, out)
    wait_for(out / "checkpoint.pt")
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)  # so that its files stand still while we look
    try:
        before = {file.name: file.read_bytes() for file in out.iterdir() if not file.name.endswith(".part")}
        for word in ("never", "auto"):
            with pytest.raises(
                ValueError, match=f"run is in use by process {first.pid} on host '{socket.gethostname()}'"
            ):
                run(LONG, out=out, resume=word, take_over=True, silent=True)
        words = command(tmp_path, "--resume", "auto", "--take-over")[3:]
        code, said, error = start_command(*words, cwd=tmp_path).finish()
        assert (code, said) == (2, "")
        assert error.count("\n") == 1
        assert f"in use by process {first.pid}" in error
        assert {file.name: file.read_bytes() for file in out.iterdir() if not file.name.endswith(".part")} == before
    finally:
        os.kill(first.pid, signal.SIGCONT)
    first.join()
    assert first.exitcode == 0
    assert not (out / "lock.json").exists()
    run(LONG, out=tmp_path / "alone", silent=True)
    assert (out / "weights.safetensors").read_bytes() == (tmp_path / "alone" / "weights.safetensors").read_bytes()


def race(tmp_path: Path, rounds: int) -> None:
    """Four processes at the same time, with and without a lock that a dead one has left: exactly one trains."""
    recipe = REGISTERED.replace(epochs=30)
    run(recipe, out=tmp_path / "alone", silent=True)
    for i in range(rounds):
        out = tmp_path / str(i)
        out.mkdir()
        if i % 2:
            write_lock(out, process=2**22 + 1)
        processes = [start(recipe, out) for _ in range(4)]
        for process in processes:
            process.join()
        assert sorted(bool(process.exitcode) for process in processes) == [False, True, True, True]
        assert (out / "weights.safetensors").read_bytes() == (tmp_path / "alone" / "weights.safetensors").read_bytes()
        assert not (out / "lock.json").exists()


@pytest.mark.full
def test_four_processes_at_the_same_time(tmp_path: Path) -> None:
    race(tmp_path, 2)


@pytest.mark.deep
def test_four_processes_at_the_same_time_again_and_again(tmp_path: Path) -> None:
    race(tmp_path, 10)


def test_the_lock_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    process = start(LONG, tmp_path)
    wait_for(tmp_path / "checkpoint.pt")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert json.loads((tmp_path / "lock.json").read_text())["process"] == process.pid
    run(LONG, out=tmp_path, resume="auto", silent=True)
    assert not (tmp_path / "lock.json").exists()


def write_lock(folder: Path, **changes: object) -> None:
    """The lock that this process would write, with some values changed."""
    lock = Lock(folder)
    lock.acquire()
    lock.path.write_text(json.dumps({**json.loads(lock.text), **changes}))


def test_a_number_that_another_process_has_got_since(tmp_path: Path) -> None:
    write_lock(tmp_path, started=psutil.Process().create_time() - 3600)
    Lock(tmp_path).acquire()
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
        Lock(tmp_path).acquire()


def test_a_process_that_is_dead_and_not_yet_buried(tmp_path: Path) -> None:
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    started = psutil.Process(zombie.pid).create_time()
    while psutil.Process(zombie.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    write_lock(tmp_path, process=zombie.pid, started=started)
    Lock(tmp_path).acquire()
    zombie.wait()


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"namespace": "pid:[1]"}])
def test_a_lock_of_another_host_needs_to_be_taken_over(tmp_path: Path, changes: dict[str, str]) -> None:
    write_lock(tmp_path, process=7, **changes)
    before = (tmp_path / "lock.json").read_bytes()
    host = changes.get("host", socket.gethostname())
    with pytest.raises(ValueError, match=rf"locked by process 7 on host '{host}' \(lock.json\).*--take-over"):
        run(SMALL, out=tmp_path, silent=True)
    assert (tmp_path / "lock.json").read_bytes() == before
    run(SMALL.replace(epochs=1, warmup_epochs=0.0), out=tmp_path, take_over=True, silent=True)
    assert not (tmp_path / "lock.json").exists()


@pytest.mark.parametrize("text", ["", "{}", "[3]", '{"process": "x"}', '{"process": 3}', "[" * 9000, "\x00"])
def test_a_lock_that_says_nothing_needs_to_be_taken_over(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # for its owner to write it
    (tmp_path / "lock.json").write_text(text)
    with pytest.raises(ValueError, match=r"locked by an unknown process .*--take-over"):
        Lock(tmp_path).acquire()
    Lock(tmp_path).acquire(take_over=True)


def test_a_folder_that_cannot_be_locked_is_said(tmp_path: Path) -> None:
    (tmp_path / "lock.json").mkdir()
    with pytest.raises(ValueError, match=r"can't be written: Is a directory"):
        RunFolder(tmp_path).open("never")


def test_a_run_ends_when_another_has_taken_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, saved = Display.epoch, {}

    def take(display: Display, row: dict[str, object]) -> None:
        original(display, row)
        if row["epoch"] == 2:
            (tmp_path / "lock.json").write_text("another's")
            saved.update({name: (tmp_path / name).read_bytes() for name in ("checkpoint.pt", "recipe.toml")})

    monkeypatch.setattr(Display, "epoch", take)
    with pytest.raises(ValueError, match=r"lock\.json is gone or another process's, which has taken the folder over"):
        run(LONG.replace(save_steps=0), out=tmp_path, silent=True)
    assert (tmp_path / "lock.json").read_text() == "another's"
    assert saved == {name: (tmp_path / name).read_bytes() for name in saved}


@pytest.mark.full
def test_hangups_are_ignored_under_nohup(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
    words = ["nohup", *command(tmp_path, "--epochs", "20")]
    process = subprocess.Popen(words, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(tmp_path / "run" / "checkpoint.pt")
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert b"20 epochs" in out
