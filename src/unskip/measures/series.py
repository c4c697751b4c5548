"""What a measurement hands back: one `Series` per measure, all of them in one `Measured`."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """One layer of the measured network, as it ran."""

    name: str  # module path; the second call of a reused module is "path#2"
    kind: str  # "conv", "linear", "norm", "activation", "pool", "attention", "recurrent", "embedding", "block", ...
    parameters: int  # trained parameters, those of submodules included
    shape: tuple[int, ...]  # of its output
    trunk: bool  # everything that reaches the output passes through here; False inside a residual branch


@dataclass(frozen=True, kw_only=True)
class Series:
    """One measure: one number per layer, with what a plot of it needs."""

    name: str  # "gradient_norm"
    title: str  # heading of a plot, for somebody who has not read the papers
    label: str  # axis label with its unit
    layers: tuple[str, ...]  # names of layers in order of execution
    values: tuple[float, ...]  # nan where undefined
    errors: tuple[float, ...] | None = None  # standard error where the value is an estimate
    log: bool = False  # whether the axis is logarithmic
    healthy: str  # what healthy looks like, one or two sentences
    source: str  # paper, section, equation

    def __post_init__(self) -> None:
        assert len(self.layers) == len(self.values), self.name
        assert self.errors is None or len(self.errors) == len(self.values), self.name


@dataclass(frozen=True, kw_only=True)
class About:
    """What a measure is called and means; with numbers it becomes a `Series`."""

    name: str
    title: str
    label: str
    log: bool = False
    healthy: str
    source: str

    def series(self, layers: Iterable[str], values: Iterable[float], errors: Iterable[float] | None = None) -> Series:
        return Series(
            **asdict(self),
            layers=tuple(layers),
            values=tuple(values),
            errors=None if errors is None else tuple(errors),
        )


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one family of measures contributes."""

    series: tuple[Series, ...] = ()
    numbers: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measures of one network on one batch."""

    series: dict[str, Series]
    numbers: dict[str, float]  # one number per network, e.g. "gradient_growth"
    layers: tuple[LayerInfo, ...]  # in order of execution
    notes: tuple[str, ...]  # how it was measured, and what could not be; whole sentences
    failure: str | None = None  # why the backward pass fails, where it does
    samples: int | None = None  # in the batch
    shape: tuple[int, ...] | None = None  # of the batch, where it is one tensor
