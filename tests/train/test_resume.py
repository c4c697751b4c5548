"""SIGKILL at random moments and resume: losses, final weights and metrics.jsonl are those of an unbroken run."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unskip
from tests.train.small import REGISTERED, SMALL, start
from unskip.train import Recipe, run
from unskip.train.checkpoint import RunFolder, load_checkpoint
from unskip.train.metrics import read_metrics

# Dropout, drawn from the global generator, and an EMA are in it, so that forgetting either is noticed.
RECIPE = SMALL.replace(
    epochs=4, crop="pad", pad=1, options={"drop": 0.2}, ema=0.9, save_steps=3, log_steps=4, keep="best"
)


def kept(out: Path) -> tuple[list[tuple[object, ...]], bytes, bytes]:
    """Everything of a run that must not depend on kills: each row without its speed, and the weights."""
    rows = [tuple((k, v) for k, v in row.items() if k != "images_per_s") for row in read_metrics(out / "metrics.jsonl")]
    return rows, (out / "weights.safetensors").read_bytes(), (out / "best.safetensors").read_bytes()


def kill_and_resume(recipe: Recipe, out: Path, seed: int) -> int:
    """Starts the run again and again, killing it after a random time, until it ends by itself. Returns the kills."""
    chance, kills = random.Random(seed), 0
    while True:
        began = time.monotonic()
        process = start(recipe, out)
        file = out / "metrics.jsonl"
        size = file.stat().st_size if file.exists() else 0
        while process.is_alive() and not (file.exists() and file.stat().st_size != size):
            time.sleep(0.002)  # until it writes, so that the kill hits training and not the start
            assert time.monotonic() - began < 120
        process.join(timeout=chance.uniform(0.0, 0.3))
        if process.exitcode is not None:
            assert process.exitcode == 0
            return kills
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        assert kills < 60


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    process = start(RECIPE, out)
    process.join()
    assert process.exitcode == 0
    rows = read_metrics(out / "metrics.jsonl")
    assert [r["step"] for r in rows if r["kind"] == "step"] == list(range(1, 81))
    return out


def check(whole: Path, tmp_path: Path, seed: int) -> None:
    kills = kill_and_resume(RECIPE, tmp_path / "run", seed)
    assert kills >= 1
    assert kept(tmp_path / "run") == kept(whole)
    assert not list((tmp_path / "run").glob(".*"))  # no half-written files


@pytest.mark.parametrize("seed", range(1))
def test_killed_and_resumed(whole: Path, tmp_path: Path, seed: int) -> None:
    check(whole, tmp_path, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 20))
def test_killed_and_resumed_more(whole: Path, tmp_path: Path, seed: int) -> None:
    check(whole, tmp_path, seed)


def kill_writes(tmp_path: Path, kills: int) -> None:
    """Kills a run while it writes, again and again. What was there stays, and loads; the end is as if never killed."""
    recipe, out, chance, torn, step = REGISTERED.replace(save_steps=1), tmp_path / "run", random.Random(kills), 0, 0
    for _ in range(kills):
        process = start(recipe, out)
        while not list(out.glob(".*.part")):  # of a file that is being written
            assert process.is_alive()
            time.sleep(0.0005)
        time.sleep(chance.uniform(0.0, 0.005))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        torn += bool(list(out.glob(".*.part")))
        assert (out / "lock.json").exists()
        if (out / "checkpoint.pt").exists():
            found = load_checkpoint(out / "checkpoint.pt")["step"]
            assert found >= step
            step = found
            assert isinstance(unskip.load(out), torch.nn.Module)
        else:
            assert step == 0
            with pytest.raises(ValueError, match=r"holds no checkpoint\.pt"):
                unskip.load(out)
    assert torn
    for folder in (out, tmp_path / "whole"):
        process = start(recipe, folder)
        process.join()
        assert process.exitcode == 0
    for name in ("weights.safetensors", "recipe.toml"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    rows = [
        [{**row, "images_per_s": 0} for row in read_metrics(f / "metrics.jsonl")] for f in (out, tmp_path / "whole")
    ]
    assert rows[0] == rows[1]
    assert not list(out.glob(".*.part")) + list(out.glob("lock.json"))


@pytest.mark.full
def test_killed_while_it_writes(tmp_path: Path) -> None:
    kill_writes(tmp_path, 4)


@pytest.mark.deep
def test_killed_twenty_times_while_it_writes(tmp_path: Path) -> None:
    kill_writes(tmp_path, 20)


def test_a_run_that_goes_on_from_any_update(tmp_path: Path) -> None:
    """Without chance: every update of a short run is a place to go on from."""
    recipe = RECIPE.replace(epochs=1, batch=256, warmup_epochs=0.0, save_steps=1)
    run(recipe, out=tmp_path / "whole", silent=True)
    saved = RunFolder.save

    def cut_after(stop: int) -> Callable[[RunFolder, dict[str, Any]], None]:
        def save(self: RunFolder, state: dict[str, Any]) -> None:
            saved(self, state)
            if state["step"] == stop:
                raise InterruptedError

        return save

    for stop in range(1, 6):
        out = tmp_path / str(stop)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunFolder, "save", cut_after(stop))
            with pytest.raises(InterruptedError):
                run(recipe, out=out, silent=True)
        run(recipe, out=out, resume="auto", silent=True)
        assert kept(out) == kept(tmp_path / "whole")


def test_images_that_are_held_elsewhere_are_refused(tmp_path: Path) -> None:
    """`cache_gib` is free to change, until the images would be cropped by another feed, with other numbers."""
    recipe = SMALL.replace(epochs=1, crop="pad")
    run(recipe, out=tmp_path, silent=True)
    run(recipe.replace(cache_gib=4.0), out=tmp_path, resume="auto", silent=True)
    with pytest.raises(ValueError, match=r"another way to hold its images \(cache_gib\): feed was 'DeviceFeed' and is"):
        run(recipe.replace(cache_gib=1e-9, workers=0), out=tmp_path, resume="auto", silent=True)
