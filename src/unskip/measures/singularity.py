"""Singularity: do the units of a layer still differ from each other (Oyedotun et al. 2020, ICPR, section V.B)?"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import About, Findings
from unskip.theory import condition_number

NAN = float("nan")
OBSERVATIONS = 4096  # at most; evenly spread over samples and positions
UNITS = 256  # at most; evenly spread over the layer
LARGEST = 512  # smaller side of the largest weight that is decomposed

CONDITION = About(
    name="activation_condition",
    title="Condition number of the activations",
    label="κ(H), largest over smallest singular value",
    log=True,
    healthy="Level with depth. Where it rises steeply, units become copies of each other, and training is unstable.",
    source="Oyedotun et al. 2020, section V.B, Definition 1 and Proposition 1",
)
RANK = About(
    name="effective_rank",
    title="How many different things a layer says",
    label="effective rank of the units, as a share of their number",
    healthy="Level with depth. Towards 0, all units respond in the same manner.",
    source="Oyedotun et al. 2020, section V.B",
)
COLLINEARITY = About(
    name="collinearity",
    title="Units that say the same",
    label="mean absolute correlation of two units",
    healthy="Low and level; towards 1 the units are collinear.",
    source="Oyedotun et al. 2020, section V.B",
)
WEIGHTS = About(
    name="weight_condition",
    title="Condition number of the weights",
    label="κ(W), largest over smallest singular value",
    log=True,
    healthy="Moderate, up to a few hundreds, and alike in all layers.",
    source="Oyedotun et al. 2020, section VI.A, Fig. 5",
)


class Singularity(NamedTuple):
    """What is kept of the units of one layer."""

    condition: float
    rank: float
    collinearity: float


def condition_infinity(matrix: Tensor) -> float:
    """‖Z‖_∞ ‖Z⁺‖_∞, the condition number by which Oyedotun et al. 2020 draws its Fig. 5."""
    z = matrix.double()
    return (torch.linalg.matrix_norm(z, math.inf) * torch.linalg.matrix_norm(torch.linalg.pinv(z), math.inf)).item()


def gram_condition(gram: Tensor) -> float:
    """κ(H) from HᵀH, whose eigenvalues are the squared singular values; infinite beyond what they resolve."""
    values = torch.linalg.eigvalsh(gram)
    smallest = torch.finfo(gram.dtype).eps * len(gram) * values[-1]
    return math.sqrt((values[-1] / values[0]).item()) if values[0] > smallest else math.inf


def effective_rank(covariance: Tensor) -> float:
    """exp of the entropy of the normalised eigenvalues: n for n independent units of equal variance, 1 for copies."""
    values = torch.linalg.eigvalsh(covariance).clamp_min(0)
    total = values.sum()
    if not total > 0:
        return NAN
    p = values / total
    return torch.exp(-torch.special.xlogy(p, p).sum()).item()


def collinearity(covariance: Tensor) -> float:
    """The mean absolute correlation of two different units, of those that vary at all."""
    deviation = covariance.diagonal().clamp_min(0).sqrt()
    alive = deviation > 1e-7 * deviation.amax()
    count = int(alive.sum())
    if count < 2:
        return NAN
    live = covariance[alive][:, alive] / torch.outer(deviation[alive], deviation[alive])
    return ((live.abs().sum() - count) / (count * (count - 1))).clamp(0, 1).item()


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> Singularity | None:
    h = layer.by_unit(y, OBSERVATIONS).double()
    if h.shape[1] < 2 or h.shape[0] < 2:
        return None
    if h.shape[1] > UNITS:
        h = h[:, torch.linspace(0, h.shape[1] - 1, UNITS, dtype=torch.float64, device=h.device).long()]
    if not bool(h.isfinite().all()):
        return None
    # Scaled to a largest entry of 1, since the squares of an exploding layer overflow.
    h = h / h.abs().amax().clamp_min(1e-300)
    gram = h.T @ h / len(h)
    centred = h - h.mean(0)
    covariance = centred.T @ centred / len(h)
    fewer = len(h) < h.shape[1]  # then HᵀH is singular whatever the units do, and κ is that of HHᵀ
    return Singularity(
        condition=gram_condition(h @ h.T / len(h) if fewer else gram),
        rank=effective_rank(covariance) / min(h.shape),
        collinearity=collinearity(covariance),
    )


def report(probe: Probe) -> Findings:
    seen = [(layer.name, layer.kept["singularity"]) for layer in probe.layers if layer.kept["singularity"] is not None]
    names = [name for name, _ in seen]
    weighty = [layer for layer in probe.layers if layer.weight is not None and layer.call == 0]
    conditions, notes = [], []
    for layer in weighty:
        assert layer.weight is not None
        matrix = layer.weight.flatten(1)
        if min(matrix.shape) > LARGEST:
            notes.append(f"The condition number of {layer.name!r} is left out: its weight is {tuple(matrix.shape)}.")
        usable = min(matrix.shape) <= LARGEST and bool(matrix.isfinite().all())
        conditions.append(condition_number(matrix.double().cpu().numpy()) if usable else NAN)
    trunk = [layer.kept["singularity"] for layer in probe.layers if layer.trunk and layer.kept["singularity"]]
    return Findings(
        series=(
            CONDITION.series(names, (kept.condition for _, kept in seen)),
            RANK.series(names, (kept.rank for _, kept in seen)),
            COLLINEARITY.series(names, (kept.collinearity for _, kept in seen)),
            WEIGHTS.series((layer.name for layer in weighty), conditions),
        ),
        numbers={
            "collinearity": max(
                (kept.collinearity for kept in trunk if not math.isnan(kept.collinearity)), default=NAN
            ),
            "effective_rank": min((kept.rank for kept in trunk if not math.isnan(kept.rank)), default=NAN),
        },
        notes=tuple(notes),
    )


FAMILY = Family(name="singularity", report=report, forward=forward)
