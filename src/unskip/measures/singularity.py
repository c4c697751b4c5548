"""Singularity: whether the units of a layer still differ (Oyedotun et al. 2020, ICPR, section V.B)."""

import math

import torch
from torch import Tensor

from unskip.measures.probe import Family, Layer, Probe, evenly_spaced
from unskip.measures.series import Findings, measures_of
from unskip.theory import condition_number

MAX_OBSERVATIONS = 4096  # samples and positions, evenly spaced
MAX_UNITS = 256  # of a layer, evenly spaced
MAX_SIDE = 512  # shorter side of a weight matrix that is decomposed


def condition_infinity(matrix: Tensor) -> float:
    """‖Z‖_∞ ‖Z⁺‖_∞, the condition number of Oyedotun et al. 2020, Fig. 5."""
    z = matrix.double()
    inverse = torch.linalg.pinv(z)
    return float(torch.linalg.matrix_norm(z, math.inf) * torch.linalg.matrix_norm(inverse, math.inf))


def gram_condition(gram: Tensor) -> float:
    """κ(H) from HᵀH, whose eigenvalues are the squared singular values; inf if HᵀH is singular within rounding."""
    values = torch.linalg.eigvalsh(gram)
    smallest = torch.finfo(gram.dtype).eps * len(gram) * values[-1]
    return math.sqrt((values[-1] / values[0]).item()) if values[0] > smallest else math.inf


def effective_rank(covariance: Tensor) -> float:
    """exp of the entropy of the normalised eigenvalues: n for n independent units of equal variance, 1 for copies."""
    values = torch.linalg.eigvalsh(covariance).clamp_min(0)
    p = values / values.sum()
    return torch.exp(torch.special.entr(p).sum()).item() if values.sum() > 0 else math.nan


def collinearity(covariance: Tensor) -> float:
    """The mean absolute correlation of two different units, leaving out constant ones."""
    deviation = covariance.diagonal().clamp_min(0).sqrt()
    alive = deviation > 1e-7 * deviation.amax()
    count = int(alive.sum())
    if count < 2:
        return math.nan
    live = covariance[alive][:, alive] / torch.outer(deviation[alive], deviation[alive])
    return ((live.abs().sum() - count) / (count * (count - 1))).clamp(0, 1).item()


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> dict[str, float] | None:
    h = layer.by_unit(y, MAX_OBSERVATIONS).double()
    h = h[:, evenly_spaced(h.shape[1], MAX_UNITS, h.device)]
    if min(h.shape) < 2 or not bool(h.isfinite().all()):
        return None
    # Scaled to a largest entry of 1, because the squares of an exploding layer overflow.
    h = h / h.abs().amax().clamp_min(1e-300)
    centred = h - h.mean(0)
    covariance = centred.T @ centred / len(h)
    # With fewer observations than units HᵀH is always singular, and κ is that of HHᵀ.
    gram = h @ h.T if len(h) < h.shape[1] else h.T @ h
    return {
        "activation_condition": gram_condition(gram / len(h)),
        "effective_rank": effective_rank(covariance) / min(h.shape),
        "collinearity": collinearity(covariance),
    }


def report(probe: Probe) -> Findings:
    notes = []
    for layer, weight in probe.weights().items():
        matrix = weight.flatten(1)
        small = min(matrix.shape) <= MAX_SIDE
        if not small:
            notes.append(f"The condition number of {layer.name!r} is left out: its weight is {tuple(matrix.shape)}.")
        usable = small and bool(matrix.isfinite().all())
        layer.values["weight_condition"] = condition_number(matrix.double().cpu().numpy()) if usable else math.nan

    def known(name: str) -> list[float]:
        return [value for layer, value in probe.values(name).items() if layer.trunk and not math.isnan(value)]

    numbers = {
        "collinearity": max(known("collinearity"), default=math.nan),
        "effective_rank": min(known("effective_rank"), default=math.nan),
    }
    return Findings(numbers=numbers, notes=tuple(notes))


FAMILY = Family(name="singularity", measures=measures_of("singularity"), forward=forward, report=report)
