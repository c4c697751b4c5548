"""Gradients layer by layer and how fast they grow on their way back.

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
from unskip.measures.series import About, Findings

NAN = float("nan")
BLOCKED = 0.01  # an entry whose gradient shrinks below this share has as good as no slope


LEVEL = (
    "A level line, within about a factor of ten. A straight slope on this logarithmic axis is an exponential: rising "
    "to the left it explodes, falling to the left it vanishes before it reaches the first layers."
)
WEIGHTS = About(
    name="gradient_norm",
    title="Gradient of each layer's weights",
    label="norm of the gradient",
    log=True,
    healthy=LEVEL,
    source="Hu, section 2, Figure 1",
)
RELATIVE = About(
    name="relative_gradient",
    title="Gradient against the size of the weights",
    label="norm of the gradient over norm of the weights",
    log=True,
    healthy="About the same in all layers, so that one learning rate suits them all.",
    source="Hu, section 2.2",
)
OUTPUTS = About(
    name="activation_gradient_norm",
    title="Gradient on its way back",
    label="norm of the gradient of the outputs",
    log=True,
    healthy=LEVEL,
    source="Hu, section 3, Definition 3.1",
)
STOPPED = About(
    name="gradient_blocked",
    title="Where the non-linearity stops the gradient",
    label="share of entries that pass on less than 1 % of their gradient",
    healthy="About ½ behind a ReLU and near 0 for smooth activations; near 1 the layer is saturated or dead.",
    source="Oyedotun et al. 2020, section V.A",
)


class Gradients(NamedTuple):
    """What is kept of the gradients at one layer."""

    norm: float  # of the loss by this layer's output
    rms: float
    blocked: float  # share of entries of which next to no gradient comes back


class Growth(NamedTuple):
    """A straight line through logarithms."""

    rate: float  # growth of the natural logarithm per layer, from the output towards the input
    error: float  # its standard error


def growth(norms: Sequence[float], depths: Sequence[float] | None = None) -> Growth:
    """How fast norms grow from the last layer back to the first::

        ln norm_k = a - rate * k     (least squares over layers k with a positive, finite norm)

    Positive: gradients explode towards the input; negative: they vanish. With BatchNorm, Hu expects
    ½ ln r(σ) a layer (section 3.1). Needs three layers.
    """
    k = np.arange(len(norms), dtype=float) if depths is None else np.asarray(depths, dtype=float)
    norm = np.asarray(norms, dtype=float)
    usable = np.isfinite(norm) & (norm > 0)
    k, y = k[usable], np.log(norm[usable])
    spread = k - k.mean() if len(k) else k
    if len(k) < 3 or not (spread**2).sum() > 0:
        return Growth(NAN, NAN)
    slope = (spread * y).sum() / (spread**2).sum()
    residual = y - y.mean() - slope * spread
    return Growth(-float(slope), float(np.sqrt((residual**2).sum() / (len(k) - 2) / (spread**2).sum())))


def backward(layer: Layer, output: Tensor, source: Tensor | None) -> Gradients:
    size = torch.linalg.vector_norm(output, dtype=torch.float64).item()
    blocked = NAN
    if layer.kind == "activation" and source is not None and source.shape == output.shape:
        count = torch.count_nonzero(output).item()
        # Where no gradient arrives at all, the comparison with zero is false: nothing was blocked there.
        blocked = torch.count_nonzero(source.abs() < BLOCKED * output.abs()).item() / count if count else NAN
    return Gradients(norm=size, rms=size / math.sqrt(output.numel()), blocked=blocked)


def weight_layers(probe: Probe) -> list[tuple[Layer, list[str]]]:
    """The layers that own weights of two axes and more, in order of execution, with the names of those weights.

    A module that runs several times stands where it ran first: its gradient is the sum over all its runs.
    """
    return [
        (layer, names)
        for layer in probe.layers
        if layer.call == 0
        and (
            names := [
                f"{layer.path}.{name}" if layer.path else name
                for name, parameter in layer.module.named_parameters()
                if parameter.ndim >= 2 and (layer.kind == "attention" or "." not in name or made(name))
            ]
        )
    ]


def made(name: str) -> bool:
    """Whether a parameter is what a module makes its own weight from (weight norm, spectral norm)."""
    return name.startswith(f"{PARAMETRIZATIONS}.")


def report(probe: Probe) -> Findings:
    parameters = dict(probe.network.named_parameters())
    weighty = weight_layers(probe)
    norms, relative = [], []
    for _, names in weighty:
        gradients = [probe.weight_gradients.get(name) for name in names]
        if any(gradient is None for gradient in gradients):
            norms.append(NAN)
            relative.append(NAN)
            continue
        size = math.hypot(*(gradient.double().norm().item() for gradient in gradients if gradient is not None))
        weight = math.hypot(*(parameters[name].detach().double().norm().item() for name in names))
        norms.append(size)
        relative.append(size / weight if weight > 0 else NAN)
    weight_names = tuple(layer.name for layer, _ in weighty)
    seen = [(layer, kept) for layer in probe.layers if (kept := layer.back.get("gradient")) is not None]
    blocked = [(layer.name, kept.blocked) for layer, kept in seen if layer.kind == "activation"]
    line = growth(norms)
    depth, depths = 0, {}
    owners = {id(layer) for layer, _ in weighty}
    for layer in probe.layers:
        depth += id(layer) in owners
        depths[layer.name] = depth
    trunk = [(depths[layer.name], kept.rms) for layer, kept in seen if layer.trunk]
    back = growth([rms for _, rms in trunk], [where for where, _ in trunk])
    found = (
        WEIGHTS.series(weight_names, norms),
        RELATIVE.series(weight_names, relative),
        OUTPUTS.series((layer.name for layer, _ in seen), (kept.norm for _, kept in seen)),
        STOPPED.series(*zip(*blocked, strict=True)) if blocked else STOPPED.series((), ()),
    )
    positive = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    numbers = {
        "gradient_growth": line.rate,
        "gradient_growth_error": line.error,
        "gradient_range": math.log10(max(positive) / min(positive)) if positive else NAN,
        "activation_gradient_growth": back.rate,
        "gradient_blocked": max((value for _, value in blocked if not math.isnan(value)), default=NAN),
    }
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    notes = []
    if not parameters:
        notes.append("The network has no parameters: there are no gradients of weights.")
    elif frozen:
        notes.append(
            f"{len(frozen)} of {len(parameters)} parameters take no gradient (requires_grad is False): theirs are not "
            "measured."
        )
    return Findings(series=found, numbers=numbers, notes=tuple(notes))


FAMILY = Family(name="gradient", report=report, backward=backward)
