"""Several models at once on one device, in turns of one update: a CUDA stream and, with `cuda_graph`, a graph each.

A small network leaves most of a large GPU idle. The streams run side by side, so eight of them take about half of the
time that they take one after the other.

    FOLDER/NAME/               the folder of a run (`unskip.train.checkpoint`), with result.json once it is done
    FOLDER/NAME/diverged.txt   instead, where its loss became no number

A finished run is not repeated, an interrupted one goes on from its checkpoint, and a folder that holds a run with other
settings is refused.

Results agree with `unskip.train.run` up to the order of floating-point sums. Only what a model itself draws while it
trains (dropout, drop path) depends on which models train beside it.
"""

import json
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unskip.data import sets
from unskip.train import machine
from unskip.train.checkpoint import check_same, write_atomically
from unskip.train.metrics import read_metrics
from unskip.train.recipe import Recipe, load_recipe
from unskip.train.runner import Result, train_one
from unskip.train.trainer import TrainingDiverged, TrainingInterrupted

SHARED = ("device", "precision", "deterministic", "cuda_graph", "compile")  # fields of RunConfig that all runs share


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The outcome of one run."""

    name: str
    test_error: float | None  # percent; None: diverged
    test_loss: float | None
    val_error: float | None  # percent
    parameters: int | None  # trained
    seconds: float
    epochs: tuple[dict[str, Any], ...] = ()  # one row for each, as in metrics.jsonl

    @property
    def val_loss(self) -> float | None:
        """The validation loss after the last epoch."""
        return self.epochs[-1].get("val_loss") if self.epochs else None


def run_many(
    recipes: Mapping[str, Recipe],
    folder: Path,
    *,
    data_dir: Path | None = None,
    at_once: int = 8,
    minutes: float | None = None,
    whole_runs: bool = False,
    results_only: bool = False,
    take_over: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Finished]:
    """Trains every recipe that is not finished yet, `at_once` at a time.

    Args:
        recipes: one for each run, by the name of its folder. All must agree on device, precision and compilation.
        folder: holds one run folder for each name.
        data_dir: where the data set lies. It is read once for all runs that share it.
        at_once: how many models train at the same time.
        minutes: pauses all runs after this time. The same call goes on with them.
        whole_runs: starts no run that would not end within `minutes`, by the time that an update has taken so far.
        results_only: keeps recipe.toml, result.json and the epochs' lines of metrics.jsonl of a finished run, a few KB.
        take_over: trains in folders that a process of another host has locked and left.
        say: gets one sentence for each event.

    Raises:
        TrainingInterrupted: SIGINT, SIGTERM or SIGHUP came, or the time is up; every run has been saved.
        ValueError: the folder holds other runs, or a run failed; the others are finished first.
    """
    if at_once < 1:
        raise ValueError(f"train: at_once={at_once} must be at least 1.")
    first = next(iter(recipes.values()))
    for name, recipe in recipes.items():
        check_recipe(folder / name, recipe)
        for field in SHARED:
            if getattr(recipe.run, field) != getattr(first.run, field):
                found = f"{getattr(recipe.run, field)!r}, not {getattr(first.run, field)!r}"
                raise ValueError(
                    f"train: runs at once must agree on {field}, and {name!r} has {found}. Train it alone."
                )
    left = {name: recipe for name, recipe in recipes.items() if finished(folder / name) is None}
    if len(left) < len(recipes):
        say(f"{len(recipes) - len(left)} of {len(recipes)} runs are done already.")
    if left:
        epochs = " or ".join(map(str, sorted({recipe.run.epochs for recipe in left.values()})))
        say(f"Runs to train: {len(left)} (epochs: {epochs}), {at_once} at a time, in {folder}.")
        # Before the first run, so that a wrong path ends all
        data = {config: sets.load(config, data_dir) for config in {recipe.data for recipe in left.values()}}
        for note in dict.fromkeys(note for each in data.values() for note in each.notes):
            say(f"Note: {note}.")
        with machine.seeded_run(first.run), machine.Stop(minutes) as stop:
            shared: dict[str, Any] = {
                "resume": "auto", "take_over": take_over, "stop": stop, "silent": True, "results_only": results_only
            }  # fmt: skip
            trainings = {
                name: train_one(recipe, data=data[recipe.data], out=folder / name, **shared)
                for name, recipe in left.items()
            }
            updates = {n: r.run.epochs * (len(data[r.data].train) // r.run.batch) for n, r in left.items()}
            failures = _take_turns(
                trainings, folder, at_once, stop, say,
                updates=updates if whole_runs and minutes is not None else {}, results_only=results_only,
            )  # fmt: skip
        if failures:
            raise ValueError(
                f"train: {len(failures)} of {len(recipes)} runs failed. {'; '.join(failures)}. The same command goes "
                "on with what is left."
            )
    results = {name: finished(folder / name) for name in recipes}
    return {name: result for name, result in results.items() if result is not None}


def _take_turns(
    trainings: dict[str, Generator[None, None, Result]],
    folder: Path,
    at_once: int,
    stop: machine.Stop,
    say: Callable[[str], None],
    *,
    updates: Mapping[str, int],
    results_only: bool,
) -> list[str]:
    """Runs all trainings, an update each in turn, and returns one sentence for each that failed.

    With the number of `updates` of each, one that would not end before the stop is not started.
    """
    failures: list[str] = []
    interrupted: TrainingInterrupted | None = None
    done, rounds, began = 0, 0, time.perf_counter()
    waiting = list(trainings)
    active: dict[str, torch.cuda.Stream | None] = {}
    while active or (waiting and not stop.asked):
        while waiting and len(active) < at_once and not stop.asked:
            pace = (time.perf_counter() - began) / max(1, rounds)  # seconds of an update of each
            fits = [name for name in waiting if updates.get(name, 0) * pace < stop.deadline - time.monotonic()]
            if not fits:
                break
            waiting.remove(fits[0])
            active[fits[0]] = torch.cuda.Stream() if torch.cuda.is_available() else None
        if not active:
            break
        rounds += 1
        for name, stream in list(active.items()):
            try:
                with torch.cuda.stream(stream):
                    next(trainings[name])
                done += 1
                continue
            except StopIteration as ended:
                if results_only:
                    _keep_results(folder / name)
                say(f"{name}: {ended.value.test_error:.2f} % test error, {ended.value.seconds:.0f} s")
            except TrainingDiverged as error:
                _note_divergence(folder / name, error)
                say(f"{name}: diverged")
            except TrainingInterrupted as error:
                interrupted = error
            except Exception as error:  # one broken run must not take the others with it
                failures.append(f"{name} ended with {type(error).__name__}: {error}")
                say(failures[-1])
            del active[name], trainings[name]
    if done:
        milliseconds = 1000 * (time.perf_counter() - began) / done
        say(f"{done:,} updates, {milliseconds:.2f} ms each with {at_once} models at a time.")
    if stop.asked and (interrupted or waiting):
        raise interrupted or TrainingInterrupted(f"train: stopped by {stop.asked} before the first update.")
    if waiting:
        raise TrainingInterrupted(
            f"train: {len(waiting)} runs would not have ended within {stop.minutes:g} minutes and were not started. "
            "The same command goes on with them."
        )
    return failures


def _keep_results(run: Path) -> None:
    """Leaves recipe, result and the lines of the epochs of a finished run."""
    metrics = run / "metrics.jsonl"
    kept = [row for row in read_metrics(metrics) if row["kind"] == "epoch"]
    write_atomically(metrics, lambda file: file.write("".join(json.dumps(row) + "\n" for row in kept).encode()))
    for name in ("checkpoint.pt", "weights.safetensors", "best.safetensors", "curves.png"):
        (run / name).unlink(missing_ok=True)


def check_recipe(run: Path, wanted: Recipe) -> None:
    """Refuses a folder that holds a run with other settings."""
    file = run / "recipe.toml"
    if file.is_file():
        check_same(load_recipe(file).same_numbers(), wanted.same_numbers(), "recipe", file)


def _note_divergence(run: Path, error: TrainingDiverged) -> None:
    write_atomically(run / "diverged.txt", lambda file: file.write(f"{error}\n".encode()))


def finished(run: Path) -> Finished | None:
    """The outcome of a run, None while it is not done."""
    if (run / "diverged.txt").is_file():
        return Finished(name=run.name, test_error=None, test_loss=None, val_error=None, parameters=None, seconds=0.0)
    if not (run / "result.json").is_file():
        return None
    keys = ("test_error", "test_loss", "val_error", "parameters", "seconds")
    try:
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        epochs = tuple(row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "epoch")
        return Finished(name=run.name, epochs=epochs, **{key: result[key] for key in keys})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"train: the result in {run} can't be read ({error}). Remove result.json to go on.") from error
