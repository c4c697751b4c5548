"""Activations layer by layer: size, spread, units that say something (Oyedotun et al. 2020, ICPR, V.A, VI.A and A2)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import About, Findings

NAN = float("nan")
SMALL, LARGE = 0.05, 50.0  # Oyedotun et al. 2020, A2: healthy units lie between |0.05| and |50|
DEAD = 1e-6  # a unit that moves by less than this share of its layer's largest value is dead
ALL = {  # field of Activations: measure of every layer
    "mean": About(
        name="activation_mean",
        title="Mean activation",
        label="mean of the outputs",
        healthy="About the same from layer to layer. Where it runs away from zero, inputs begin to look alike.",
        source="Oyedotun et al. 2020, section VI.A, Fig. 2 and 3",
    ),
    "variance": About(
        name="activation_variance",
        title="Spread of the activations",
        label="variance of the outputs",
        log=True,
        healthy="A level line. A straight fall or rise on this logarithmic axis is an exponential loss or explosion.",
        source="Oyedotun et al. 2020, section V.A; Hu, section 2",
    ),
    "maximum": About(
        name="activation_maximum",
        title="Largest activation",
        label="largest absolute output",
        log=True,
        healthy=f"Below about {LARGE:g} everywhere. Plain networks that fail reach thousands as they train.",
        source="Oyedotun et al. 2020, section VI.A, Fig. 4",
    ),
    "above_small": About(
        name="share_above_small",
        title="Units that say something",
        label=f"share of outputs above |{SMALL:g}|",
        healthy=f"Near 1 (near ½ behind a ReLU). Training gets hard where many units are smaller than {SMALL:g}.",
        source="Oyedotun et al. 2020, section A2, Fig. A1",
    ),
    "above_large": About(
        name="share_above_large",
        title="Units that shout",
        label=f"share of outputs above |{LARGE:g}|",
        healthy="0: no unit is that large in a network that trains well.",
        source="Oyedotun et al. 2020, section A2, Fig. A1",
    ),
}
AFTER = {  # measures of what a non-linearity puts out
    "positive": About(
        name="surviving_units",
        title="Neurons that survive their non-linearity",
        label="share of outputs above zero",
        healthy="About ½ or more behind a ReLU, at every depth; less means that the input is being cut away.",
        source="Zhang et al. 2024, section 3.1, Theorem 3.3",
    ),
    "dead": About(
        name="dead_units",
        title="Dead units",
        label="share of units that never move",
        healthy="0. A unit that gives the same for every input learns nothing and passes nothing on.",
        source="Oyedotun et al. 2020, section V.A",
    ),
}


class Activations(NamedTuple):
    """What is kept of one layer's output."""

    mean: float
    variance: float
    maximum: float
    above_small: float
    above_large: float
    positive: float
    dead: float
    finite: bool


def survival(activation: Tensor) -> float:
    """The share of entries above zero: neurons that survive a ReLU (Zhang et al. 2024, Theorem 3.3)."""
    return torch.count_nonzero(activation > 0).item() / activation.numel()


def dead_units(activation: Tensor, axis: int = -1) -> float:
    """The share of units, along an axis, that are the same for every input and position.

    A ReLU that is never on, and as well a tanh that is always at its end.
    """
    others = [other for other in range(activation.ndim) if other != axis % activation.ndim]
    if not others:
        return NAN
    low, high = activation.amin(others), activation.amax(others)
    scale = torch.maximum(low.abs().amax(), high.abs().amax())
    return (high - low <= DEAD * scale).double().mean().item()


def share_above(activation: Tensor, threshold: float) -> float:
    """The share of entries with an absolute value above a threshold (Oyedotun et al. 2020, A2)."""
    return torch.count_nonzero(activation.abs() > threshold).item() / activation.numel()


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> Activations:
    y = y.float() if y.element_size() < 4 else y
    mean, size = y.mean(), y.abs()
    maximum = size.amax().item()  # NaN where one is
    return Activations(
        mean=mean.item(),
        variance=torch.linalg.vector_norm(y - mean, dtype=torch.float64).square().item() / y.numel(),
        maximum=maximum,
        above_small=share_above(size, SMALL),
        above_large=share_above(size, LARGE) if maximum > LARGE else 0.0,
        positive=survival(y) if layer.kind == "activation" else NAN,
        dead=dead_units(y, layer.unit_axis) if layer.kind == "activation" else NAN,
        finite=math.isfinite(maximum),
    )


def report(probe: Probe) -> Findings:
    layers = probe.layers
    after = [layer for layer in layers if layer.kind == "activation"]
    found = [
        about.series((layer.name for layer in chosen), (getattr(layer.kept["activation"], field) for layer in chosen))
        for chosen, measures in ((layers, ALL), (after, AFTER))
        for field, about in measures.items()
    ]
    dead = [layer.kept["activation"].dead for layer in after]
    broken = next((layer.name for layer in layers if not layer.kept["activation"].finite), None)
    notes = () if broken is None else (f"Layer {broken!r} is the first whose output is not finite (NaN or infinity).",)
    return Findings(
        series=tuple(found),
        numbers={"dead_units": max((share for share in dead if not math.isnan(share)), default=0.0)},
        notes=notes,
    )


FAMILY = Family(name="activation", report=report, forward=forward)
