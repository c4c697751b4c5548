"""Scaling ratios: how an operator changes the variance of signal and gradient.

Hu, github.com/hukkai/no-residual-network, section 3.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Findings, Measure, Series

FORWARD = Measure(
    name="forward_ratio",
    title="Change of the signal's variance in each layer",
    label="R_f, variance of the output over variance of the input",
    log=True,
    healthy="The product over all layers stays near 1, because normalisation and initialisation balance each other.",
    source="Hu, section 3, Definition 3.1",
)
BACKWARD = Measure(
    name="backward_ratio",
    title="Change of the gradient's variance in each layer",
    label="R_b, variance of the input's gradient over variance of the output's",
    log=True,
    healthy="As large as R_f. Where R_b is larger, as in every activation, gradients grow towards the input.",
    source="Hu, section 3, Definition 3.1",
)


class Variances(NamedTuple):
    """Variance over the samples, averaged over the entries."""

    input: float
    output: float


def variance(x: Tensor | None) -> float:
    """Var[x] = 1/d Σ_i Var[x_i] over the samples, for x of (B, d) (Hu, section 2)."""
    if x is None or x.shape[0] < 2:
        return math.nan
    centred = x - x.mean(0)
    return torch.linalg.vector_norm(centred, dtype=torch.float64).square().item() / (x.shape[0] - 1) / x.shape[1]


def ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> Variances:
    return Variances(input=variance(layer.by_sample(x)), output=variance(layer.by_sample(y)))


def backward(layer: Layer, output: Tensor, source: Tensor | None) -> Variances:
    return forward(layer, source, output)


def report(probe: Probe) -> Findings:
    signal, gradient = probe.stats("scaling"), probe.stats("scaling", backward=True)
    layers = [layer for layer in signal if layer.kind not in ("block", "embedding")]
    none = Variances(math.nan, math.nan)
    forwards = [ratio(signal[layer].output, signal[layer].input) for layer in layers]
    backwards = [ratio(found.input, found.output) for found in (gradient.get(layer, none) for layer in layers)]
    rates = [
        math.log(b / f)
        for layer, f, b in zip(layers, forwards, backwards, strict=True)
        if layer.kind == "activation" and f > 0 and b > 0
    ]
    return Findings(
        series=(Series.of(FORWARD, layers, forwards), Series.of(BACKWARD, layers, backwards)),
        # The geometric mean of R_b / R_f over the activations, to compare with r(σ) of Hu, section A.
        numbers={"activation_rate": math.exp(sum(rates) / len(rates)) if rates else math.nan},
    )


FAMILY = Family(name="scaling", report=report, forward=forward, backward=backward)
