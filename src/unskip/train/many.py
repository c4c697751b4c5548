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


def run_many(
    recipes: Mapping[str, Recipe],
    folder: Path,
    *,
    data_dir: Path | None = None,
    at_once: int = 8,
    minutes: float | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Finished]:
    """Trains every recipe that is not finished yet, `at_once` at a time.

    Args:
        recipes: one for each run, by the name of its folder. All must agree on device, precision and compilation.
        folder: holds one run folder for each name.
        data_dir: where the data set lies. It is read once for all runs that share it.
        at_once: how many models train at the same time.
        minutes: pauses all runs after this time. The same call goes on with them.
        say: gets one sentence for each event.

    Raises:
        TrainingInterrupted: SIGINT or SIGTERM came, or the time is up; every run has been saved.
        ValueError: the folder holds other runs, or a run failed; the others are finished first.
    """
    if at_once < 1:
        raise ValueError(f"train: at_once={at_once} must be at least 1.")
    first = next(iter(recipes.values()))
    for name, recipe in recipes.items():
        check_recipe(folder / name, recipe)
        for field in SHARED:
            if getattr(recipe.run, field) != getattr(first.run, field):
                raise ValueError(
                    f"train: runs that share a device must agree on {field}, and {name!r} has "
                    f"{getattr(recipe.run, field)!r}, not {getattr(first.run, field)!r}. Train it in a call of its own."
                )
    left = {name: recipe for name, recipe in recipes.items() if finished(folder / name) is None}
    if len(left) < len(recipes):
        say(f"{len(recipes) - len(left)} of {len(recipes)} runs are done already.")
    failures = _train(left, folder, data_dir, at_once, minutes, say) if left else []
    if failures:
        raise ValueError(
            f"train: {len(failures)} of {len(recipes)} runs failed. {'; '.join(failures)}. The same command goes on "
            "with what is left."
        )
    results = {name: finished(folder / name) for name in recipes}
    return {name: result for name, result in results.items() if result is not None}


def _train(
    recipes: Mapping[str, Recipe],
    folder: Path,
    data_dir: Path | None,
    at_once: int,
    minutes: float | None,
    say: Callable[[str], None],
) -> list[str]:
    """Trains all recipes and returns one sentence for each run that failed."""
    epochs = " or ".join(map(str, sorted({recipe.run.epochs for recipe in recipes.values()})))
    say(f"Runs to train: {len(recipes)} (epochs: {epochs}), {at_once} at a time, in {folder}.")
    configs = {recipe.data for recipe in recipes.values()}
    data = {
        config: sets.load(config, data_dir) for config in configs
    }  # before the first run, so that a wrong path ends all
    for note in dict.fromkeys(note for each in data.values() for note in each.notes):
        say(f"Note: {note}.")
    failures: list[str] = []
    interrupted: TrainingInterrupted | None = None
    updates, began = 0, time.perf_counter()
    waiting = dict(recipes)
    active: dict[str, tuple[Generator[None, None, Result], torch.cuda.Stream | None]] = {}
    with machine.seeded_run(next(iter(recipes.values())).run), machine.Stop(minutes) as stop:
        while active or (waiting and not stop.asked):
            while waiting and len(active) < at_once and not stop.asked:
                name = next(iter(waiting))
                recipe = waiting.pop(name)
                training = train_one(
                    recipe, data=data[recipe.data], out=folder / name, resume="auto", stop=stop, silent=True
                )
                active[name] = training, torch.cuda.Stream() if torch.cuda.is_available() else None
            for name, (training, stream) in list(active.items()):
                try:
                    with torch.cuda.stream(stream):
                        next(training)
                    updates += 1
                    continue
                except StopIteration as ended:
                    result: Result = ended.value
                    say(f"{name}: {result.test_error:.2f} % test error, {result.seconds:.0f} s")
                except TrainingDiverged as error:
                    (folder / name / "diverged.txt").write_text(f"{error}\n", encoding="utf-8")
                    say(f"{name}: diverged")
                except TrainingInterrupted as error:
                    interrupted = error
                except Exception as error:  # one broken run must not take the others with it
                    failures.append(f"{name} ended with {type(error).__name__}: {error}")
                    say(failures[-1])
                del active[name]
        if stop.asked:
            raise interrupted or TrainingInterrupted(f"train: stopped by {stop.asked} before the first update.")
    if updates:
        milliseconds = 1000 * (time.perf_counter() - began) / updates
        say(f"{updates:,} updates, {milliseconds:.2f} ms each with {at_once} models at a time.")
    return failures


def check_recipe(run: Path, wanted: Recipe) -> None:
    """Refuses a folder that holds a run with other settings."""
    file = run / "recipe.toml"
    if not file.is_file():
        return
    there, wanted_numbers = load_recipe(file).same_numbers(), wanted.same_numbers()
    different = [key for key, value in wanted_numbers.items() if there.get(key) != value]
    if different:
        words = ", ".join(f"{key}={there.get(key)!r} and not {wanted_numbers[key]!r}" for key in different)
        raise ValueError(f"train: {run} holds a run with {words}. Choose another folder (--out), or remove it.")


def finished(run: Path) -> Finished | None:
    """The outcome of a run, None while it is not done."""
    if (run / "diverged.txt").is_file():
        return Finished(name=run.name, test_error=None, test_loss=None, val_error=None, parameters=None, seconds=0.0)
    if not (run / "result.json").is_file():
        return None
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    epochs = tuple(row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "epoch")
    keys = ("test_error", "test_loss", "val_error", "parameters", "seconds")
    return Finished(name=run.name, epochs=epochs, **{key: result[key] for key in keys})
