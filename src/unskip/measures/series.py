"""The result of a measurement: one `Series` per measure, all of them in one `Measured`."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple, Self

from torch import Tensor

COUNTED = ("conv", "linear", "attention", "recurrent")  # kinds that count as layers of a network's depth


class Estimate(NamedTuple):
    """An estimated value."""

    value: float
    error: float  # standard error


def mean_with_error(values: Tensor) -> Estimate:
    """The mean of the finite values and its standard error."""
    values = values[values.isfinite()]
    if len(values) == 0:
        return Estimate(math.nan, math.nan)
    error = (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan
    return Estimate(values.mean().item(), error)


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """One layer of the measured model, as it ran."""

    name: str  # module path; the second call of a reused module is "path#2"
    kind: str  # "conv", "linear", "norm", "activation", "pool", "attention", "recurrent", "embedding", "block", ...
    parameters: int  # trainable parameters, including those of submodules
    shape: tuple[int, ...]  # of its output
    trunk: bool  # every path from the input to the output passes through it; False inside a residual branch
    depth: int = 0  # convolutions and linear layers on the longest path from the input up to here


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What a measure is called and what it means. `Series.of` adds the values."""

    name: str  # "gradient_norm"
    title: str  # heading of the plot, for readers who don't know the papers
    label: str  # axis label with its unit
    log: bool = False  # whether the axis is logarithmic
    healthy: str  # what healthy values look like, in one or two sentences
    source: str  # paper, section, equation


def measures_of(family: str) -> tuple[Measure, ...]:
    """The measures of one of our families, as measures.toml describes them."""
    return tuple(Measure(name=name, **about) for name, about in _descriptions()[family].items())


@cache
def _descriptions() -> dict[str, dict[str, dict[str, Any]]]:
    return tomllib.loads((resources.files("unskip.measures") / "measures.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Series(Measure):
    """One measure with one value per layer."""

    layers: tuple[str, ...]  # names of layers in order of execution
    values: tuple[float, ...]  # nan where undefined
    errors: tuple[float, ...] | None = None  # standard errors, if the values are estimates

    def __repr__(self) -> str:
        known = [value for value in self.values if not math.isnan(value)]
        ends = f"{known[0]:.3g} at the first, {known[-1]:.3g} at the last" if known else "none known"
        return f"<{self.name} of {len(self.layers)} layers: {ends}>"

    def __post_init__(self) -> None:
        assert len(self.layers) == len(self.values), self.name
        assert self.errors is None or len(self.errors) == len(self.values), self.name

    @classmethod
    def of(cls, measure: Measure, values: Mapping[str, float | Estimate]) -> Self:
        """The series of a measure, from its values by name of layer."""
        found = [
            value if isinstance(value, Estimate) else Estimate(float(value), math.nan) for value in values.values()
        ]
        return cls(
            **asdict(measure),
            layers=tuple(values),
            values=tuple(each.value for each in found),
            errors=tuple(each.error for each in found)
            if any(isinstance(v, Estimate) for v in values.values())
            else None,
        )

    def by_layer(self) -> dict[str, float]:
        """The values by name of layer, in order of execution."""
        return dict(zip(self.layers, self.values, strict=True))


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a family of measures finds beside the values of layers."""

    numbers: dict[str, float] = field(default_factory=dict)  # one per model
    notes: tuple[str, ...] = ()  # what could not be measured and why, in full sentences


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All measures of one model on one batch."""

    series: dict[str, Series]
    numbers: dict[str, float]  # one number per model, for example "gradient_growth"
    layers: tuple[LayerInfo, ...]  # in order of execution
    notes: tuple[str, ...]  # how it was measured and what could not be measured, in full sentences
    failure: str | None = None  # the error of the backward pass, if it fails
    samples: int | None = None  # in the batch
    shape: tuple[int, ...] | None = None  # of the batch, if it is a single tensor

    def __repr__(self) -> str:
        lines = [
            f"{len(self.series)} measures of {self.depth} layers, on {self.samples} inputs",
            *map(repr, self.series.values()),
        ]
        return "\n".join([*lines, *self.notes])

    @property
    def depth(self) -> int:
        """The number of layers as one counts them: convolutions and linear layers on the longest path."""
        counted = sum(layer.kind in COUNTED for layer in self.layers)  # without a gradient there are no paths
        return max((layer.depth for layer in self.layers), default=0) or counted
