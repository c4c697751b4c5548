"""Singularity: whether the units of a layer still differ (Oyedotun et al. 2020, ICPR, section V.B)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unskip.measures.probe import Family, Layer, Probe, evenly_spaced
from unskip.measures.series import Findings, Measure, Series
from unskip.theory import condition_number

MAX_OBSERVATIONS = 4096  # samples and positions, evenly spaced
MAX_UNITS = 256  # of a layer, evenly spaced
MAX_SIDE = 512  # shorter side of a weight matrix that is decomposed

ACTIVATION_MEASURES = {  # field of UnitStats: measure
    "condition": Measure(
        name="activation_condition",
        title="Condition number of the activations",
        label="κ(H), largest over smallest singular value",
        log=True,
        healthy="Level with depth. A steep rise means that units become copies of each other and training is unstable.",
        source="Oyedotun et al. 2020, section V.B, Definition 1 and Proposition 1",
    ),
    "rank": Measure(
        name="effective_rank",
        title="Effective rank of the activations",
        label="effective rank of the units, as a fraction of their number",
        healthy="Level with depth. Towards 0, all units respond in the same way.",
        source="Oyedotun et al. 2020, section V.B",
    ),
    "collinearity": Measure(
        name="collinearity",
        title="Correlation of the units",
        label="mean absolute correlation of two units",
        healthy="Low and level. Towards 1, the units are collinear.",
        source="Oyedotun et al. 2020, section V.B",
    ),
}
WEIGHTS = Measure(
    name="weight_condition",
    title="Condition number of the weights",
    label="κ(W), largest over smallest singular value",
    log=True,
    healthy="Moderate, up to a few hundred, and similar in all layers.",
    source="Oyedotun et al. 2020, section VI.A, Fig. 5",
)


class UnitStats(NamedTuple):
    """How much the units of one layer differ."""

    condition: float
    rank: float
    collinearity: float


def condition_infinity(matrix: Tensor) -> float:
    """‖Z‖_∞ ‖Z⁺‖_∞, the condition number of Oyedotun et al. 2020, Fig. 5."""
    z = matrix.double()
    return (torch.linalg.matrix_norm(z, math.inf) * torch.linalg.matrix_norm(torch.linalg.pinv(z), math.inf)).item()


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


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> UnitStats | None:
    h = layer.by_unit(y, MAX_OBSERVATIONS).double()
    if h.shape[1] < 2 or h.shape[0] < 2:
        return None
    h = h[:, evenly_spaced(h.shape[1], MAX_UNITS, h.device)]
    if not bool(h.isfinite().all()):
        return None
    # Scaled to a largest entry of 1, because the squares of an exploding layer overflow.
    h = h / h.abs().amax().clamp_min(1e-300)
    centred = h - h.mean(0)
    covariance = centred.T @ centred / len(h)
    # With fewer observations than units HᵀH is always singular, and κ is that of HHᵀ.
    gram = h @ h.T if len(h) < h.shape[1] else h.T @ h
    return UnitStats(
        condition=gram_condition(gram / len(h)),
        rank=effective_rank(covariance) / min(h.shape),
        collinearity=collinearity(covariance),
    )


def report(probe: Probe) -> Findings:
    stats = probe.stats("singularity")
    conditions, notes = {}, []
    for layer in probe.layers:
        if layer.weight is None or layer.call > 0:
            continue
        matrix = layer.weight.flatten(1)
        small = min(matrix.shape) <= MAX_SIDE
        if not small:
            notes.append(f"The condition number of {layer.name!r} is left out: its weight is {tuple(matrix.shape)}.")
        usable = small and bool(matrix.isfinite().all())
        conditions[layer] = condition_number(matrix.double().cpu().numpy()) if usable else math.nan
    trunk = [found for layer, found in stats.items() if layer.trunk]
    return Findings(
        series=(
            *(
                Series.of(measure, stats, [getattr(found, field) for found in stats.values()])
                for field, measure in ACTIVATION_MEASURES.items()
            ),
            Series.of(WEIGHTS, conditions, conditions.values()),
        ),
        numbers={
            "collinearity": max((f.collinearity for f in trunk if not math.isnan(f.collinearity)), default=math.nan),
            "effective_rank": min((f.rank for f in trunk if not math.isnan(f.rank)), default=math.nan),
        },
        notes=tuple(notes),
    )


FAMILY = Family(name="singularity", report=report, forward=forward)
