"""Gradients layer by layer, and how fast they grow towards the input.

Hu, github.com/hukkai/no-residual-network, section 2, Figure 1.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unskip.measures.layer_types import PARAMETRIZATIONS
from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Findings, Measure, Series

BLOCKED = 0.01  # an entry that passes on less than this fraction of its gradient counts as blocked

LEVEL = (
    "Level, within about a factor of ten. A straight slope on this logarithmic axis is exponential: rising to the left "
    "the gradient explodes, falling to the left it vanishes before it reaches the first layers."
)
WEIGHTS = Measure(
    name="gradient_norm",
    title="Gradient of each layer's weights",
    label="norm of the gradient",
    log=True,
    healthy=LEVEL,
    source="Hu, section 2, Figure 1",
)
RELATIVE = Measure(
    name="relative_gradient",
    title="Gradient relative to the weights",
    label="norm of the gradient over norm of the weights",
    log=True,
    healthy="About the same in all layers, so that one learning rate suits them all.",
    source="Hu, section 2.2",
)
OUTPUTS = Measure(
    name="activation_gradient_norm",
    title="Gradient of each layer's output",
    label="norm of the gradient of the outputs",
    log=True,
    healthy=LEVEL,
    source="Hu, section 3, Definition 3.1",
)
BLOCKED_GRADIENT = Measure(
    name="gradient_blocked",
    title="Gradient blocked by activation functions",
    label="fraction of entries that pass on less than 1 % of their gradient",
    healthy="About ½ for ReLU and near 0 for smooth activations. Near 1, the layer is saturated or dead.",
    source="Oyedotun et al. 2020, section V.A",
)


class GradientStats(NamedTuple):
    """Statistics of the gradients at one layer."""

    norm: float  # of the gradient of the layer's output
    rms: float
    blocked: float  # fraction of entries whose gradient is blocked


class Growth(NamedTuple):
    """A straight line fitted to logarithms."""

    rate: float  # change of the natural logarithm per layer, from the output towards the input
    error: float  # its standard error


def growth(norms: Sequence[float], depths: Sequence[float] | None = None) -> Growth:
    """How fast norms grow from the last layer to the first::

        ln norm_k = a - rate * k     (least squares over layers k with a positive, finite norm)

    Gradients explode towards the input if the rate is positive and vanish if it is negative. With BatchNorm, Hu
    expects ½ ln r(σ) per layer (section 3.1). Needs three layers.
    """
    k = np.arange(len(norms), dtype=float) if depths is None else np.asarray(depths, dtype=float)
    norm = np.asarray(norms, dtype=float)
    usable = np.isfinite(norm) & (norm > 0)
    k, y = k[usable], np.log(norm[usable])
    if len(k) < 3 or np.ptp(k) == 0:
        return Growth(math.nan, math.nan)
    spread = k - k.mean()
    slope = (spread * y).sum() / (spread**2).sum()
    residual = y - y.mean() - slope * spread
    return Growth(-float(slope), float(np.sqrt((residual**2).sum() / (len(k) - 2) / (spread**2).sum())))


def backward(layer: Layer, output: Tensor, source: Tensor | None) -> GradientStats:
    norm = torch.linalg.vector_norm(output, dtype=torch.float64).item()
    blocked = math.nan
    if layer.kind == "activation" and source is not None and source.shape == output.shape:
        count = torch.count_nonzero(output).item()
        # Entries that no gradient reaches are not blocked: the comparison with zero is false.
        blocked = torch.count_nonzero(source.abs() < BLOCKED * output.abs()).item() / count if count else math.nan
    return GradientStats(norm=norm, rms=norm / math.sqrt(output.numel()), blocked=blocked)


def weight_layers(probe: Probe) -> dict[Layer, list[str]]:
    """The layers that own weights with at least two axes, in order of execution, with the names of those weights.

    A module that runs several times counts where it ran first. Its gradient is the sum over all its calls.
    """
    found = {}
    for layer in probe.layers:
        names = [
            f"{layer.path}.{name}" if layer.path else name
            for name, parameter in layer.module.named_parameters()
            if parameter.ndim >= 2
            and (layer.kind == "attention" or "." not in name or name.startswith(f"{PARAMETRIZATIONS}."))
        ]
        if layer.call == 0 and names:
            found[layer] = names
    return found


def report(probe: Probe) -> Findings:
    parameters = dict(probe.model.named_parameters())
    owners = weight_layers(probe)
    norms, relative = [], []
    for names in owners.values():
        gradients = [gradient for name in names if (gradient := probe.weight_gradients.get(name)) is not None]
        complete = len(gradients) == len(names)
        norm = math.hypot(*(gradient.double().norm().item() for gradient in gradients)) if complete else math.nan
        weight = math.hypot(*(parameters[name].detach().double().norm().item() for name in names))
        norms.append(norm)
        relative.append(norm / weight if weight > 0 else math.nan)
    stats = probe.stats("gradient", backward=True)
    blocked = {layer: found.blocked for layer, found in stats.items() if layer.kind == "activation"}
    depth, depths = 0, {}  # weight layers up to each layer
    for layer in probe.layers:
        depth += layer in owners
        depths[layer] = depth
    trunk = {layer: found.rms for layer, found in stats.items() if layer.trunk}
    line, back = growth(norms), growth(list(trunk.values()), [depths[layer] for layer in trunk])
    positive = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    frozen = sum(not parameter.requires_grad for parameter in parameters.values())
    notes = []
    if not parameters:
        notes.append("The model has no parameters, so there are no gradients of weights.")
    elif frozen:
        notes.append(f"Gradients of {frozen} of {len(parameters)} parameters are not measured: they are frozen.")
    return Findings(
        series=(
            Series.of(WEIGHTS, owners, norms),
            Series.of(RELATIVE, owners, relative),
            Series.of(OUTPUTS, stats, [found.norm for found in stats.values()]),
            Series.of(BLOCKED_GRADIENT, blocked, blocked.values()),
        ),
        numbers={
            "gradient_growth": line.rate,
            "gradient_growth_error": line.error,
            "gradient_range": math.log10(max(positive) / min(positive)) if positive else math.nan,
            "activation_gradient_growth": back.rate,
            "gradient_blocked": max((value for value in blocked.values() if not math.isnan(value)), default=math.nan),
        },
        notes=tuple(notes),
    )


FAMILY = Family(name="gradient", report=report, backward=backward)
