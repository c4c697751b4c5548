"""Surviving neurons, and the depth at which the bound on them reaches a given value.

Zhang et al. 2024, arXiv:2402.08645, section 3.1 and Appendix B.

The setting: inputs are non-negative with mean μ_x and variance σ_x², independent of each other, and the weights of two
layers, ReLU between them, are He-normal. There are three readings of Theorems 3.2 and 3.3 (docs/errata.md):

- `printed`: as in the paper, with 4 σ_x² and 9 σ_x² in the bound;
- `corrected`: Cantelli's inequality with the variances that Theorem 3.2 names, 2 σ_x² and 3 σ_x²;
- `exact`: Cantelli's inequality with the true variances over units and inputs, 2 (σ_x² + μ_x²) and 3 σ_x² + 2 μ_x².
  Only this is a bound for every μ_x.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from unskip.theory.checks import at_least, one_of, positive, probability
from unskip.theory.normal import Activation, activation_moments, quadrature

Reading = Literal["printed", "corrected", "exact"]
READINGS = ("printed", "corrected", "exact")


@dataclass(frozen=True, kw_only=True)
class Response:
    """Mean and variance of the input of a block's last ReLU."""

    mean: float
    variance: float


def response(mu_x: float, sigma_x: float, *, residual: bool, reading: Reading = "exact") -> Response:
    """Theorem 3.2: the response before the last ReLU, over units, weights and inputs.

    As printed (and `corrected`): mean 0 and variance 2 σ_x² in plain blocks, mean μ_x and variance 3 σ_x² in residual
    ones. That is the variance over inputs of a unit with fixed weights, if σ_x is far below μ_x. The means of units
    differ, with variance 2 μ_x², and the `exact` variance includes this: 2 (σ_x² + μ_x²) and 3 σ_x² + 2 μ_x².
    """
    at_least("response", 0, mu_x=mu_x, sigma_x=sigma_x)
    one_of("response", READINGS, reading=reading)
    learned = 2 * (sigma_x**2 + (mu_x**2 if reading == "exact" else 0.0))
    if residual:
        return Response(mean=mu_x, variance=learned + sigma_x**2)
    return Response(mean=0.0, variance=learned)


def relu_cosine(c: float, *, slope: float | Sequence[float] = 0.0) -> float:
    """The cosine of two inputs after one wide He-normal layer and ReLU, given their cosine c before it::

        κ(c) = c + q (√(1 - c²) - c arccos c) / π          q = E[(1 - a)²] / E[1 + a²]

    It grows towards 1 with each layer: without a path around the activation, all inputs become alike. LReLU slows that
    down by q: 1 for ReLU, 0.45 for a slope a of 0.3, 0 for a linear layer. The depth at which a given cosine close to 1
    is reached is proportional to 1/q.

    Args:
        slope: a, of LReLU; or the slopes of PReLU, one for each unit.
    """
    if not -1 <= c <= 1:
        raise ValueError(f"relu_cosine: c={c} must be a cosine, -1 to 1.")
    slopes = [float(slope)] if isinstance(slope, int | float) else [float(a) for a in slope]
    if not slopes or not all(map(math.isfinite, slopes)):
        raise ValueError(f"relu_cosine: slope={slope!r} must be a finite number, or one for each unit.")
    q = sum((1 - a) ** 2 for a in slopes) / sum(1 + a * a for a in slopes)
    return c + q * (math.sqrt(1 - c * c) - c * math.acos(c)) / math.pi


def activation_cosine(g: Activation, c: float, *, variance: float = 1.0) -> float:
    """The cosine of two inputs after one wide layer and any activation, given the cosine c of their responses::

        κ_g(c) = E[g(X) g(Y)] / E[g(X)²]          X, Y ~ N(0, variance) of correlation c

    By quadrature, to about six digits; `relu_cosine` is the closed form for ReLU, LReLU and PReLU.

    Args:
        g: an element-wise function of a float64 tensor, `torch.nn.GELU()` for instance.
        variance: of the responses. It matters for all activations but the positively homogeneous ReLU and LReLU.
    """
    if not -1 <= c <= 1:
        raise ValueError(f"activation_cosine: c={c} must be a cosine, -1 to 1.")
    x, w = map(torch.from_numpy, quadrature(0.0, variance))
    x, w = x[w > 1e-16], w[w > 1e-16]
    with torch.no_grad():
        first = g(x.clone())  # copies, so that in-place activations work
        if not isinstance(first, Tensor) or first.shape != x.shape:
            raise ValueError(f"activation_cosine: {g!r} is not element-wise: its output has another shape.")
        second = g(c * x[:, None] + math.sqrt(1 - c * c) * x) @ w  # E[g(Y) | X = x]
    return float(w @ (first * second)) / float(w @ first**2)


def linear_fidelity(g: Activation, *, variance: float = 1.0) -> float:
    """The share of an activation's variance that is linear in its input: the squared correlation of Z and g(Z)::

        ρ² = variance E[g'(Z)]² / Var[g(Z)]          Z ~ N(0, variance)

    The rest is what a linear map of one unit can't read back. ReLU: 0.733; LReLU of slope a:
    ((1 + a)/2)² / ((1 + a²)/2 - (1 - a)²/(2π)).
    """
    moments = activation_moments(g, variance=variance)
    return variance * moments.slope**2 / moments.variance


def unit_statistics(mu_x: float, sigma_x: float, *, layers: int = 2) -> tuple[float, float]:
    """For fixed weights: how far the means of units are from zero, and how much a unit varies over inputs.

    Returns the root mean square over units of a unit's mean, and the mean over units of its variance over inputs,
    before the ReLU of layer `layers` of a wide He-normal network. For one layer that is √2 μ_x and 2 σ_x²: unless μ_x
    is small compared with σ_x, a unit is on for all inputs or off for all inputs.
    """
    positive("unit_statistics", sigma_x=sigma_x, layers=layers)
    at_least("unit_statistics", 0, mu_x=mu_x)
    square = mu_x**2 + sigma_x**2  # E[x²], which He-normal layers with ReLU keep
    c = mu_x**2 / square  # of two independent inputs
    for _ in range(layers - 1):
        c = relu_cosine(c)
    return math.sqrt(2 * square * c), 2 * square * (1 - c)


def surviving_fraction(mu_x: float, sigma_x: float, *, residual: bool, slope: float = 0.0) -> float:
    """The fraction of responses above zero in wide blocks, which Theorem 3.3 bounds from below.

    ½ in plain blocks, by symmetry. In residual blocks Φ(μ_x / √(3 σ_x² + 2 μ_x²)), exact for normal inputs and close
    for others. For σ_x far below μ_x that is Φ(1/√2) = 0.760, for any μ_x.

    With LReLU of a negative `slope` a, He's gain is 2/(1 + a²) and takes the place of the 2: a residual block has a few
    more positive responses, Φ(√((1 + a²)/2)), and the others are scaled and not lost.
    """
    exact = response(mu_x, sigma_x, residual=residual)
    own = sigma_x**2 if residual else 0.0
    exact = Response(mean=exact.mean, variance=own + (exact.variance - own) / (1 + slope * slope))
    return NormalDist().cdf(exact.mean / math.sqrt(exact.variance)) if exact.variance > 0 else 0.5


def survival_bound(
    mu_x: float, sigma_x: float, delta: float, *, residual: bool, mu_y: float = 0.0, reading: Reading = "printed"
) -> float:
    """Theorem 3.3: the lower bound on the probability that a neuron survives ReLU, from Cantelli's inequality::

        (m + δ)² / (v + (m + δ)²)       m = μ_y in plain blocks, μ_x + μ_y in residual ones

    with v = 4 σ_x² (plain) or 9 σ_x² (residual) as printed; `reading` says which v. The inequality bounds
    P(response > -δ), which is survival only as δ → 0. In plain blocks with μ_y = 0, the bound goes to 0 there.

    Args:
        delta: δ, the precision of the bound, small compared with σ_x.
        mu_y: mean that covariate shift and biases add to the response (Remark in Appendix B).
    """
    at_least("survival_bound", 0, delta=delta)
    positive("survival_bound", sigma_x=sigma_x)
    one_of("survival_bound", READINGS, reading=reading)
    if not math.isfinite(mu_y):
        raise ValueError(f"survival_bound: mu_y={mu_y} must be finite.")
    if reading == "printed":
        at_least("survival_bound", 0, mu_x=mu_x)
        variance = (9 if residual else 4) * sigma_x**2
    else:
        variance = response(mu_x, sigma_x, residual=residual, reading=reading).variance
    reach = (mu_x if residual else 0.0) + mu_y + delta
    # Cantelli's inequality gives no lower bound if the mean is below zero.
    return reach**2 / (variance + reach**2) if reach > 0 else 0.0


def collapsing_depth(share: float, epsilon: float) -> int:
    """The least N with shareᴺ ≤ ε: ⌈ln(1/ε) / ln(1/share)⌉ (Eq. 15 and 16 solved for N)."""
    probability("collapsing_depth", share=share, epsilon=epsilon)
    if not 0 < share < 1 or not 0 < epsilon < 1:
        raise ValueError(
            f"collapsing_depth: share={share} and epsilon={epsilon} must be between 0 and 1, exclusive: at share 1 no "
            "depth collapses, at 0 the first layer does."
        )
    # Rounded, so that a rounding error does not add a layer if shareᴺ is ε.
    return math.ceil(round(math.log(epsilon) / math.log(share), 9))


def minimum_collapsing_depth(
    mu_x: float,
    sigma_x: float,
    delta: float,
    epsilon: float,
    *,
    residual: bool,
    mu_y: float = 0.0,
    reading: Reading = "printed",
) -> int:
    """Eq. 2 (plain) and Eq. 3 (residual): the depth N at which the bound of Theorem 3.3 to the power N reaches ε.

    A lower bound: up to this depth, a fraction ε of the neurons survives *if* layers are independent. They are not (in
    a plain He-normal network half of the units are on at every depth), so use it to compare two designs, not to predict
    a depth.
    """
    bound = survival_bound(mu_x, sigma_x, delta, residual=residual, mu_y=mu_y, reading=reading)
    return collapsing_depth(bound, epsilon)
