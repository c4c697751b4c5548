"""Many training runs, several at a time: one `unskip train` process each, in folders that a second call goes on with.

    FOLDER/runs/NAME.toml        the recipe of a run
    FOLDER/runs/NAME/            its folder (`unskip.train.checkpoint`), with result.json once it is done
    FOLDER/runs/NAME/diverged.txt   instead, where its loss became no number
    FOLDER/logs/NAME.txt         what it printed

A run that is done is not run again, one that was stopped or killed goes on from its checkpoint, and a folder that holds
runs of other settings is refused.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from unskip.train.machine import Stop
from unskip.train.recipe import Recipe, load_recipe

DIVERGED, STOPPED = 3, 75  # exit codes of `unskip train`


class Paused(Exception):  # noqa: N818 - no error
    """A signal asked for a stop; every run has been saved, and the same command goes on."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What came out of one run."""

    name: str
    test_error: float | None  # percent; None: diverged
    val_error: float | None
    parameters: int | None  # trained
    seconds: float


def train_all(
    recipes: Mapping[str, Recipe],
    folder: Path,
    *,
    data: Path | None,
    at_once: int,
    say: Callable[[str], None] = lambda words: None,
) -> dict[str, Finished]:
    """Trains every recipe that is not done yet, `at_once` at a time, and returns what came out of all of them.

    Raises:
        Paused: after SIGINT or SIGTERM, when every process has saved its run.
        ValueError: where the folder holds other runs, or a process failed; the others are finished first.
    """
    for part in ("runs", "logs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name, recipe in recipes.items():
        check_recipe(folder, name, recipe)
    left = [name for name in recipes if finished(folder, name) is None]
    if len(left) < len(recipes):
        say(f"{len(recipes) - len(left)} of {len(recipes)} runs are done already.")
    if left:
        epochs = " or ".join(map(str, sorted({recipes[name].run.epochs for name in left})))
        say(f"Runs to train: {len(left)} (epochs: {epochs}), {at_once} at a time. What each prints: {folder / 'logs'}")
    crew = WorkerPool(folder, data, threads=max(1, (os.cpu_count() or 1) // at_once))
    failures = []
    with Pause(), ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(crew.train, name, recipes[name]): name for name in left}
        try:
            for future in as_completed(futures):
                name, code = futures[future], future.result()
                done = finished(folder, name)
                if done is None and code is not None:
                    failures.append(f"{name} ended with exit code {code}: {last_line(folder, name)}")
                    say(failures[-1])
                    if code == STOPPED or code == 2:  # somebody stopped it; or the input is wrong, for all of them
                        break
                elif done is not None:
                    error = "diverged" if done.test_error is None else f"{done.test_error:.2f} % test error"
                    ready = sum(finished(folder, each) is not None for each in recipes)
                    say(f"{name}: {error}, {done.seconds:.0f} s ({ready} of {len(recipes)})")
        except Paused:
            say("Stopping: every run is saved first.")
            raise
        finally:
            crew.stop()
            for future in futures:
                future.cancel()
    if failures:
        raise ValueError(
            f"reproduce: {len(failures)} of {len(recipes)} runs failed. {'; '.join(failures)}. What they printed is in "
            f"{folder / 'logs'}; the same command goes on with what is left."
        )
    results = {name: finished(folder, name) for name in recipes}
    return {name: result for name, result in results.items() if result is not None}


class WorkerPool:
    """Starts the processes, and stops them."""

    def __init__(self, folder: Path, data: Path | None, threads: int) -> None:
        self.folder, self.data, self.threads = folder, data, threads
        self.lock, self.stopping = threading.Lock(), False
        self.processes: list[subprocess.Popen[bytes]] = []

    def train(self, name: str, recipe: Recipe) -> int | None:
        """The exit code of one run; None where it was not begun or was stopped by us."""
        file = self.folder / "runs" / f"{name}.toml"
        command = [sys.executable, "-m", "unskip", "train", str(file), "--out", str(file.with_suffix("")), "--resume"]
        command += ["auto", *([] if self.data is None else ["--data", str(self.data)])]
        environment = {"OMP_NUM_THREADS": str(self.threads), **os.environ}
        with open(self.folder / "logs" / f"{name}.txt", "ab") as log:
            with self.lock:
                if self.stopping:
                    return None
                file.write_text(recipe.to_toml(), encoding="utf-8")
                # In a session of its own, so that Ctrl-C reaches it once, through us.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
                self.processes.append(process)
            code = process.wait()
        if code == DIVERGED:
            last = f"{last_line(self.folder, name)}\n"
            (file.with_suffix("") / "diverged.txt").write_text(last, encoding="utf-8")
        return None if self.stopping else code

    def stop(self) -> None:
        """Asks all processes to save and end, and waits for them."""
        with self.lock:
            self.stopping = True
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            process.wait()


class Pause(Stop):
    """SIGINT and SIGTERM raise Paused at once; a second one acts as it always does."""

    def note(self, number: int, frame: FrameType | None) -> None:
        super().note(number, frame)
        raise Paused(f"reproduce: stopped by {self.asked}; every run is saved, and the same command goes on.")


def check_recipe(folder: Path, name: str, wanted: Recipe) -> None:
    """Refuses a folder in which this name is a run of other settings."""
    file = folder / "runs" / name / "recipe.toml"
    if not file.is_file():
        return
    there, wanted_numbers = load_recipe(file).same_numbers(), wanted.same_numbers()
    different = [key for key, value in wanted_numbers.items() if there.get(key) != value]
    if different:
        words = ", ".join(f"{key}={there.get(key)!r} and not {wanted_numbers[key]!r}" for key in different)
        raise ValueError(
            f"reproduce: {file.parent} holds a run with {words}. Choose another folder (--out), or remove it."
        )


def finished(folder: Path, name: str) -> Finished | None:
    """What came out of a run, None while it is not done."""
    run = folder / "runs" / name
    if (run / "diverged.txt").is_file():
        return Finished(name=name, test_error=None, val_error=None, parameters=None, seconds=0.0)
    if not (run / "result.json").is_file():
        return None
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    return Finished(name=name, **{key: result[key] for key in ("test_error", "val_error", "parameters", "seconds")})


def last_line(folder: Path, name: str) -> str:
    text = (folder / "logs" / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
