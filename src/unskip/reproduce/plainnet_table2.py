"""Oyedotun et al. 2020, Table II (section VI.C): 100-layer MLPs on USPS, with and without BatchNorm, LReLU, max-norm.

1. Select: each row at seven learning rates of the paper's range [0.0001-0.1], one seed, on nine tenths of the training
   images; the rate with the lowest validation error (eval mode, BatchNorm recalibrated) is the row's.
2. Final: each row at its rate, on all training images, otherwise by the recipe `usps-plainnet-100`. Errors are those of
   the last epoch, in eval mode, with BatchNorm's running statistics as they are and recalibrated.

The paper mentions no schedule. `--schedule constant` takes its range for rates to choose from; `cosine` also as the
range that the rate falls through, from the chosen one to 0.0001. All networks train side by side
(`unskip.reproduce.batched_mlp`); a step that is done is kept in the folder, and not done again.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console

from unskip.data.sets import DataSet, load
from unskip.reproduce.batched_mlp import Crowd
from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.trained import check_epochs, check_rows, versions
from unskip.train.recipe import Recipe, load_recipe

TABLE = paper_table("plainnet", "II")
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # the paper's range, two to a decade
LOWEST = 1e-4  # where a falling rate ends: the lower end of the range


@dataclass(frozen=True, kw_only=True)
class Table2:
    """What can be set."""

    epochs: Annotated[int | None, "epochs of the final runs; the paper's 300 unless given"] = None
    select_epochs: Annotated[int, "epochs of the runs that choose the learning rate"] = 100
    seeds: Annotated[int, "final runs of each row"] = 3
    rows: Annotated[str, "the rows to run, for instance 'BN, BN + LReLU'; empty: all"] = ""
    schedule: Annotated[str, "schedule of the learning rate: constant, or cosine down to 0.0001"] = "constant"
    depth: Annotated[int, "layers"] = 100
    dataset: Annotated[str, "the data set: npz; or digits, to try it out"] = "npz"
    data: Annotated[Path | None, "where usps.npz lies: x_train, y_train, x_test, y_test"] = None
    device: Annotated[str, "the device: auto, cpu or cuda"] = "auto"

    def __post_init__(self) -> None:
        check_epochs(self.epochs, command="plainnet-table2")
        if min(self.select_epochs, self.seeds, self.depth) < 1:
            raise ValueError(
                f"plainnet-table2: select_epochs={self.select_epochs}, seeds={self.seeds} and depth={self.depth} must "
                "be at least 1."
            )
        for name, known in (
            ("schedule", ("constant", "cosine")),
            ("dataset", ("npz", "digits")),
            ("device", ("auto", "cpu", "cuda")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"plainnet-table2: {name}={getattr(self, name)!r} must be {' or '.join(known)}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("plainnet-table2: device='cuda', but PyTorch finds no GPU here. Use auto or cpu.")

    def recipe(self) -> Recipe:
        options: dict[str, Any] = {"depth": self.depth}
        if self.dataset == "digits":
            options["img_size"] = 8
        end = LOWEST if self.schedule == "cosine" else 0.0
        changes: dict[str, Any] = {"schedule": self.schedule, "min_lr": end, "dataset": self.dataset}
        return load_recipe("usps-plainnet-100", options=options, **changes)

    def chosen(self) -> list["Row"]:
        names = [name.strip() for name in self.rows.split(",") if name.strip()]
        known = [row.name for row in ROWS]
        check_rows(names, known, command="plainnet-table2")
        return [row for row in ROWS if not names or row.name in names]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of Table II: which components it has, and the errors that the paper prints (percent)."""

    name: str
    norm: bool
    leaky: bool
    max_norm: bool
    paper_train: float
    paper_test: float

    @classmethod
    def printed(cls, name: str) -> "Row":
        """From the paper's table, where a row's name is its components."""
        components = name.split(" + ")
        errors = {f"paper_{part}": TABLE.value(f"{part}_error", components=name) for part in ("train", "test")}
        return cls(
            name=name,
            norm="BN" in components,
            leaky="LReLU" in components,
            max_norm="max-norm" in components,
            **errors,
        )

    def recipe(self, base: Recipe, **changes: Any) -> Recipe:
        options = {**base.network.options, "norm": self.norm, "activation": "lrelu" if self.leaky else "relu"}
        return base.replace(
            options=options,
            max_norm=base.optimizer.max_norm if self.max_norm else 0.0,
            recalibrate_batchnorm=base.run.recalibrate_batchnorm if self.norm else 0,
            **changes,
        )


ROWS = tuple(Row.printed(str(row["components"])) for row in TABLE.rows)


class Curves:
    """What is seen of a crowd while it trains, and its results at the end. Errors in percent, None: diverged."""

    def __init__(self, part: list[tuple[Row, Recipe]], data: DataSet, device: torch.device) -> None:
        self.part, self.split = part, "test" if data.val is None else "val"
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.crowd = Crowd([recipe for _, recipe in part], data, device, torch.float32)
        self.epochs: list[int] = []
        self.losses: list[list[float | None]] = []
        self.errors: list[list[float | None]] = []

    def look(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.losses.append([number(v, 4) for v in self.crowd.loss.tolist()])
        self.errors.append([number(v) for v in self.crowd.error(self.split)])

    def results(self) -> list[dict[str, Any]]:
        """After the last look, which waited for the last epoch."""
        train = self.crowd.error("train")
        self.crowd.recalibrate_batchnorm()
        settled = {f"settled_{split}_error": self.crowd.error(split) for split in ("train", self.split)}
        return [
            {
                **{name: number(errors[i]) for name, errors in settled.items()},
                "row": row.name, "lr": recipe.optimizer.lr, "schedule": recipe.optimizer.schedule,
                "seed": recipe.run.seed, "epochs": recipe.run.epochs,
                "train_error": number(train[i]), f"{self.split}_error": self.errors[-1][i],
                "curve": {
                    "epoch": self.epochs,
                    "loss": [losses[i] for losses in self.losses],
                    self.split: [errors[i] for errors in self.errors],
                },
            }
            for i, (row, recipe) in enumerate(self.part)
        ]  # fmt: skip


def side_by_side(
    jobs: list[tuple[Row, Recipe]], data: DataSet, device: torch.device, say: Callable[[str], None], look_every: int
) -> list[dict[str, Any]]:
    """Trains all jobs: those with BatchNorm are one crowd, those without another, on a GPU at the same time."""
    began = time.perf_counter()
    parts = [[(row, recipe) for row, recipe in jobs if row.norm is norm] for norm in (True, False)]
    crowds = [Curves(part, data, device) for part in parts if part]
    built = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what was made on the main stream is there for the others
    total = jobs[0][1].run.epochs
    runs = [(each, each.crowd.train()) for each in crowds]
    for epoch in range(1, total + 1):
        for each, run in runs:
            with torch.cuda.stream(each.stream):
                next(run)
        if epoch % look_every == 0 or epoch == total:
            for each in crowds:
                with torch.cuda.stream(each.stream):
                    each.look(epoch)
    results = [result for each in crowds for result in each.results()]
    seconds = time.perf_counter() - built
    sizes = " and ".join(f"{len(each.part)} {'with' if each.crowd.norm else 'without'} BatchNorm" for each in crowds)
    say(
        f"networks: {sizes}; {total} epochs in {seconds:.1f} s, {1000 * seconds / crowds[0].crowd.done:.2f} ms a step, "
        f"{built - began:.1f} s before the first one"
    )
    return results


def number(value: float, digits: int = 3) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def select(results: list[dict[str, Any]]) -> dict[str, float]:
    """The rate of each row: lowest validation error with recalibrated BatchNorm; a diverged network counts as 100 %."""
    best: dict[str, float] = {}
    for row in ROWS:
        mine = [r for r in results if r["row"] == row.name]
        if not mine:
            continue
        score = [100.0 if r["settled_val_error"] is None else r["settled_val_error"] for r in mine]
        best[row.name] = mine[score.index(min(score))]["lr"]
    return best


def table(final: list[dict[str, Any]]) -> str:
    """Markdown: the paper's errors beside ours, mean and range over seeds."""
    lines = [
        "| components | paper: train / test error % | rate | our train error % (range) | our test error % (range) "
        "| train, recalibrated | test, recalibrated |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in ROWS:
        mine = [r for r in final if r["row"] == row.name]
        if not mine:
            continue
        cells = []
        for key in ("train_error", "test_error", "settled_train_error", "settled_test_error"):
            errors = [r[key] for r in mine if r[key] is not None]
            lost = len(mine) - len(errors)
            words = f"{statistics.fmean(errors):.2f} ({min(errors):.2f} to {max(errors):.2f})" if errors else ""
            cells.append(words + (f" {lost} of {len(mine)} diverged" if lost else ""))
        paper = f"{row.paper_train:.2f} / {row.paper_test:.2f}"
        lines.append(f"| {row.name} | {paper} | {mine[0]['lr']:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kept(file: Path, settings: dict[str, Any], make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What a step gave, from its file where it is there; a file of other settings is refused."""
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["settings"] != settings:
            raise ValueError(
                f"plainnet-table2: {file} is of other settings ({found['settings']}). Choose another folder (--out), "
                "or remove it."
            )
        return found["results"]
    results = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(".part")
    half.write_text(json.dumps({"settings": settings, "results": results}), encoding="utf-8")
    half.replace(file)
    return results


@reproduction("plainnet-table2", config=Table2, trains=True)
def table2(config: Table2, folder: Path) -> Outcome:
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    began, log = time.perf_counter(), []
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    logs = folder / "logs" / "plainnet-table2.txt"
    logs.parent.mkdir(parents=True, exist_ok=True)

    def say(words: str) -> None:
        log.append(f"[{time.perf_counter() - began:6.1f} s] {words}")
        console.print(log[-1], markup=False)
        with open(logs, "a", encoding="utf-8") as file:
            file.write(log[-1] + "\n")

    rows, base = config.chosen(), config.recipe()
    settings = {key: value for key, value in asdict(config).items() if key not in ("data", "device")}
    choosing = base.replace(epochs=config.select_epochs, val_fraction=0.1)
    last = base.replace(epochs=base.run.epochs if config.epochs is None else config.epochs, val_fraction=0.0)

    def choose() -> list[dict[str, Any]]:
        jobs = [(row, row.recipe(choosing, lr=lr)) for row in rows for lr in RATES]
        return side_by_side(jobs, load(choosing.data, config.data), device, say, max(1, config.select_epochs // 20))

    selected = kept(folder / "runs" / "select.json", settings, choose)
    best = select(selected)
    say(f"rates: {best}")

    def finish() -> list[dict[str, Any]]:
        seeds = range(config.seeds)
        jobs = [(row, row.recipe(last, lr=best[row.name], seed=seed)) for row in rows for seed in seeds]
        return side_by_side(jobs, load(last.data, config.data), device, say, max(1, last.run.epochs // 30))

    final = kept(folder / "runs" / "final.json", settings, finish)
    lines = table(final).splitlines()
    about = (
        f"{config.depth} layers, {last.run.epochs} epochs (the paper's: {base.run.epochs}), {config.schedule} rate, "
        f"chosen on validation after {config.select_epochs}; n = {config.seeds}, mean (smallest to largest). Data: "
        f"{config.dataset if config.data is None else config.data.name}."
    )
    found = versions()
    readme = (
        about, "", *lines, "",
        f"Versions: {', '.join(f'{key} {value}' for key, value in found.items())}. `results.json` has every curve, "
        "`logs/` the times, and this recipe:", "", "```toml", last.to_toml().rstrip(), "```",
    )  # fmt: skip
    numbers = {"recipe": base.as_dict(), "rates": best, "select": selected, "final": final, "versions": found}
    return Outcome(lines=(*lines, about), numbers=numbers, readme=readme)
