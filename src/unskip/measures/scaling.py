"""Scaling ratios: what an operator does to the spread of signal and gradient.

Hu, github.com/hukkai/no-residual-network, section 3.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unskip.measures.layer_types import by_sample
from unskip.measures.probe import Family, Layer, Probe, sample_axis
from unskip.measures.series import About, Findings

NAN = float("nan")
FORWARD = About(
    name="forward_ratio",
    title="What each layer does to the spread of the signal",
    label="R_f, variance of the output over variance of the input",
    log=True,
    healthy="The product along the network stays near 1, since normalisation and initialisation balance each other.",
    source="Hu, section 3, Definition 3.1",
)
BACKWARD = About(
    name="backward_ratio",
    title="What each layer does to the spread of the gradient",
    label="R_b, variance of the input's gradient over variance of the output's",
    log=True,
    healthy="As large as R_f. Where R_b is larger, as at every non-linearity, gradients grow on their way back.",
    source="Hu, section 3, Definition 3.1",
)


class Variances(NamedTuple):
    """Variance over the samples, averaged over the entries."""

    input: float
    output: float


def variance(x: Tensor) -> float:
    """Var[x] = 1/d Σ_i Var[x_i] over the samples, for x of (B, d) (Hu, section 2)."""
    if x.shape[0] < 2:
        return NAN
    centred = x - x.mean(0)
    return torch.linalg.vector_norm(centred, dtype=torch.float64).square().item() / (x.shape[0] - 1) / x.shape[1]


def ratio(above: float, below: float) -> float:
    return above / below if below > 0 else NAN


def input_variance(layer: Layer, x: Tensor | None) -> float:
    axis = None if x is None else sample_axis(layer.module, tuple(x.shape), layer.samples)
    flat = None if x is None or axis is None else by_sample(x, layer.samples, axis)
    return NAN if flat is None else variance(flat)


def output_variance(layer: Layer, y: Tensor) -> float:
    flat = layer.by_sample(y)
    return NAN if flat is None else variance(flat)


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> Variances:
    return Variances(input_variance(layer, x), output_variance(layer, y))


def backward(layer: Layer, output: Tensor, source: Tensor | None) -> Variances:
    return Variances(input_variance(layer, source), output_variance(layer, output))


def report(probe: Probe) -> Findings:
    layers = [layer for layer in probe.layers if layer.kind not in ("block", "embedding")]
    names = [layer.name for layer in layers]
    there = [ratio(kept.output, kept.input) for layer in layers if (kept := layer.kept["scaling"])]
    back = [
        ratio(kept.input, kept.output) if (kept := layer.back.get("scaling")) is not None else NAN for layer in layers
    ]
    rates = [
        math.log(b / f)
        for layer, f, b in zip(layers, there, back, strict=True)
        if layer.kind == "activation" and f > 0 and b > 0
    ]
    return Findings(
        series=(FORWARD.series(names, there), BACKWARD.series(names, back)),
        # The geometric mean of R_b / R_f over the non-linearities, to compare with r(σ) of Hu, section A.
        numbers={"activation_rate": math.exp(sum(rates) / len(rates)) if rates else NAN},
    )


FAMILY = Family(name="scaling", report=report, forward=forward, backward=backward)
