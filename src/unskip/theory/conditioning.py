"""Conditioning: how much weights change if a representation changes.

Oyedotun et al. 2020, ICPR, section V.B, Proposition 1.

Layer weights W solve Y = W X for representations X of shape (n, N). If X changes to X + ΔX, the least-squares solution
changes by ΔW, and ‖ΔW‖ / ‖W‖ is bounded by κ(X) and η = ‖ΔX‖ / ‖X‖.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from unskip.theory.checks import at_least


def condition_number(x: ArrayLike) -> float:
    """κ(X) = σ_max / σ_min (Definition 1); inf if X is rank deficient within the rounding of float64."""
    matrix = np.asarray(x, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0 or not np.isfinite(matrix).all():
        raise ValueError(f"condition_number: x of shape {matrix.shape} must be a matrix of finite numbers.")
    values = np.linalg.svd(matrix, compute_uv=False)
    least = values[0] * max(matrix.shape) * np.finfo(np.float64).eps
    return float(values[0] / values[-1]) if values[-1] > least else math.inf


def relative_change_bound(kappa: float, eta: float, *, first_order: bool = False) -> float:
    """Proposition 1: ‖ΔW‖ / ‖W‖ ≤ κ η to first order (as printed); κ η / (1 - κ η) for any ΔX with κ η < 1, else inf.

    The printed form drops ΔW ΔX and does not hold for finite changes: at n = 1, X = 1 and ΔX = -½ the weight doubles, a
    change of 1, while the printed bound is ½. Norms are spectral for X, and any compatible norm for W.

    Args:
        kappa: κ(X), of X with full row rank.
        eta: ‖ΔX‖ / ‖X‖.
    """
    if not kappa >= 1:
        raise ValueError(f"relative_change_bound: kappa={kappa} must be at least 1, a condition number.")
    at_least("relative_change_bound", 0, eta=eta)
    change = kappa * eta if eta else 0.0  # κ may be infinite
    if first_order:
        return change
    return change / (1 - change) if change < 1 else math.inf
