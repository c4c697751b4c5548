"""Sections of a recipe: frozen dataclasses whose fields are checked, and which are tables of a TOML file.

A field's type says what it may hold: `Literal`, a number with its range (`Positive[float]`), a table or a list.
"""

import contextlib
import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

from unskip._core.text import nearest


class Range(NamedTuple):
    """Which numbers a field takes, and how a message says so."""

    holds: Callable[[float], bool]
    words: str


T = TypeVar("T")
Positive = Annotated[T, Range(lambda value: value > 0, "above 0")]
NonNegative = Annotated[T, Range(lambda value: value >= 0, "at least 0")]
Probability = Annotated[float, Range(lambda value: 0 <= value <= 1, "a probability, 0 to 1")]
BelowOne = Annotated[float, Range(lambda value: 0 <= value < 1, "at least 0 and below 1")]
Free = Annotated[T, "free"]  # a field that changes no number, so it may differ between a run and its continuation

LARGEST: dict[type, float] = {int: 2**63 - 1, float: 3.4e38}  # what tensors hold: int64 and float32

OLD = (
    "Recipes have the tables [network], [data], [optimizer] and [run] now; of the old names, 'network' is 'model' in "
    "[network], and 'settle' is 'recalibrate_batchnorm' in [run]."
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table of a recipe. Its fields are checked against their types and ranges."""

    def __post_init__(self) -> None:
        for name, kind in kinds(type(self)).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), kind))

    @classmethod
    def from_tables(cls, tables: Any, name: str, where: str) -> Self:
        """The section `name` of a recipe's tables, which come from `where`; defaults where it has none."""
        values = tables.get(name, {}) if isinstance(tables, Mapping) else tables
        if not isinstance(values, Mapping):
            raise ValueError(f"{where}: {name}={values!r} must be a table. {OLD}")
        known = list(kinds(cls))
        for field in values:
            if field not in known:
                raise ValueError(f"{where}: there is no field {field!r} in [{name}].{nearest(str(field), known)}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{where}: {str(error).removeprefix('recipe: ')}") from error

    def as_dict(self) -> dict[str, Any]:
        """Plain values: numbers, strings, lists and dicts, as TOML, JSON and checkpoints hold them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def kinds(section: type) -> dict[str, Any]:
    """The fields of a section and their types, ranges included."""
    return get_type_hints(section, include_extras=True)


def bare(kind: Any) -> Any:
    """A field's type without its range."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def checked(name: str, value: Any, kind: Any) -> Any:
    """The value of a field if it has the field's type and range; an int where a float is asked for becomes one."""
    if get_origin(kind) is Annotated:
        value = checked(name, value, bare(kind))
        for limit in kind.__metadata__:
            if isinstance(limit, Range) and not limit.holds(value):
                raise ValueError(f"recipe: {name}={value} must be {limit.words}.")
        return value
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"recipe: {name}={value!r} is not known.{nearest(str(value), list(args))}")
        return value
    if origin is dict:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: v if args[1] is Any else checked(f"{name}[{key!r}]", v, args[1]) for key, v in value.items()}
        raise ValueError(f"recipe: {name}={value!r} must be a table, for instance {{layer3 = 0.5}}.")
    if origin is tuple:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(checked(name, v, args[0]) for v in value)
        raise ValueError(f"recipe: {name}={value!r} must be a list, for instance [120, 160].")
    right = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not right or value != value:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
        raise ValueError(f"recipe: {name}={value!r} must be {words}.")
    if kind in LARGEST and abs(value) > LARGEST[kind]:
        raise ValueError(f"recipe: {name}={value!r:.40} must be at most {LARGEST[kind]:.3g} in size.")
    return float(value) if kind is float else value


def parse(name: str, text: str, kind: Any) -> Any:
    """The value of a field from the text of a command line: numbers, lists and tables as TOML writes them."""
    kind = bare(kind)
    if kind is str or get_origin(kind) is Literal:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        if kind is float:  # TOML wants a digit before the point
            with contextlib.suppress(ValueError):
                return float(text)
        return checked(name, text, kind)  # text where something else is asked for: says what


def to_toml(value: Any) -> str:
    """A plain value as TOML writes it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {to_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)
