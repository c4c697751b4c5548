"""The frontier: which network has the least error for a budget of training time, memory, multiplications or latency.

Zhang et al. 2024 (arXiv:2402.08645) compares networks of equal depth. Here residual networks of all sizes stand beside
those without skips, trained by one recipe (frontier.toml has the networks):

    --step train    trains: `--length short` all networks, `--length long` the eight nearest the frontier
    --step bench    training images/s and peak memory, compiled, 224 px, the same stem on all sides
    --step count    parameters, MACs and peak of activations of the plain form, one image of 224 px
    --step latency  of the plain form, one image in onnxruntime on one thread of a CPU
    --step show     measures nothing, and shows what is there

Each step goes on where it stopped, in OUT/frontier, and then writes what is there: README.md, results.json,
frontier.csv and, for each data set and length, three pictures. What is chosen is chosen by validation images; test
errors are reported.
"""

import csv
import io
import json
import math
import platform
import statistics
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import matplotlib.patheffects
import torch
from matplotlib.figure import Figure

from unskip._core.drawing import FAINT, INK, OTHER, PLAIN, PNNH, RESIDUAL, dress, legend, panels
from unskip._core.text import nearest
from unskip.bench import Setting
from unskip.reproduce.frontier_columns import (
    MIB,
    REFERENCE,
    SIDE,
    TOGETHER,
    latency_columns,
    plain_columns,
    training_columns,
)
from unskip.reproduce.registry import Outcome, as_png, one_of, reproduction
from unskip.reproduce.trained import Trained, flags, run_recipe, train, versions
from unskip.train.checkpoint import write_atomically
from unskip.train.many import finished
from unskip.train.recipe import Recipe, load_recipe
from unskip.train.trainer import TrainingInterrupted

TABLES = tomllib.loads((resources.files("unskip") / "reproduce" / "frontier.toml").read_text(encoding="utf-8"))
NETWORKS: dict[str, str] = {name: spec for kind in TABLES["networks"].values() for name, spec in kind.items()}
KIND = {name: kind for kind, networks in TABLES["networks"].items() for name in networks}
LOOK = dict(zip(TABLES["networks"], [(RESIDUAL, "s"), (PNNH, "o"), (OTHER, "D"), (PLAIN, "^")], strict=True))
STEPS = ("train", "bench", "count", "latency")
LENGTHS = ("short", "long")
RECIPES: dict[str, dict[str, Callable[[], Recipe]]] = {  # by data set and length
    "tinyimagenet32": {
        "short": partial(load_recipe, "tinyimagenet32-pnnh-34"),
        "long": partial(load_recipe, "tinyimagenet32-pnnh-34-60"),
    },
    "imagenette64": {
        "short": partial(load_recipe, "imagenette64-pnnh-34"),
        "long": partial(load_recipe, "imagenette64-pnnh-34", epochs=200, warmup_epochs=10),
    },
    "digits": {
        "short": partial(load_recipe, "digits-pnnh-56", image_size=16, epochs=2, warmup_epochs=1),
        "long": partial(load_recipe, "digits-pnnh-56", image_size=16, epochs=4, warmup_epochs=1),
    },
}
LONG = 8  # networks that train long
ASKED = ("resnet18", "resnet34", "resnet50", "pnnh_resnet34", "pnnh_resnet50")  # that do so in any case
EQUAL_SPEED = 0.05  # how far apart networks of equal training speed may be


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A budget: a column of the table, and how it is shown."""

    column: str
    label: str
    unit: float = 1.0  # of the column, for what is shown
    more: bool = False  # whether more of it is better


COSTS = {
    "speed": Cost(column="train_images_per_s", label="training images/s (compiled, 224 px)", more=True),
    "memory": Cost(column="train_bytes", label="peak memory of a training step, GiB (batch 256, 224 px)", unit=2**30),
    "macs": Cost(column="plain_macs", label="multiply-accumulates of the plain form, G (224 px)", unit=1e9),
}
BUDGETS = {**COSTS, "latency": Cost(column="plain_ms", label="latency of the plain form on one CPU thread, ms")}


@dataclass(frozen=True, kw_only=True)
class FrontierSettings(Trained):
    """What can be set."""

    step: Annotated[str, "what is measured: train, bench, count, latency or show", one_of(*STEPS, "show")] = "show"
    dataset: Annotated[str, "the data set: tinyimagenet32 or imagenette64; digits, to try it out", one_of(*RECIPES)] = (
        "tinyimagenet32"
    )
    length: Annotated[str, "the length: short for all networks, long for those near the frontier", one_of(*LENGTHS)] = (
        "short"
    )
    results_only: Annotated[bool, "keep the results of finished runs alone, without weights"] = True
    columns: Annotated[Path | None, "frontier.csv of an earlier record, for columns that are not measured here"] = None
    page: Annotated[Path | None, "a folder for frontier.md and its pictures, of the networks that have all columns"] = (
        None
    )


def runs_folder(folder: Path, dataset: str, length: str) -> Path:
    return folder / "runs" / f"{dataset}-{length}"


@reproduction("frontier", settings=FrontierSettings, trains=True)
def frontier(settings: FrontierSettings, folder: Path) -> Outcome:
    """Takes one step further and shows what has been measured."""
    chosen = names(settings, folder)
    steps: dict[str, Callable[[FrontierSettings, Sequence[str], Path], None]] = {
        "train": train_networks,
        "bench": bench_networks,
        "count": partial(measure_each, plain_columns),
        "latency": partial(measure_each, latency_columns),
    }
    ended: TrainingInterrupted | None = None
    try:
        if settings.step in steps:
            steps[settings.step](settings, chosen, folder)
    except TrainingInterrupted as pause:
        ended = pause
    return shown(settings, folder, ended)


def names(settings: FrontierSettings, folder: Path) -> list[str]:
    """The networks that the user asks for; otherwise all, or for long training those nearest the frontier."""
    wanted = [name.strip() for name in settings.rows.split(",") if name.strip()]
    for name in wanted:
        if name not in NETWORKS:
            raise ValueError(f"reproduce: --rows has {name!r}, and it is no network.{nearest(name, list(NETWORKS))}")
    if wanted or settings.length == "short" or settings.step != "train":
        return wanted or list(NETWORKS)
    table = gathered(folder, settings.columns)
    key = f"{settings.dataset}-short"
    missing = [name for name in NETWORKS if f"{key}-val_error" not in table[name]]
    if missing:
        raise ValueError(
            f"reproduce: the networks nearest the frontier are chosen by their short runs on {settings.dataset}, and "
            f"{', '.join(missing)} have none yet. Finish --length short, or name networks with --rows."
        )
    return nearest_frontier(table, f"{key}-val_error")


# ---------------------------------------------------------------- steps


def train_networks(settings: FrontierSettings, chosen: Sequence[str], folder: Path) -> None:
    """Every network once for each seed, the first seeds first."""
    base = RECIPES[settings.dataset][settings.length]()
    recipes = {}
    for seed in range(settings.seeds):
        for name in chosen:
            recipe = base.replace(model=NETWORKS[name], method="", options={})
            recipes[f"{name}_s{seed}"] = run_recipe(recipe, settings, seed, dataset=recipe.data.dataset)
    _, ended = train(recipes, settings, runs_folder(folder, settings.dataset, settings.length))
    if ended is not None:
        raise ended


def bench_networks(settings: FrontierSettings, chosen: Sequence[str], folder: Path) -> None:
    """Compiled training at 224 px, several networks and the reference side by side in each comparison.

    On a CPU it is tried out: small images, eagerly, in a folder that no table is made of.
    """
    small = not settings.gpu
    folder = folder / ("bench-tried" if small else "bench")
    left = [name for name in chosen if not (folder / f"{name}.json").is_file()]
    groups = -(-len(left) // TOGETHER)
    setting = Setting(
        device="cuda" if settings.gpu else "cpu",
        size=64 if small else SIDE,
        batch=2 if small else 0,
        layers="fast" if settings.gpu else "same",
        precision="bf16" if settings.gpu else "fp32",
        infer=False,
        eager=small,
        compiled=not small,
        rounds=1 if small else 5,
        seconds=0.01 if small else 0.5,
        compile_workers=settings.at_once or (16 if settings.gpu else 0),
    )
    began, longest = time.monotonic(), 0.0
    failed: dict[str, str] = {}
    for i in range(groups):
        group = left[i::groups]  # large and small ones in each
        start = time.monotonic()
        if settings.minutes is not None and start - began + longest > 60 * settings.minutes:
            raise TrainingInterrupted(f"reproduce: {settings.minutes:g} minutes are over; the same command goes on.")
        specs = dict.fromkeys([NETWORKS[REFERENCE], *(NETWORKS[name] for name in group)])
        if len(specs) < 2:
            specs |= dict.fromkeys([NETWORKS["resnet18"]])
        found = training_columns(list(specs), setting)
        seconds = time.monotonic() - start
        longest = max(longest, seconds)
        for name in group:
            columns = found[NETWORKS[name]]
            if error := columns.pop("train_error"):
                failed[name] = error
                continue
            about = {"device": device_name(settings), "torch": torch.__version__, "seconds": round(seconds, 1)}
            write_json(folder / f"{name}.json", {**columns, "about": about})
    if failed:
        reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise ValueError(
            f"reproduce: {len(failed)} networks could not be timed, and the same command tries them again: {reasons}"
        )


def measure_each(
    columns: Callable[[str], dict[str, Any]], settings: FrontierSettings, chosen: Sequence[str], folder: Path
) -> None:
    """The columns of each network by its spec, one after the other on the CPU."""
    began = time.monotonic()
    for name in chosen:
        file = folder / settings.step / f"{name}.json"
        if file.is_file():
            continue
        if settings.minutes is not None and time.monotonic() - began > 60 * settings.minutes:
            raise TrainingInterrupted(f"reproduce: {settings.minutes:g} minutes are over; the same command goes on.")
        start = time.monotonic()
        found = columns(NETWORKS[name])
        about = {"cpu": cpu_name(), "torch": torch.__version__, "seconds": round(time.monotonic() - start, 1)}
        write_json(file, {**found, "about": about})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write((json.dumps(value, indent=1) + "\n").encode()))


def device_name(settings: Trained) -> str:
    return torch.cuda.get_device_name() if settings.gpu else cpu_name()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


# ---------------------------------------------------------------- what has been measured


def gathered(folder: Path, columns: Path | None = None) -> dict[str, dict[str, Any]]:
    """One row for each network, with what has been measured, from all steps and calls, before it that of `columns`."""
    earlier = {} if columns is None else earlier_columns(columns)
    table: dict[str, dict[str, Any]] = {}
    for name, spec in NETWORKS.items():
        row: dict[str, Any] = {**earlier.get(name, {}), "network": name, "kind": KIND[name], "model": spec}
        for step in ("count", "latency", "bench"):
            file = folder / step / f"{name}.json"
            if file.is_file():
                row |= {
                    key: value for key, value in json.loads(file.read_text(encoding="utf-8")).items() if key != "about"
                }
        for dataset in RECIPES:
            for length in LENGTHS:
                row |= trained_columns(runs_folder(folder, dataset, length), name, f"{dataset}-{length}")
        table[name] = row
    return table


def earlier_columns(file: Path) -> dict[str, dict[str, Any]]:
    """The rows of a frontier.csv, by network; those whose network has another definition now are left out."""
    try:
        rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
        rows = [row for row in rows if NETWORKS.get(row["network"]) == row["model"]]
    except (OSError, UnicodeDecodeError, KeyError, csv.Error) as error:
        raise ValueError(f"reproduce: --columns {file} can't be read: {error!r}. Give a frontier.csv.") from error
    return {row["network"]: {key: _number(text) for key, text in row.items() if text} for row in rows}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def trained_columns(folder: Path, name: str, prefix: str) -> dict[str, Any]:
    """Errors and losses over the finished runs of a network; none where there are no runs."""
    runs = [run for path in sorted(folder.glob(f"{name}_s*")) if (run := finished(path)) is not None]
    if not runs:
        return {}
    columns: dict[str, Any] = {f"{prefix}-n": len(runs), f"{prefix}-diverged": sum(r.test_error is None for r in runs)}
    for key in ("test_error", "val_error", "val_loss"):
        found = [number for run in runs if (number := getattr(run, key)) is not None]
        if found:
            columns[f"{prefix}-{key}"] = statistics.fmean(found)
            columns[f"{prefix}-{key}_sd"] = statistics.stdev(found) if len(found) > 1 else None
    columns[f"{prefix}-parameters"] = next((run.parameters for run in runs if run.parameters), None)
    return columns


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names on the frontier of (cost, error), by rising cost: no other has less of one and no more of the other."""
    best, found = math.inf, []
    for name, (_, error) in sorted(points.items(), key=lambda item: item[1]):
        if error < best:
            best = error
            found.append(name)
    return found


def points(table: Mapping[str, Mapping[str, Any]], cost: Cost, error: str) -> dict[str, tuple[float, float]]:
    """(cost, error) of the networks that have both; a cost of which more is better is negative."""
    rows = {name: (row.get(cost.column), row.get(error)) for name, row in table.items()}
    sign = -1 if cost.more else 1
    return {name: (sign * c / cost.unit, e) for name, (c, e) in rows.items() if c is not None and e is not None}


def nearest_frontier(table: Mapping[str, Mapping[str, Any]], error: str) -> list[str]:
    """Those whose difference is asked for, and the nearest to a frontier, LONG in all.

    A network's distance is its error less the least error at its cost or below, for the cost where that is smallest.
    """
    distance: dict[str, float] = {}
    total: dict[str, float] = {}
    for cost in COSTS.values():
        at = points(table, cost, error)
        for name, (c, e) in at.items():
            gap = e - min(other for less, other in at.values() if less <= c)
            distance[name] = min(gap, distance.get(name, math.inf))
            total[name] = total.get(name, 0.0) + gap
    if not distance:
        raise ValueError(
            "reproduce: no network has an error and a cost yet; measure a cost first (--step count or bench)."
        )
    order = sorted(distance, key=lambda name: (distance[name], total[name]))
    asked = [name for name in ASKED if name in distance]
    return [*asked, *[name for name in order if name not in asked]][: max(LONG, len(asked))]


# ---------------------------------------------------------------- what is shown


def shown(settings: FrontierSettings, folder: Path, ended: TrainingInterrupted | None) -> Outcome:
    table = gathered(folder, settings.columns)
    measured = [
        key for key in (f"{d}-{n}" for d in RECIPES for n in LENGTHS) if any(f"{key}-n" in r for r in table.values())
    ]
    lines = [*missing(table, measured)]
    text: list[str] = []
    files: dict[str, bytes] = {"frontier.csv": as_csv(table.values())}
    for key in measured:
        text += ["", f"## {key}", "", *error_table(table, key), "", *asked_for(table, key)]
        for budget, cost in COSTS.items():
            at = points(table, cost, f"{key}-test_error")
            if len(at) > 1:
                files[f"{key}-{budget}.png"] = as_png(draw(at, cost, f"{key}: test error, %"))
    text += ["", "## Costs", "", *cost_table(table), "", *ratios(table)]
    minutes = accounted(folder)
    about = versions()
    readme = [
        *lines,
        "",
        *minutes,
        *text,
        "",
        "## How",
        f"`unskip reproduce frontier {flags(replace(settings, page=None, columns=None))}`, and the other steps. "
        f"{', '.join(f'{key} {value}' for key, value in about.items())}.",
        "",
        "`frontier.csv` has every column. MACs, activations and latency are of one image of 224 px with 1,000 classes, "
        "norms folded; latency is the least CPU time of at least 10 runs on one thread of onnxruntime. Networks with "
        "skips are plain by `rm`; beside that stands what they cost as they are.",
    ]
    outcome = Outcome(
        lines=(*lines, *minutes, *[line for key in measured for line in asked_for(table, key)]),
        numbers={"networks": list(table.values()), "versions": about, "minutes": minutes},
        readme=tuple(readme),
        files=files,
        ended=ended,
    )
    if settings.page is not None:
        write_page(settings.page, table, files)
    return outcome


def missing(table: Mapping[str, Mapping[str, Any]], measured: Sequence[str]) -> list[str]:
    """What has not been measured yet, in sentences."""
    needed = {"plain form": "plain_macs", "latency": "plain_ms", "training speed and memory": "train_images_per_s"}
    found = []
    for what, column in {**needed, **{f"error, {key}": f"{key}-test_error" for key in measured}}.items():
        there = sum(row.get(column) is not None for row in table.values())
        found.append(f"Measured, {what}: {there} of {len(table)} networks.")
    return found


def as_csv(rows: Iterable[Mapping[str, Any]]) -> bytes:
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def accounted(folder: Path) -> list[str]:
    """Minutes of the device, over all calls."""
    minutes: dict[str, float] = {}
    for file in sorted((folder / "runs").glob("*/calls.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            call = json.loads(line)
            minutes[call["device"]] = minutes.get(call["device"], 0.0) + call["seconds"] / 60
    return [f"Minutes of training on {device}: {total:.0f}." for device, total in minutes.items()]


def _cell(value: float | None, form: str = ".2f", unit: float = 1.0) -> str:
    return "" if value is None else format(value / unit, form)


def _with_spread(row: Mapping[str, Any], key: str, form: str = ".2f") -> str:
    spread = row.get(f"{key}_sd")
    return _cell(row.get(key), form) + ("" if spread is None else f" ± {spread:{form}}")


def error_table(table: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """A row for each network that has been trained, the least test error first."""
    rows = [row for row in table.values() if f"{key}-n" in row]
    rows.sort(key=lambda row: row.get(f"{key}-test_error", math.inf))
    lines = ["| network | kind | runs | test error % | validation error % | validation loss | trained M |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        lost = row[f"{key}-diverged"]
        runs = f"{row[f'{key}-n']}{f', {lost} diverged' if lost else ''}"
        numbers = [_with_spread(row, f"{key}-{what}") for what in ("test_error", "val_error")]
        loss, size = _with_spread(row, f"{key}-val_loss", ".3f"), _cell(row[f"{key}-parameters"], ".2f", 1e6)
        lines.append(f"| {' | '.join([row['network'], row['kind'], runs, *numbers, loss, size])} |")
    return lines


def cost_table(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A row for each network with whatever has been measured of its costs."""
    columns: dict[str, tuple[str, str, float]] = {
        "training images/s": ("train_images_per_s", ",.0f", 1.0),
        "training memory GiB": ("train_bytes", ".2f", 2**30),
        "plain M": ("plain_parameters", ".2f", 1e6),
        "plain GMACs": ("plain_macs", ".2f", 1e9),
        "plain activations MiB": ("plain_activation_bytes", ".1f", MIB),
        "plain ms": ("plain_ms", ".0f", 1.0),
        "as trained GMACs": ("own_macs", ".2f", 1e9),
        "as trained ms": ("own_ms", ".0f", 1.0),
    }
    lines = [f"| network | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for row in table.values():
        cells = [_cell(row.get(column), form, unit) for column, form, unit in columns.values()]
        if any(cells):
            lines.append(f"| {row['network']} | {' | '.join(cells)} |")
    return lines


def equal_speed(table: Mapping[str, Mapping[str, Any]], name: str, error: str) -> str | None:
    """The residual network of least `error` among those that train within EQUAL_SPEED of a network's speed."""
    speed = table[name].get("train_images_per_s")
    rivals = {
        other: row[error]
        for other, row in table.items()
        if KIND[other] == "residual" and speed and error in row and row.get("train_images_per_s")
        if abs(row["train_images_per_s"] / speed - 1) <= EQUAL_SPEED
    }
    return min(rivals, key=lambda other: rivals[other], default=None)


def asked_for(table: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """The differences that frontier.toml asks for on one data set and length, each with the number that was reached."""
    lines = []
    for ahead in TABLES["ahead"]:
        if key not in ahead:
            continue
        ours, than = ahead["network"], ahead["than"]
        other = than if than in NETWORKS else equal_speed(table, ours, f"{key}-val_error")
        sentence = f"{key}, {ours} less {than}, points of top-1: asked {ahead[key]:+.1f} or more, "
        errors = [None if name is None else table[name].get(f"{key}-test_error") for name in (ours, other)]
        if errors[0] is None or errors[1] is None:
            lines.append(f"{sentence}not measured.")
            continue
        reached = errors[1] - errors[0]
        spread = [table[str(name)].get(f"{key}-test_error_sd") for name in (ours, other)]
        n = [table[str(name)][f"{key}-n"] for name in (ours, other)]
        known = all(s is not None for s in spread)
        error = f" ± {math.sqrt(sum(s**2 / k for s, k in zip(spread, n, strict=True))):.2f}" if known else ""  # type: ignore[operator]
        verdict = "reached" if reached >= ahead[key] else "missed"
        beside = "" if other == than else f" ({other})"
        lines.append(f"{sentence}{verdict}: {reached:+.2f}{error}{beside}.")
    return lines


def ratios(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Training speed and memory of PNNH over its residual network, beside what is asked."""
    lines = []
    for asked in TABLES["ratio"]:
        ours, other = (table[asked[key]] for key in ("network", "over"))
        if not (ours.get("train_images_per_s") and other.get("train_images_per_s")):
            continue
        # Each over the reference of its own comparison, since they may stand in two
        speed = ours["train_speed_ratio"] / other["train_speed_ratio"]
        memory = ours["train_bytes"] / other["train_bytes"]
        lines.append(
            f"{asked['network']} over {asked['over']}: training speed {speed:.2f} (asked {asked['speed']} or more), "
            f"memory {memory:.2f} (asked {asked['memory']} or less)."
        )
    return lines


def draw(at: Mapping[str, tuple[float, float]], cost: Cost, y: str) -> Figure:
    """Error against a cost, all networks, with the line of the frontier."""
    figure, (axes,) = panels(1, 1, size=(9, 6.2), title="")
    middle = statistics.median(error for _, error in at.values())
    top = 3 * middle - 2 * min(error for _, error in at.values())  # what is far worse would squeeze all others together
    above = ", ".join(f"{name} {error:.1f}" for name, (_, error) in at.items() if error > top)
    at = {name: point for name, point in at.items() if point[1] <= top}
    dress(axes, x=cost.label, y=y, log_x=True, title=f"above the picture: {above}" if above else "")
    for axis_format in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis_format(lambda value, _: f"{value:,g}")
    axes.tick_params(which="both", labelsize=8)
    line = pareto(at)
    axes.plot(
        *zip(*((abs(at[name][0]), at[name][1]) for name in line), strict=True), color=INK, linewidth=1.2, zorder=2
    )
    for kind, (colour, marker) in LOOK.items():
        mine = [at[name] for name in at if KIND[name] == kind]
        if mine:
            x, error = zip(*((abs(c), e) for c, e in mine), strict=True)
            axes.scatter(
                x, error, color=colour, marker=marker, s=34, zorder=3, label=kind, edgecolors="white", linewidths=0.6
            )
    if cost.more:
        axes.invert_xaxis()  # cheap is left in all pictures
    _place_names(figure, axes, at, bold=set(line))
    legend(axes, loc="best")
    return figure


def _place_names(figure: Figure, axes: Any, at: Mapping[str, tuple[float, float]], *, bold: set[str]) -> None:
    """Writes each name beside its point where it covers no other name and fewest points, with a line if that is far."""
    figure.canvas.draw()
    spots = {name: axes.transData.transform((abs(c), error)) for name, (c, error) in at.items()}
    frame = axes.get_window_extent()
    taken: list[tuple[float, float, float, float]] = []
    pixel = figure.dpi / 72
    for name in sorted(at, key=lambda name: (name not in bold, at[name][1])):
        x, y = spots[name]
        width, height = 4.1 * len(name) * pixel, 8.5 * pixel
        best, least = (0.0, 0.0), math.inf
        for radius in (7, 14, 22, 32, 44):
            for turn in range(16):
                dx, dy = radius * math.cos(turn * math.pi / 8) * pixel, radius * math.sin(turn * math.pi / 8) * pixel
                left = x + dx - (0 if dx > 0.1 else width if dx < -0.1 else width / 2)
                box = (left, y + dy - height / 2, left + width, y + dy + height / 2)
                names = sum(_overlaps(box, other) for other in taken)
                hidden = sum(box[0] - 3 < px < box[2] + 3 and box[1] - 3 < py < box[3] + 3 for px, py in spots.values())
                outside = box[0] < frame.x0 or box[2] > frame.x1 or box[1] < frame.y0 or box[3] > frame.y1
                price = 40 * names + 12 * hidden + 100 * outside + radius
                if price < least:
                    least, best, chosen = price, (dx, dy), box
        taken.append(chosen)
        dx, dy = (value / pixel for value in best)
        far = math.hypot(dx, dy) > 10
        text = axes.annotate(
            name.replace("_resnet", "-"), (abs(at[name][0]), at[name][1]), textcoords="offset points", xytext=(dx, dy),
            fontsize=7, color=INK if name in bold else "#555555", fontweight="bold" if name in bold else "normal",
            ha="left" if dx > 0.1 else "right" if dx < -0.1 else "center", va="center",
            arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.5, "shrinkB": 3} if far else None,
        )  # fmt: skip
        text.set_path_effects([matplotlib.patheffects.withStroke(linewidth=2, foreground="white")])


def _overlaps(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# ---------------------------------------------------------------- the page


def recommended(table: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """For each budget the networks of its frontier by validation error, with their test errors."""
    lines = ["| budget | best networks, from the cheapest to the most accurate: cost, test error % |", "|---|---|"]
    for name, cost in BUDGETS.items():
        at = points(table, cost, f"{key}-val_error")
        cells = [f"{n} ({abs(at[n][0]):,.4g}: {table[n][f'{key}-test_error']:.2f})" for n in pareto(at)]
        if cells:
            lines.append(f"| {name}: {cost.label} | {', '.join(cells)} |")
    return lines


def write_page(folder: Path, table: Mapping[str, Mapping[str, Any]], files: Mapping[str, bytes]) -> None:
    """Writes frontier.md and its pictures, with the networks that have all columns of the main comparison."""
    main = "tinyimagenet32-short"
    needed = [cost.column for cost in BUDGETS.values()] + [f"{main}-test_error"]
    whole = {name: row for name, row in table.items() if all(row.get(column) is not None for column in needed)}
    if len(whole) < 2:
        raise ValueError(
            f"reproduce: --page compares networks with all of {', '.join(needed)}, and {len(whole)} of {len(table)} "
            "have them. Measure more first, or leave --page out."
        )
    keys = [
        key
        for key in (f"{d}-{n}" for d in ("tinyimagenet32", "imagenette64") for n in LENGTHS)
        if any(f"{key}-n" in r for r in table.values())
    ]
    text = ["# The frontier: the best network for a budget", ""]
    text += [*[line for key in keys for line in asked_for(table, key)], *ratios(table), ""]
    text += [
        "All networks have one recipe, one stem and equal epochs. The line joins those that no other beats in both.",
        "",
    ]
    if left := [name for name in table if name not in whole]:
        text += [f"Not measured in all of this yet, and not in the tables: {', '.join(left)}.", ""]
    text += ["## Recommended", "", *recommended(whole, main), ""]
    for key in keys:
        text += [f"## {key}", ""]
        drawn = [budget for budget in COSTS if f"{key}-{budget}.png" in files]
        text += [f"![{key}, error against {budget}](figures/frontier-{key}-{budget}.png)\n" for budget in drawn]
        text += [*error_table(whole, key), ""]
    text += ["## What they cost", "", *cost_table(whole), ""]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    (folder / "frontier.md").write_text("\n".join(text), encoding="utf-8")
    for name, content in files.items():
        if name.endswith(".png"):
            (folder / "figures" / f"frontier-{name}").write_bytes(content)
