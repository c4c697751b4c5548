"""Tables and figures that need trained networks: their rows, their settings, their training, and their record.

A row is a recipe beside the number that the paper prints. Rows train several at a time (`unskip.train.many`);
rows of methods that are not ours to run have the paper's number alone.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from matplotlib.figure import Figure
from rich.console import Console

from unskip._core.config import to_toml
from unskip._core.text import nearest
from unskip._core.version import __version__
from unskip.reproduce.images import IN_MEMORY, DataPath
from unskip.reproduce.papers import Cell
from unskip.reproduce.registry import Outcome, Settings, between, one_of
from unskip.train.many import Finished, finished, run_many
from unskip.train.recipe import Recipe
from unskip.train.trainer import TrainingInterrupted

EPOCHS = between(1, 1_000_000, "; leave it out for the paper's number")
DECAY = between(0, 100, "; leave it out for the paper's")


@dataclass(frozen=True, kw_only=True)
class Trained(Settings):
    """What can be set about every table of trained networks."""

    epochs: Annotated[int | None, "epochs of each network; as many as the paper's unless given", EPOCHS] = None
    seeds: Annotated[int, "runs of each row", between(1, 1000)] = 3
    weight_decay: Annotated[float | None, "weight decay of each network; the paper's unless given", DECAY] = None
    rows: Annotated[str, "the rows to run, by name and with commas between; empty: all"] = ""
    dataset: Annotated[
        str, "the data set: cifar10; or cifar100, digits, fashion_mnist, npz or sprites, to try it out", IN_MEMORY
    ] = "cifar10"
    data: DataPath = None
    device: Annotated[str, "the device: auto, cpu or cuda", one_of("auto", "cpu", "cuda")] = "auto"
    at_once: Annotated[
        int | None,
        "networks that train at a time; 8 on a GPU and 1 on a CPU unless given",
        between(1, 1000, "; leave it out for 8 on a GPU and 1 on a CPU"),
    ] = None
    minutes: Annotated[float | None, "pause after so many minutes; the same command continues", between(0, 1e6)] = None
    whole_runs: Annotated[bool, "start no run that would not end within the minutes"] = False
    results_only: Annotated[bool, "keep the results of finished runs alone, without weights; a few KB each"] = False
    train: Annotated[bool, "train what is left; without it the table is of the runs that are there"] = True
    take_over: Annotated[bool, "continue runs that a process of another host has locked and left"] = False
    cuda_graph: Annotated[bool, "record each update as a CUDA graph, on a GPU"] = True
    compile: Annotated[
        bool, "compile blocks with torch.compile, which takes its time for each network and is repaid by long runs"
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("reproduce: device='cuda', but PyTorch finds no GPU here. Use auto or cpu.")

    @property
    def gpu(self) -> bool:
        return self.device != "cpu" and torch.cuda.is_available()


T = TypeVar("T", bound=Trained)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table."""

    name: str  # for --rows, and of its runs
    label: str  # as the paper prints it, or in our words
    recipe: Recipe | None = None  # None: not run, the paper's number alone
    error: Cell = None  # percent, as the paper prints it: a number, "diverges" or nothing
    spread: Cell = None  # of it
    params: Cell = None  # millions, as the paper prints it

    def printed(self) -> str:
        """The paper's number with its spread."""
        if self.error is None or isinstance(self.error, str):
            return self.error or "–"
        return f"{self.error:.2f}" + ("" if self.spread is None else f" ± {self.spread:.2f}")


def run_recipe(recipe: Recipe, settings: Trained, seed: int, *, dataset: str = "") -> Recipe:
    """The recipe of one run: the paper's, except for what the user and the machine want."""
    epochs = recipe.run.epochs if settings.epochs is None else settings.epochs
    return recipe.replace(
        dataset=dataset or settings.dataset,
        epochs=epochs,
        milestones=tuple(max(1, round(m * epochs / recipe.run.epochs)) for m in recipe.optimizer.milestones),
        warmup_epochs=min(recipe.optimizer.warmup_epochs, epochs),
        weight_decay=recipe.optimizer.weight_decay if settings.weight_decay is None else settings.weight_decay,
        seed=seed,
        device="auto" if settings.gpu else "cpu",
        precision=recipe.run.precision if settings.gpu else "fp32",
        cuda_graph=settings.gpu and settings.cuda_graph,
        compile="blocks" if settings.compile else "no",
        save_seconds=300.0,  # a pause saves too
    )


def chosen(rows: Sequence[Row], settings: Trained) -> list[Row]:
    """The rows that the user asks for."""
    known = [row.name for row in rows if row.recipe is not None]
    names = [name.strip() for name in settings.rows.split(",") if name.strip()] or known
    for name in names:
        if name not in known:
            raise ValueError(f"reproduce: --rows has {name!r}, and there is no such row to run.{nearest(name, known)}")
    return [row for row in rows if row.name in names or (row.recipe is None and not settings.rows)]


def train(
    recipes: Mapping[str, Recipe], settings: Trained, folder: Path
) -> tuple[dict[str, Finished], TrainingInterrupted | None]:
    """Trains all recipes, several at once, reports progress on stderr, and accounts for the time in calls.jsonl.

    Returns the finished runs and, where training was stopped before the end of all, what to raise once they are shown.
    """
    ended: TrainingInterrupted | None = None
    if settings.train and recipes:
        try:
            _train(recipes, settings, folder)
        except TrainingInterrupted as pause:
            ended = pause
    found = {name: finished(folder / name) for name in recipes}
    return {name: run for name, run in found.items() if run is not None}, ended


def with_time_left(settings: T, began: float) -> T:
    """The settings of a second training in one call, which began at this time.monotonic()."""
    if settings.minutes is None:
        return settings
    return replace(settings, minutes=max(0.0, settings.minutes - (time.monotonic() - began) / 60))


def _train(recipes: Mapping[str, Recipe], settings: Trained, folder: Path) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    at_once = settings.at_once or (8 if settings.gpu else 1)
    began = time.perf_counter()
    try:
        run_many(
            recipes,
            folder,
            data_dir=settings.data,
            at_once=at_once,
            minutes=settings.minutes,
            whole_runs=settings.whole_runs,
            results_only=settings.results_only,
            take_over=settings.take_over,
            say=lambda sentence: console.print(sentence, markup=False),
        )
    finally:
        call = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if settings.gpu else "CPU",
            "at_once": at_once,
            "seconds": round(time.perf_counter() - began, 1),
        }
        if folder.is_dir():
            with (folder / "calls.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(call) + "\n")


def versions() -> dict[str, str]:
    """Of what a result depends on, and the device."""
    found = {"unskip": __version__, "python": sys.version.split()[0]}
    found |= {name: version(name) for name in ("torch", "torchvision", "timm", "accelerate")}
    return {**found, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Mean and standard deviation of a row's test errors (percent) over the runs that did not diverge."""

    n: int
    diverged: int
    mean: float | None
    spread: float | None  # None for fewer than two runs

    def __str__(self) -> str:
        if self.mean is None:
            return f"diverges (n = {self.diverged})"
        spread = "" if self.spread is None else f" ± {self.spread:.2f}"
        lost = f", {self.diverged} diverged" if self.diverged else ""
        return f"{self.mean:.2f}{spread} (n = {self.n}{lost})"


def summary(runs: Sequence[Finished]) -> Summary:
    errors = [run.test_error for run in runs if run.test_error is not None]
    return Summary(
        n=len(errors),
        diverged=len(runs) - len(errors),
        mean=statistics.fmean(errors) if errors else None,
        spread=statistics.stdev(errors) if len(errors) > 1 else None,
    )


def mean(values: Sequence[float | None], digits: int = 2) -> str:
    """Mean ± standard deviation of the numbers among the values, as text; '' where there are none."""
    known = [value for value in values if value is not None]
    spread = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.{digits}f}{spread}" if known else ""


@dataclass(frozen=True)
class TrainedTable:
    """The rows of a table and their finished runs."""

    name: str  # of the reproduction
    settings: Trained
    rows: Sequence[Row]
    runs: Mapping[str, Sequence[Finished]]  # by row, one for each seed
    ended: TrainingInterrupted | None = None  # time was up before all of them

    def mean(self, row: str) -> float | None:
        """The mean test error of a row in percent; None where it was not run or diverged."""
        return summary(self.runs.get(row, ())).mean

    def difference(self, less: str, more: str, words: str) -> str:
        """A sentence about one row's error less another's; '' unless both were run."""
        rows = {row.name: row for row in self.rows}
        ours, other = self.mean(less), self.mean(more)
        if ours is None or other is None:
            return ""
        printed = [error for error in (rows[less].error, rows[more].error) if isinstance(error, int | float)]
        paper = f"paper {printed[0] - printed[1]:+.2f}, " if len(printed) == 2 else ""
        return f"{words}: {paper}ours {ours - other:+.2f} points."

    def validation(self) -> list[str]:
        """A table of the rows that hold training images out: what they are compared by."""
        lines = ["| row | validation loss | validation error % |", "|---|---:|---:|"]
        for row in self.rows:
            runs = self.runs.get(row.name, ())
            loss, error = mean([run.val_loss for run in runs], 4), mean([run.val_error for run in runs])
            lines += [f"| {row.label} | {loss} | {error} |"] if loss else []
        return lines if len(lines) > 2 else []

    def markdown(self) -> list[str]:
        """Paper and ours side by side."""
        lines = [
            "| row | test error %: paper | ours | each seed | trained parameters: paper | ours |",
            "|---|---:|---:|---|---:|---:|",
        ]
        for row in self.rows:
            runs = self.runs.get(row.name, ())
            each = ", ".join("diverged" if run.test_error is None else f"{run.test_error:.2f}" for run in runs)
            counted = next((f"{run.parameters:,}" for run in runs if run.parameters is not None), "")
            params = "" if row.params is None else f"{row.params} M"
            cells = [row.label, row.printed(), str(summary(runs)) if runs else "not run", each, params, counted]
            lines.append(f"| {' | '.join(cells)} |")
        return lines

    def outcome(
        self, findings: Iterable[str] = (), *, datasets: Sequence[str] = ("cifar10",), figure: Figure | None = None
    ) -> Outcome:
        """Table, record and README. `datasets` are those of the paper's numbers; empty findings are left out."""
        settings, table, findings = self.settings, self.markdown(), [finding for finding in findings if finding]
        recipes = {row.name: row.recipe for row in self.rows if row.recipe is not None}
        papers = " or ".join(map(str, sorted({recipe.run.epochs for recipe in recipes.values()})))
        about = [
            f"Epochs: {settings.epochs or papers} (the paper's: {papers}). Seeds: {settings.seeds} a row; ± is the "
            f"standard deviation over them. Data: {settings.dataset}. Test errors are of the last weights."
        ]
        if settings.dataset not in datasets:
            about.append(f"The paper's numbers are of {' and '.join(datasets)}: don't compare ours with them.")
        seconds = sum(run.seconds for runs in self.runs.values() for run in runs)
        about_run = versions()
        readme = [
            *about,
            "",
            *table,
            "",
            *findings,
            "",
            "## How",
            f"`unskip reproduce {self.name} {flags(settings)}`: {seconds:.0f} s of training in all. "
            f"{', '.join(f'{key} {value}' for key, value in about_run.items())}.",
            "",
            "`results.json` has every run with its epochs. Where the rows' recipes differ from the defaults of "
            "`unskip.train.Recipe`, for seed 0:",
            "",
            *[f"- {name}: {changes(run_recipe(recipe, settings, 0))}" for name, recipe in recipes.items()],
        ]
        rows: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            numbers = {"label": row.label, "paper": row.error, "paper_spread": row.spread, "paper_params_m": row.params}
            runs = self.runs.get(row.name, ())
            ours = {"ours": asdict(summary(runs))} if runs else {}
            rows[row.name] = {**numbers, "runs": [asdict(run) for run in runs], **ours}
        return Outcome(
            lines=(*table, *about, *findings),
            numbers={"rows": rows, "versions": about_run},
            readme=tuple(readme),
            figure=figure,
            ended=self.ended,
        )


def train_table(name: str, settings: Trained, rows: Sequence[Row], folder: Path) -> TrainedTable:
    """Trains the chosen rows that have a recipe, once for each seed, in `folder`/runs."""
    rows = chosen(rows, settings)
    recipes = {
        f"{row.name}_s{seed}": run_recipe(row.recipe, settings, seed)
        for seed in range(settings.seeds)  # so that every row has a first number early
        for row in rows
        if row.recipe is not None
    }
    done, ended = train(recipes, settings, folder / "runs")
    runs = {
        row.name: [run for seed in range(settings.seeds) if (run := done.get(f"{row.name}_s{seed}")) is not None]
        for row in rows
        if row.recipe is not None
    }
    return TrainedTable(name, settings, rows, runs, ended)


def flags(settings: Trained) -> str:
    """The options of the command that has these settings; the user's folder is written as DIR."""
    words = []
    for each in fields(settings):
        value, option = getattr(settings, each.name), each.name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{option}" if value else f"--no-{option}"] if value is not each.default else []
        elif value not in (None, ""):
            words.append(f"--{option} {'DIR' if each.name == 'data' else value}")
    return " ".join(words)


def changes(recipe: Recipe) -> str:
    """The fields in which a recipe differs from the defaults, as TOML."""
    defaults = Recipe().flat()
    return ", ".join(f"`{key} = {to_toml(value)}`" for key, value in recipe.flat().items() if defaults[key] != value)
