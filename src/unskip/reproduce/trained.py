"""Tables and figures that need trained networks: their rows, what all of them let a user set, and what they write.

A row is a recipe beside the number that the paper prints. Rows train several at a time (`unskip.train.many`);
rows of methods that are not ours to run stand in the table with the paper's number alone.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
from matplotlib.figure import Figure
from rich.console import Console

from unskip._core.config import to_toml
from unskip._core.text import nearest
from unskip._core.version import __version__
from unskip.reproduce.images import IN_MEMORY
from unskip.reproduce.papers import Cell
from unskip.reproduce.registry import Outcome
from unskip.train.many import Finished, run_many
from unskip.train.recipe import Recipe


def check_epochs(epochs: int | None, *, command: str) -> None:
    if epochs is not None and epochs < 1:
        raise ValueError(f"{command}: --epochs {epochs} must be at least 1; leave it out for the paper's number.")


def check_rows(names: Sequence[str], known: list[str], *, command: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{command}: --rows has {name!r}, and there is no such row to run.{nearest(name, known)}")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What can be set about every table of trained networks."""

    epochs: Annotated[int | None, "epochs of each network; as many as the paper's unless given"] = None
    seeds: Annotated[int, "runs of each row"] = 3
    weight_decay: Annotated[float | None, "weight decay of each network; the paper's unless given"] = None
    rows: Annotated[str, "the rows to run, by name and with commas between; empty: all"] = ""
    dataset: Annotated[str, "the data set: cifar10; or cifar100, digits, fashion_mnist or npz, to try it out"] = (
        "cifar10"
    )
    data: Annotated[Path | None, "where the data set lies; digits are embedded"] = None
    device: Annotated[str, "the device: auto, cpu or cuda"] = "auto"
    at_once: Annotated[int | None, "networks that train at a time; 8 on a GPU and 1 on a CPU unless given"] = None
    minutes: Annotated[float | None, "pause after so many minutes; the same command goes on"] = None
    compile: Annotated[
        bool, "compile blocks with torch.compile, which takes its time for each network and is repaid by long runs"
    ] = False

    def __post_init__(self) -> None:
        check_epochs(self.epochs, command="reproduce")
        if self.weight_decay is not None and not self.weight_decay >= 0:
            raise ValueError(
                f"reproduce: --weight-decay {self.weight_decay} must not be negative; leave it out for the paper's."
            )
        if self.at_once is not None and self.at_once < 1:
            raise ValueError(
                f"reproduce: --at-once {self.at_once} must be at least 1; leave it out for 8 on a GPU and 1 on a CPU."
            )
        if self.seeds < 1:
            raise ValueError(f"reproduce: seeds={self.seeds} must be at least 1.")
        if self.dataset not in IN_MEMORY:
            raise ValueError(f"reproduce: dataset={self.dataset!r} must be one of {', '.join(IN_MEMORY)}.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"reproduce: device={self.device!r} must be auto, cpu or cuda.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("reproduce: device='cuda', but PyTorch finds no GPU here. Use auto or cpu.")

    @property
    def gpu(self) -> bool:
        return self.device != "cpu" and torch.cuda.is_available()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table."""

    name: str  # for --rows, and of its runs
    label: str  # as the paper prints it, or in our words
    recipe: Recipe | None = None  # None: not run, the paper's number alone
    error: Cell = None  # percent, as the paper prints it: a number, "diverges" or nothing
    spread: Cell = None  # of it
    params: Cell = None  # millions, as the paper prints it


def run_recipe(recipe: Recipe, config: Trained, seed: int) -> Recipe:
    """The recipe of one run: the paper's, but for what the user and the machine want otherwise."""
    epochs = recipe.run.epochs if config.epochs is None else config.epochs
    return recipe.replace(
        dataset=config.dataset,
        epochs=epochs,
        milestones=tuple(max(1, round(m * epochs / recipe.run.epochs)) for m in recipe.optimizer.milestones),
        warmup_epochs=min(recipe.optimizer.warmup_epochs, epochs),
        weight_decay=recipe.optimizer.weight_decay if config.weight_decay is None else config.weight_decay,
        seed=seed,
        device="auto" if config.gpu else "cpu",
        precision=recipe.run.precision if config.gpu else "fp32",
        cuda_graph=config.gpu,
        compile="blocks" if config.compile else "no",
        save_seconds=60.0,
    )


def chosen(rows: Sequence[Row], config: Trained) -> list[Row]:
    """The rows that the user asks for."""
    known = [row.name for row in rows if row.recipe is not None]
    names = [name.strip() for name in config.rows.split(",") if name.strip()] or known
    check_rows(names, known, command="reproduce")
    return [row for row in rows if row.name in names or (row.recipe is None and not config.rows)]


def train_rows(rows: Sequence[Row], config: Trained, folder: Path) -> dict[str, list[Finished]]:
    """The runs of each row that is to run, one a seed."""
    recipes = {
        f"{row.name}_s{seed}": run_recipe(row.recipe, config, seed)
        for seed in range(config.seeds)  # so that every row has a first number early
        for row in rows
        if row.recipe is not None
    }
    results = train(recipes, config, folder / "runs")
    return {
        row.name: [results[f"{row.name}_s{seed}"] for seed in range(config.seeds)]
        for row in rows
        if row.recipe is not None
    }


def train(recipes: Mapping[str, Recipe], config: Trained, folder: Path) -> dict[str, Finished]:
    """Trains all recipes, several at once, and tells the user how it goes."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return run_many(
        recipes,
        folder,
        data_dir=config.data,
        at_once=config.at_once or (8 if config.gpu else 1),
        minutes=config.minutes,
        say=lambda sentence: console.print(sentence, markup=False),
    )


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


def printed(row: Row) -> str:
    """The paper's number with its spread."""
    if row.error is None:
        return "–"
    if isinstance(row.error, str):
        return row.error
    return f"{row.error:.2f}" + ("" if row.spread is None else f" ± {row.spread:.2f}")


def markdown(rows: Sequence[Row], runs: Mapping[str, Sequence[Finished]]) -> list[str]:
    """Paper and ours side by side."""
    lines = [
        "| row | test error %: paper | ours | each seed | trained parameters: paper | ours |",
        "|---|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        mine = runs.get(row.name, ())
        each = ", ".join("diverged" if run.test_error is None else f"{run.test_error:.2f}" for run in mine)
        counted = next((f"{run.parameters:,}" for run in mine if run.parameters is not None), "")
        params = "" if row.params is None else f"{row.params} M"
        cells = [row.label, printed(row), str(summary(mine)) if mine else "not run", each, params, counted]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def difference(
    rows: Sequence[Row], runs: Mapping[str, Sequence[Finished]], less: str, more: str, words: str
) -> list[str]:
    """A sentence about one row's error less another's, where both were run."""
    by_name = {row.name: row for row in rows}
    ours = [summary(runs.get(name, ())).mean for name in (less, more)]
    if None in ours or not {less, more} <= by_name.keys():
        return []
    theirs = [by_name[name].error for name in (less, more)]
    numbers = [error for error in theirs if isinstance(error, int | float)]
    paper = f"paper {numbers[0] - numbers[1]:+.2f}, " if len(numbers) == 2 else ""
    return [f"{words}: {paper}ours {ours[0] - ours[1]:+.2f} points."]  # type: ignore[operator]


def versions() -> dict[str, str]:
    found = {"unskip": __version__, "python": sys.version.split()[0]}
    found |= {name: version(name) for name in ("torch", "torchvision", "timm", "accelerate")}
    return found | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}


def outcome(
    name: str,
    config: Trained,
    rows: Sequence[Row],
    runs: Mapping[str, Sequence[Finished]],
    *,
    findings: Sequence[str] = (),
    datasets: Sequence[str] = ("cifar10",),
    figure: Figure | None = None,
) -> Outcome:
    """Table, record and README of what was trained. `datasets` are those that the paper's numbers are of."""
    table = markdown(rows, runs)
    papers = " or ".join(
        str(epochs) for epochs in sorted({row.recipe.run.epochs for row in rows if row.recipe is not None})
    )
    about = [
        f"Epochs: {config.epochs or papers} (the paper's: {papers}). Seeds: {config.seeds} a row; ± is the standard "
        f"deviation over them. Data: {config.dataset}. Test errors are of the last weights."
    ]
    if config.dataset not in datasets:
        about.append(f"The paper's numbers are of {' and '.join(datasets)}: don't compare ours with them.")
    seconds = sum(run.seconds for each in runs.values() for run in each)
    options = " ".join(
        f"--{key.replace('_', '-')}" + ("" if value is True else f" {'DIR' if key == 'data' else value}")
        for key, value in asdict(config).items()
        if value is not None and value is not False and value != ""
    )
    readme = [
        *about,
        "",
        *table,
        "",
        *findings,
        "",
        "## How",
        f"`unskip reproduce {name} {options}`: {seconds:.0f} s of training in all. "
        f"{', '.join(f'{key} {value}' for key, value in versions().items())}.",
        "",
        "`results.json` has every run with its epochs. What the rows' recipes have besides the defaults of "
        "`unskip.train.Recipe`, for seed 0:",
        "",
        *[
            f"- {row.name}: {changes(Recipe(), run_recipe(row.recipe, config, 0))}"
            for row in rows
            if row.recipe is not None
        ],
    ]
    numbers = {
        "rows": {
            row.name: {
                "label": row.label, "paper": row.error, "paper_spread": row.spread, "paper_params_m": row.params,
                "runs": [asdict(run) for run in runs.get(row.name, ())],
                **({} if row.name not in runs else {"ours": asdict(summary(runs[row.name]))}),
            }
            for row in rows
        },
        "versions": versions(),
    }  # fmt: skip
    return Outcome(lines=(*table, *about, *findings), numbers=numbers, readme=tuple(readme), figure=figure)


def changes(base: Recipe, other: Recipe) -> str:
    """The fields in which a recipe differs from another, as TOML."""
    before, after = base.flat(), other.flat()
    return ", ".join(f"`{key} = {to_toml(value)}`" for key, value in after.items() if before[key] != value)
