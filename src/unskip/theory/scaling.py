"""Scaling ratios: how an operator changes the variance of signals and gradients.

Hu, github.com/hukkai/no-residual-network, 3, 4.1, A, C.1.

R_f = Var[y] / Var[x] going forward, R_b = Var[∂ℓ/∂x] / Var[∂ℓ/∂y] going back (Definition 3.1). If BatchNorm or
initialisation keeps the forward signal at its size, gradients grow by R_b / R_f at each operator.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from unskip.theory.checks import at_least, positive
from unskip.theory.normal import Activation, activation_moments, variance_of_maximum


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The two ratios of an operator. Operators in sequence multiply: `linear(w) * activation(g)`."""

    forward: float  # R_f
    backward: float  # R_b

    @property
    def growth(self) -> float:
        """R_b / R_f: the growth of the gradients' variance if the signals' variance is kept."""
        return self.backward / self.forward

    def __mul__(self, then: Self) -> "Scaling":
        return Scaling(forward=self.forward * then.forward, backward=self.backward * then.backward)


def linear(weight: ArrayLike) -> Scaling:
    """Proposition 3.4: R_f = ‖W‖²_F / D and R_b = ‖W‖²_F / d for W of shape (D, d), inputs independent."""
    w = np.asarray(weight, dtype=np.float64)
    if w.ndim != 2 or w.size == 0:
        raise ValueError(f"linear: weight of shape {w.shape} must be a matrix (D, d) of outputs by inputs.")
    square = float((w**2).sum())
    return Scaling(forward=square / w.shape[0], backward=square / w.shape[1])


def batch_norm(variance: float, batch: int | None = None) -> Scaling:
    """Proposition 3.8: R_f = 1/σ², R_b = (1 - 1/(B - 1)) / σ² in expectation, over B examples.

    The printed formula has 1/B. BatchNorm removes the part of the gradient along the normalised signal, a fraction of
    1/(B - 1) for exchangeable gradients (docs/errata.md). `batch=None` is the limit of a large batch.
    """
    positive("batch_norm", variance=variance)
    if batch is not None:
        at_least("batch_norm", 3, batch=batch)
    lost = 0.0 if batch is None else 1 / (batch - 1)  # fraction of the gradient
    return Scaling(forward=1 / variance, backward=(1 - lost) / variance)


def activation(g: Activation, *, mean: float = 0.0, variance: float = 1.0) -> Scaling:
    """R_f = Var[g(X)] / Var[X], R_b = E[g'(X)²] for X ~ N(mean, variance) (section 3.1).

    R_b ≥ R_f, with equality only for affine g (Chernoff; Proposition 3.12). ReLU: ½ (1 - 1/π) and ½.
    """
    moments = activation_moments(g, mean=mean, variance=variance)
    return Scaling(forward=moments.variance / variance, backward=moments.slope_square)


def growth_rate(g: Activation) -> float:
    """r(σ) = E[σ'(X)²] / Var[σ(X)], X ~ N(0, 1) (Eq. 1, with the square inside the expectation as its text uses it).

    In a plain network with BatchNorm, the variance of gradients grows by r per layer and their norm by √r:
    1.072 for SELU, 1.178 for Tanh, π / (π - 1) = 1.467 for ReLU.
    """
    return activation(g).growth


def max_pool(window: int) -> Scaling:
    """Max-pooling of `window` independent N(0, 1) (C.1): R_b = 1/window; R_f is 0.492 for 2 x 2 pixels."""
    at_least("max_pool", 1, window=window)
    return Scaling(forward=variance_of_maximum(window), backward=1 / window)


def residual(branch: Scaling, *, scale: float = 1.0) -> Scaling:
    """Proposition 3.17: y = x + scale · F(x) has R = 1 + scale² R(F), forward and backward.

    The 1/√L initialisation is scale = 1/√L. Without it (C.3), growth is (1 + R_b) / (1 + R_f), less than the branch's.
    """
    at_least("residual", 0, scale=scale)
    return Scaling(forward=1 + scale**2 * branch.forward, backward=1 + scale**2 * branch.backward)


def two_layer(k: float, *, tied: bool, d: int | None = None, gain: float = 2.0) -> Scaling:
    """Proposition 4.1: h(x) = Mᵀ ReLU(W x) and, tied, g(x) = Wᵀ ReLU(W x), W and M of shape (D, d), k = D/d::

        untied  R_f = (2/k)(1 - 1/π)          R_b = 2/k
        tied    R_f = 1 + (2/k)(1 - 1/π)      R_b = 1 + 2/k

    for weights of N(0, 2/D). (The text above the proposition says 1/D, which makes all four a quarter of this.)

    Args:
        d: width of the input. If given, tied ratios are exact expectations over W, including terms in 1/D.
        gain: weights are N(0, gain/D).
    """
    positive("two_layer", k=k, gain=gain)
    both = (gain / 2) ** 2
    kept = 1 - 1 / math.pi
    if not tied:
        return Scaling(forward=both * 2 / k * kept, backward=both * 2 / k)
    if d is None:
        return Scaling(forward=both * (1 + 2 / k * kept), backward=both * (1 + 2 / k))
    at_least("two_layer", 1, d=d)
    D = k * d
    backward = 1 + (2 * d + 3) / D
    return Scaling(forward=both * (backward - 2 / math.pi * (d + 2) / D), backward=both * backward)


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """The limit of a wide plain network without normalisation."""

    variance: float  # q, of the pre-activations over units
    growth: float  # χ, of the gradients' variance from a layer to the one before it


def unnormalised(g: Activation, *, gain: float, layers: int = 10_000) -> FixedPoint:
    """A plain network without BatchNorm, weights N(0, gain/d): q = gain E[g(√q Z)²], then χ = gain E[g'(√q Z)²].

    The forward signal keeps its mean here, so r(σ) does not apply: ReLU with He's gain of 2 has χ = 1, and gradients do
    not grow at all (docs/errata.md). Tanh with 2 has 1.106 and SELU with 1 has 1.072.
    """
    positive("unnormalised", gain=gain)
    q = 1.0
    for _ in range(layers):
        before, q = q, gain * activation_moments(g, variance=q).square
        if not 1e-30 < q < 1e30:
            raise ValueError(
                f"unnormalised: with gain={gain} the signal of {g!r} {'vanishes' if q < 1 else 'explodes'} and has no "
                "fixed point. Choose another gain."
            )
        if abs(q - before) <= 1e-12 * q:
            break
    return FixedPoint(variance=q, growth=gain * activation_moments(g, variance=q).slope_square)
