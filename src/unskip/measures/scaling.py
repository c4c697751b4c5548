"""Scaling ratios: how an operator changes the variance of signal and gradient.

Hu, github.com/hukkai/no-residual-network, section 3.
"""

import math

import torch
from torch import Tensor

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Findings, measures_of


def variance(x: Tensor | None) -> float:
    """Var[x] = 1/d Σ_i Var[x_i] over the samples, for x of (B, d) (Hu, section 2)."""
    if x is None or x.shape[0] < 2:
        return math.nan
    centred = x - x.mean(0)
    square = torch.linalg.vector_norm(centred, dtype=torch.float64).square().item()
    return float(square) / (x.shape[0] - 1) / x.shape[1]


def ratio(layer: Layer, after: Tensor | None, before: Tensor | None) -> float | None:
    """R = Var[after] / Var[before], None for blocks and embeddings, which are no single operator."""
    if layer.kind in ("block", "embedding"):
        return None
    below = variance(layer.by_sample(before))
    return variance(layer.by_sample(after)) / below if below > 0 else math.nan


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> dict[str, float | None]:
    return {"forward_ratio": ratio(layer, y, x)}


def backward(layer: Layer, output: Tensor, source: Tensor | None) -> dict[str, float | None]:
    return {"backward_ratio": ratio(layer, source, output)}


def report(probe: Probe) -> Findings:
    back = probe.values("backward_ratio")
    rates = [
        math.log(back[layer] / ratio)
        for layer, ratio in probe.values("forward_ratio").items()
        if layer.kind == "activation" and ratio > 0 and back.get(layer, 0) > 0
    ]
    # The geometric mean of R_b / R_f over the activations, to compare with r(σ) of Hu, section A.
    return Findings(numbers={"activation_rate": math.exp(sum(rates) / len(rates)) if rates else math.nan})


FAMILY = Family(name="scaling", measures=measures_of("scaling"), forward=forward, backward=backward, report=report)
