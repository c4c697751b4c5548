"""The result of a measurement: one `Series` per measure, all of them in one `Measured`."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Self


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """One layer of the measured model, as it ran."""

    name: str  # module path; the second call of a reused module is "path#2"
    kind: str  # "conv", "linear", "norm", "activation", "pool", "attention", "recurrent", "embedding", "block", ...
    parameters: int  # trainable parameters, including those of submodules
    shape: tuple[int, ...]  # of its output
    trunk: bool  # every path from the input to the output passes through it; False inside a residual branch


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What a measure is called and what it means. `Series.of` adds the values."""

    name: str  # "gradient_norm"
    title: str  # heading of the plot, for readers who don't know the papers
    label: str  # axis label with its unit
    log: bool = False  # whether the axis is logarithmic
    healthy: str  # what healthy values look like, in one or two sentences
    source: str  # paper, section, equation


@dataclass(frozen=True, kw_only=True)
class Series(Measure):
    """One measure with one value per layer."""

    layers: tuple[str, ...]  # names of layers in order of execution
    values: tuple[float, ...]  # nan where undefined
    errors: tuple[float, ...] | None = None  # standard errors, if the values are estimates

    def __post_init__(self) -> None:
        assert len(self.layers) == len(self.values), self.name
        assert self.errors is None or len(self.errors) == len(self.values), self.name

    @classmethod
    def of(
        cls,
        measure: Measure,
        layers: Iterable[object],
        values: Iterable[float],
        errors: Iterable[float] | None = None,
    ) -> Self:
        """The series of a measure. `layers` are the probe's layers or their names."""
        errors = None if errors is None else tuple(errors)
        return cls(**asdict(measure), layers=tuple(map(str, layers)), values=tuple(values), errors=errors)

    def by_layer(self) -> dict[str, float]:
        """The values by name of layer, in order of execution."""
        return dict(zip(self.layers, self.values, strict=True))


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of one family of measures."""

    series: tuple[Series, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
