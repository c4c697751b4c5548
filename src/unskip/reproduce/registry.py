"""The registry of reproductions: a table or figure of a paper, by name, with what can be set about it.

A reproduction is a function from its settings (a frozen dataclass whose fields are the command's options) to an
`Outcome`. It computes and draws; `reproduce` writes the files. reproductions.toml says what each is about, for
`unskip reproduce --help` too.
"""

import dataclasses
import io
import json
import platform
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, get_type_hints

import torch
from matplotlib.figure import Figure

from unskip._core.files import make_folder, write_atomically
from unskip._core.rng import seeded
from unskip._core.text import nearest


class Limit(NamedTuple):
    """Which values a setting takes, and how a message says so."""

    holds: Callable[[Any], bool]
    words: str

    def check(self, name: str, value: object) -> None:
        if not self.holds(value):
            raise ValueError(f"reproduce: {name}={value!r} must be {self.words}.")


def between(least: float, most: float, why: str = "") -> Limit:
    """Numbers from `least` to `most`; `why` ends the message."""
    return Limit(lambda value: least <= value <= most, f"between {least:,} and {most:,}{why}")


def one_of(*choices: object) -> Limit:
    return Limit(lambda value: value in choices, f"one of {', '.join(map(str, choices))}")


SEED = between(0, 2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be set about a reproduction. A field is `Annotated[type, "what it is", limit]`; None passes."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for limit in () if value is None else hint.__metadata__[1:]:
                limit.check(name, value)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a reproduction found."""

    lines: tuple[str, ...]  # what it shows, in sentences with its numbers; printed
    numbers: dict[str, Any]  # everything that a reader may want to recompute; written as JSON
    figure: Figure | None = None  # the picture, where it has one
    files: Mapping[str, bytes] = field(default_factory=dict)  # more of the record, by name
    ended: Exception | None = None  # raised once everything is written: the time was up before all was done
    readme: tuple[str, ...] = ()  # lines of the record's README.md, where networks were trained for it


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table or figure that has a name."""

    name: str
    source: str  # paper and figure
    shows: str  # in one line
    settings: type[Settings]
    run: Callable[..., Outcome]
    trains: bool = False  # whether it trains networks, in a folder that a second call continues with


ABOUT = tomllib.loads((resources.files("unskip") / "reproduce" / "reproductions.toml").read_text(encoding="utf-8"))
REPRODUCTIONS: dict[str, Reproduction] = {}
R = TypeVar("R", bound=Callable[..., Outcome])


def reproduction(
    name: str, *, settings: type[Settings], trains: bool = False, source: str = "", shows: str = ""
) -> Callable[[R], R]:
    """Decorator: registers a function from `settings` to Outcome as `unskip reproduce NAME`.

    With `trains`, the function also gets a folder for its runs, `run(settings, folder)`. `source` and `shows` come from
    reproductions.toml for a name that it lists, and must be given for any other.
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
        REPRODUCTIONS[name] = Reproduction(name=name, settings=settings, run=run, trains=trains, **about)
        return run

    return register


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a reproduction found, and the files that hold it."""

    outcome: Outcome
    files: tuple[Path, ...]


def reproduce(name: str, *, out: Path, record: Path | None = None, **settings: Any) -> Written:
    """Runs a reproduction and writes OUT/NAME.png and RECORD/NAME.json (RECORD is OUT unless given).

    The record holds the numbers, the settings, versions and the time taken. Where networks are trained, everything is
    in OUT/NAME instead: the picture, their runs (a second call continues with them), and the record as README.md and
    results.json, unless RECORD is another folder.
    """
    if name not in REPRODUCTIONS:
        raise ValueError(f"reproduce: there is no {name!r}.{nearest(name, list(REPRODUCTIONS))}")
    entry = REPRODUCTIONS[name]
    known = [each.name for each in dataclasses.fields(entry.settings)]
    for option in settings:
        if option not in known:
            raise ValueError(f"reproduce: {name} has no option {option!r}.{nearest(option, known)}")
    chosen = entry.settings(**settings)
    out = out / name if entry.trains else out
    record = record or out
    way_out = {folder: f"Choose another one ({option})." for folder, option in ((record, "--record"), (out, "--out"))}
    for folder, words in way_out.items():
        make_folder(folder, command="reproduce", way_out=words)
    start = time.perf_counter()
    with seeded(0):  # some seed the global generators themselves; the caller gets theirs back
        outcome = entry.run(chosen, out) if entry.trains else entry.run(chosen)
    numbers = {
        "name": name,
        "source": entry.source,
        "shows": entry.shows,
        "configuration": {k: v.name if isinstance(v, Path) else v for k, v in dataclasses.asdict(chosen).items()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - start, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": platform.machine(),
        "findings": outcome.lines,
        "numbers": outcome.numbers,
    }
    files: dict[Path, bytes] = {record / name: content for name, content in outcome.files.items()}
    if outcome.figure is not None:
        files[out / f"{name}.png"] = as_png(outcome.figure)
    if outcome.readme:
        text = "\n".join((f"# {entry.source}: {entry.shows}", "", *outcome.readme)) + "\n"
        files[record / "README.md"] = text.encode()
    results = record / ("results.json" if entry.trains else f"{name}.json")
    files[results] = json.dumps(numbers, indent=1, default=str).encode()
    for path, content in files.items():
        write_atomically(path, partial(_write, content), command="reproduce", way_out=way_out[path.parent])
    if outcome.ended is not None:
        raise outcome.ended
    return Written(outcome=outcome, files=tuple(files))


def _write(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def as_png(figure: Figure) -> bytes:
    """A PNG without the date, so that the same numbers give the same file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png", metadata={"Software": None})
    return buffer.getvalue()
