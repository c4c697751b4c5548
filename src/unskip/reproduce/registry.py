"""The registry of reproductions: a table or figure of a paper, by name, with what can be set about it.

A reproduction is a function from a configuration (a keyword-only frozen dataclass, whose fields are the command's
options) to an `Outcome`. It computes and draws; `reproduce` writes the files. What it is about stands in
reproductions.toml, which `unskip reproduce --help` reads too.
"""

import dataclasses
import json
import platform
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
from matplotlib.figure import Figure

from unskip._core.files import make_folder
from unskip._core.rng import seeded
from unskip._core.text import nearest
from unskip.reproduce.drawing import save


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a reproduction found."""

    lines: tuple[str, ...]  # what it shows, in sentences with its numbers; printed
    numbers: dict[str, Any]  # everything that a reader may want to recompute; written as JSON
    figure: Figure | None = None  # the picture, where it has one
    readme: tuple[str, ...] = ()  # lines of the record's README.md, where networks were trained for it


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table or figure that has a name."""

    name: str
    source: str  # paper and figure
    shows: str  # in one line
    config: type  # a keyword-only frozen dataclass
    run: Callable[..., Outcome]
    trains: bool = False  # whether it trains networks, in a folder that a second call goes on with


ABOUT = tomllib.loads((resources.files("unskip") / "reproduce" / "reproductions.toml").read_text(encoding="utf-8"))
REPRODUCTIONS: dict[str, Reproduction] = {}
R = TypeVar("R", bound=Callable[..., Outcome])


def reproduction(
    name: str, *, config: type, trains: bool = False, source: str = "", shows: str = ""
) -> Callable[[R], R]:
    """Decorator: makes a function from `config` to Outcome known as `unskip reproduce NAME`.

    With `trains`, the function gets a folder for its runs too, `run(config, folder)`. `source` and `shows` are those of
    reproductions.toml for a name that stands there, and must be given for another.
    """

    def register(run: R) -> R:
        if name in REPRODUCTIONS:
            raise ValueError(f"reproduction: the name {name!r} is taken; choose another.")
        about = ABOUT.get(name, {"source": source, "shows": shows})
        if not all(about.values()):
            raise ValueError(
                f"reproduction: {name!r} is not in reproductions.toml, so source={source!r} and shows={shows!r} must "
                "say what it is about."
            )
        REPRODUCTIONS[name] = Reproduction(name=name, config=config, run=run, trains=trains, **about)
        return run

    return register


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a reproduction found, and where it lies."""

    outcome: Outcome
    files: tuple[Path, ...] = field(default=())


def reproduce(name: str, *, out: Path, record: Path | None = None, **fields: Any) -> Written:
    """Runs a reproduction and writes OUT/NAME.png and RECORD/NAME.json (RECORD is OUT unless given).

    The record holds the numbers, the configuration, versions and the time taken. Where networks are trained, everything
    lies in OUT/NAME instead: the picture, their runs (a second call goes on with them), and the record as README.md,
    results.json, unless RECORD is another folder.
    """
    if name not in REPRODUCTIONS:
        raise ValueError(f"reproduce: there is no {name!r}.{nearest(name, list(REPRODUCTIONS))}")
    entry = REPRODUCTIONS[name]
    known = [option.name for option in dataclasses.fields(entry.config)]
    for option in fields:
        if option not in known:
            raise ValueError(f"reproduce: {name} has no option {option!r}.{nearest(option, known)}")
    config = entry.config(**fields)
    out = out / name if entry.trains else out
    record = record or out
    for folder, option in ((out, "--out"), (record, "--record" if record != out else "--out")):
        make_folder(folder, command="reproduce", way_out=f"Choose another one ({option}).")
    start = time.perf_counter()
    with seeded(0):  # some seed the global generators themselves; afterwards these are the caller's again
        outcome = entry.run(config, out) if entry.trains else entry.run(config)
    about = {
        "name": name,
        "source": entry.source,
        "shows": entry.shows,
        "configuration": {
            key: value.name if isinstance(value, Path) else value for key, value in dataclasses.asdict(config).items()
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - start, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": platform.machine(),
    }
    numbers = record / ("results.json" if entry.trains else f"{name}.json")
    numbers.write_text(
        json.dumps(about | {"findings": outcome.lines, "numbers": outcome.numbers}, indent=1, default=str),
        encoding="utf-8",
    )
    files = [numbers]
    if outcome.readme:
        readme = record / "README.md"
        text = "\n".join((f"# {entry.source}: {entry.shows}", "", *outcome.readme)) + "\n"
        readme.write_text(text, encoding="utf-8")
        files.insert(0, readme)
    if outcome.figure is not None:
        files.insert(0, save(outcome.figure, out / f"{name}.png"))
    return Written(outcome=outcome, files=tuple(files))
