"""Activations layer by layer: size, spread, dead units (Oyedotun et al. 2020, ICPR, sections V.A, VI.A and A2)."""

import math

import torch
from torch import Tensor

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Findings, measures_of

SMALL, LARGE = 0.05, 50.0  # Oyedotun et al. 2020, A2: healthy outputs lie between |0.05| and |50|
DEAD = 1e-6  # a unit that varies by less than this fraction of its layer's largest value is dead


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


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> dict[str, float]:
    y = y.float() if y.element_size() < 4 else y
    mean, size = y.mean(), y.abs()
    maximum = size.amax().item()  # NaN if any entry is NaN
    values = {
        "activation_mean": mean.item(),
        "activation_variance": torch.linalg.vector_norm(y - mean, dtype=torch.float64).square().item() / y.numel(),
        "activation_maximum": maximum,
        "fraction_above_small": fraction_above(size, SMALL),
        "fraction_above_large": fraction_above(size, LARGE) if maximum > LARGE else 0.0,
    }
    if layer.kind == "activation":
        values |= {"surviving_units": survival(y), "dead_units": dead_units(y, layer.unit_axis)}
    return values


def report(probe: Probe) -> Findings:
    dead = [value for value in probe.values("dead_units").values() if not math.isnan(value)]
    maxima = probe.values("activation_maximum").items()
    broken = next((layer.name for layer, value in maxima if not math.isfinite(value)), None)
    return Findings(
        numbers={"dead_units": max(dead, default=0.0)},
        notes=() if broken is None else (f"Layer {broken!r} is the first with NaN or infinite outputs.",),
    )


FAMILY = Family(name="activation", measures=measures_of("activation"), forward=forward, report=report)
