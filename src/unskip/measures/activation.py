"""Activations layer by layer: size, spread, dead units (Oyedotun et al. 2020, ICPR, sections V.A, VI.A and A2)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Findings, Measure, Series

SMALL, LARGE = 0.05, 50.0  # Oyedotun et al. 2020, A2: healthy outputs lie between |0.05| and |50|
DEAD = 1e-6  # a unit that varies by less than this fraction of its layer's largest value is dead
ALL_LAYERS = {  # field of ActivationStats: measure
    "mean": Measure(
        name="activation_mean",
        title="Mean of the outputs",
        label="mean of the outputs",
        healthy="About the same in all layers. If it drifts away from zero, inputs begin to look alike.",
        source="Oyedotun et al. 2020, section VI.A, Fig. 2 and 3",
    ),
    "variance": Measure(
        name="activation_variance",
        title="Variance of the outputs",
        label="variance of the outputs",
        log=True,
        healthy="About level. A straight slope on this logarithmic axis is exponential decay or growth.",
        source="Oyedotun et al. 2020, section V.A; Hu, section 2",
    ),
    "maximum": Measure(
        name="activation_maximum",
        title="Largest output",
        label="largest absolute output",
        log=True,
        healthy=f"Below about {LARGE:g} in all layers. In plain networks that fail it reaches thousands.",
        source="Oyedotun et al. 2020, section VI.A, Fig. 4",
    ),
    "above_small": Measure(
        name="fraction_above_small",
        title="Outputs that are not close to zero",
        label=f"fraction of outputs above |{SMALL:g}|",
        healthy=f"Near 1, or near ½ after a ReLU. Training is hard if many outputs are below {SMALL:g}.",
        source="Oyedotun et al. 2020, section A2, Fig. A1",
    ),
    "above_large": Measure(
        name="fraction_above_large",
        title="Very large outputs",
        label=f"fraction of outputs above |{LARGE:g}|",
        healthy="0. Networks that train well have no outputs of this size.",
        source="Oyedotun et al. 2020, section A2, Fig. A1",
    ),
}
ACTIVATION_LAYERS = {
    "positive": Measure(
        name="surviving_units",
        title="Units that survive the activation function",
        label="fraction of outputs above zero",
        healthy="About ½ or more after a ReLU, at every depth. Lower values mean that information is cut off.",
        source="Zhang et al. 2024, section 3.1, Theorem 3.3",
    ),
    "dead": Measure(
        name="dead_units",
        title="Dead units",
        label="fraction of units with the same output for all inputs",
        healthy="0. A unit with the same output for every input learns nothing and passes nothing on.",
        source="Oyedotun et al. 2020, section V.A",
    ),
}


class ActivationStats(NamedTuple):
    """Statistics of one layer's output."""

    mean: float
    variance: float
    maximum: float
    above_small: float
    above_large: float
    positive: float
    dead: float


def survival(activation: Tensor) -> float:
    """The fraction of entries above zero: units that survive a ReLU (Zhang et al. 2024, Theorem 3.3)."""
    return torch.count_nonzero(activation > 0).item() / activation.numel()


def dead_units(activation: Tensor, axis: int = -1) -> float:
    """The fraction of units along `axis` that are constant over all inputs and positions.

    Examples are a ReLU that is never on and a tanh that is always saturated.
    """
    others = [other for other in range(activation.ndim) if other != axis % activation.ndim]
    if not others:
        return math.nan
    low, high = activation.amin(others), activation.amax(others)
    scale = torch.maximum(low.abs().amax(), high.abs().amax())
    return (high - low <= DEAD * scale).double().mean().item()


def fraction_above(activation: Tensor, threshold: float) -> float:
    """The fraction of entries with an absolute value above `threshold` (Oyedotun et al. 2020, A2)."""
    return torch.count_nonzero(activation.abs() > threshold).item() / activation.numel()


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> ActivationStats:
    y = y.float() if y.element_size() < 4 else y
    mean, size = y.mean(), y.abs()
    maximum = size.amax().item()  # NaN if any entry is NaN
    return ActivationStats(
        mean=mean.item(),
        variance=torch.linalg.vector_norm(y - mean, dtype=torch.float64).square().item() / y.numel(),
        maximum=maximum,
        above_small=fraction_above(size, SMALL),
        above_large=fraction_above(size, LARGE) if maximum > LARGE else 0.0,
        positive=survival(y) if layer.kind == "activation" else math.nan,
        dead=dead_units(y, layer.unit_axis) if layer.kind == "activation" else math.nan,
    )


def report(probe: Probe) -> Findings:
    stats = probe.stats("activation")
    activations = {layer: found for layer, found in stats.items() if layer.kind == "activation"}
    dead = [found.dead for found in activations.values() if not math.isnan(found.dead)]
    broken = next((layer.name for layer, found in stats.items() if not math.isfinite(found.maximum)), None)
    return Findings(
        series=tuple(
            Series.of(measure, layers, [getattr(found, field) for found in layers.values()])
            for layers, measures in ((stats, ALL_LAYERS), (activations, ACTIVATION_LAYERS))
            for field, measure in measures.items()
        ),
        numbers={"dead_units": max(dead, default=0.0)},
        notes=() if broken is None else (f"Layer {broken!r} is the first with NaN or infinite outputs.",),
    )


FAMILY = Family(name="activation", report=report, forward=forward)
