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
from unskip.measures.series import Findings, measures_of

BLOCKED = 0.01  # an entry that passes on less than this fraction of its gradient counts as blocked


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


def backward(layer: Layer, output: Tensor, source: Tensor | None) -> dict[str, float]:
    values = {"activation_gradient_norm": torch.linalg.vector_norm(output, dtype=torch.float64).item()}
    if layer.kind == "activation":
        values["gradient_blocked"] = math.nan
        count = torch.count_nonzero(output).item()
        if count and source is not None and source.shape == output.shape:
            # Entries that no gradient reaches are not blocked: the comparison with zero is false.
            values["gradient_blocked"] = torch.count_nonzero(source.abs() < BLOCKED * output.abs()).item() / count
    return values


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
    for layer, names in owners.items():
        gradients = [gradient for name in names if (gradient := probe.weight_gradients.get(name)) is not None]
        complete = len(gradients) == len(names)
        norm = math.hypot(*(gradient.double().norm().item() for gradient in gradients)) if complete else math.nan
        weight = math.hypot(*(parameters[name].detach().double().norm().item() for name in names))
        layer.values["gradient_norm"] = norm
        layer.values["relative_gradient"] = norm / weight if weight > 0 else math.nan
    depth, depths = 0, {}  # weight layers up to each layer
    for layer in probe.layers:
        depth += layer in owners
        depths[layer] = depth
    outputs = {
        layer: norm / math.sqrt(math.prod(layer.shape))  # root mean square
        for layer, norm in probe.values("activation_gradient_norm").items()
        if layer.trunk
    }
    norms = [layer.values["gradient_norm"] for layer in owners]
    line, back = growth(norms), growth(list(outputs.values()), [depths[layer] for layer in outputs])
    positive = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    blocked = [value for value in probe.values("gradient_blocked").values() if not math.isnan(value)]
    frozen = sum(not parameter.requires_grad for parameter in parameters.values())
    notes = []
    if not parameters:
        notes.append("The model has no parameters, so there are no gradients of weights.")
    elif frozen:
        notes.append(f"Gradients of {frozen} of {len(parameters)} parameters are not measured: they are frozen.")
    numbers = {
        "gradient_growth": line.rate,
        "gradient_growth_error": line.error,
        "gradient_range": math.log10(max(positive) / min(positive)) if positive else math.nan,
        "activation_gradient_growth": back.rate,
        "gradient_blocked": max(blocked, default=math.nan),
    }
    return Findings(numbers=numbers, notes=tuple(notes))


FAMILY = Family(name="gradient", measures=measures_of("gradient"), report=report, backward=backward)
