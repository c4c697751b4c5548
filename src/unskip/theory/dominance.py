"""Dominant gradient flow at initialisation (Yu and Tomasi 2019, arXiv:1905.10944, D.4.1 and E).

σ^(l) is the fraction of units i of layer l whose gradient comes more from unit i of the last layer L than from all
other units together. The model: L - l layers Kᵀ S with n units, S a diagonal of independent Bernoulli(p), V one of
N(0, σ_V²); K = I + ε A in residual networks and K = A in plain ones, A of N(0, σ_A²).
"""

import math
from typing import Literal

import numpy as np

from unskip.theory.checks import at_least, one_of, positive, probability

Form = Literal["derived", "concluded", "corrected"]


def probability_larger(r: float) -> float:
    """``P(|X| > |Y|)`` = (2/π) arctan r, r = σ_X / σ_Y, for independent normal X and Y of mean 0 (Eq. 14, closed)."""
    if not r >= 0:
        raise ValueError(f"probability_larger: r={r} must be at least 0, a ratio of standard deviations.")
    return 2 / math.pi * math.atan(r)


def probability_larger_logistic(r: float, c: float = 1.2) -> float:
    """The paper's approximation of `probability_larger`, 1 / (1 + r^-c) (Eq. 15); its error is at most 0.0082."""
    if not r >= 0:
        raise ValueError(f"probability_larger_logistic: r={r} must be at least 0, a ratio of standard deviations.")
    return 1 / (1 + r**-c) if r > 0 else 0.0


def dominance_ratio(n: int, *, hops: int, p: float, epsilon: float, sigma_A: float, form: Form = "derived") -> float:
    """r, the ratio of the standard deviations of Θ_ii and of R_i = Σ_{j≠i} Θ_ij in residual networks::

        r² = (1 + ε² (L - l) σ_A²) / (ε² (n - 1) p' σ_A²)

    Args:
        hops: L - l.
        form: `derived` is Eq. 11, p' = Σ_k p^{2k} for k = 1 to L - l. `concluded` is the paper's "in conclusion", with
            L - l in place of p'. `corrected` has p' = Σ_k p^k: the product of a Bernoulli and a normal variable has
            variance p σ_A², not p² σ_A² as in the paper.
    """
    at_least("dominance_ratio", 2, n=n)
    at_least("dominance_ratio", 1, hops=hops)
    probability("dominance_ratio", p=p)
    positive("dominance_ratio", epsilon=epsilon, sigma_A=sigma_A)
    power = {"derived": 2, "corrected": 1, "concluded": 0}
    one_of("dominance_ratio", tuple(power), form=form)
    p_prime = sum(p ** (power[form] * k) for k in range(1, hops + 1))
    noise = (epsilon * sigma_A) ** 2
    return math.sqrt((1 + noise * hops) / (noise * (n - 1) * p_prime)) if p_prime > 0 else math.inf


def expected_dominance_residual(
    n: int, *, hops: int, p: float, epsilon: float, sigma_A: float, form: Form = "derived", logistic: bool = False
) -> float:
    """E[σ^(l)] of residual networks to first order in ε: p^(L-l) times ``P(|X| > |Y|)``, Eq. 9 to 11.

    Args:
        logistic: use the paper's approximation (Eq. 15) instead of the closed form.
    """
    r = dominance_ratio(n, hops=hops, p=p, epsilon=epsilon, sigma_A=sigma_A, form=form)
    return p**hops * (probability_larger_logistic(r) if logistic else probability_larger(r))


def expected_dominance_plain(n: int, *, hops: int, p: float) -> float:
    """E[σ^(l)] of plain networks, exactly. The paper only simulates it.

    Given the layers between, row i of Θ is a_j S_j V_j times one common factor, a_j and V_j normal. If m other units of
    the last layer are on, ``|a_i V_i|`` exceeds ``|Σ a_j V_j|`` with probability (2/π) E[θ], θ of density ~ cos^{m-1} θ
    on 0 to π/2. So::

        E[σ] = p Σ_m Binomial(m; n - 1, p) (2/π) E_m[θ] · (1 - (1 - p)^n)^(L-l-1)

    The last factor is the probability that no layer between is entirely off. Apart from it, σ_A, σ_V and depth do not
    matter.
    """
    at_least("expected_dominance_plain", 2, n=n)
    at_least("expected_dominance_plain", 1, hops=hops)
    probability("expected_dominance_plain", p=p)
    node, weight = np.polynomial.legendre.leggauss(400)
    theta = (node + 1) * math.pi / 4
    total = (1 - p) ** (n - 1)  # no other unit is on
    for m in range(1, n):
        density = weight * np.cos(theta) ** (m - 1)
        total += binomial(m, n - 1, p) * 2 / math.pi * float(density @ theta / density.sum())
    return p * total * (1 - (1 - p) ** n) ** (hops - 1)


def binomial(m: int, n: int, p: float) -> float:
    """The probability that m of n independent Bernoulli(p) are 1, by logarithms, because the coefficient overflows."""
    if p in (0, 1):
        return float(m == n * p)
    choose = math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1)
    return math.exp(choose + m * math.log(p) + (n - m) * math.log1p(-p))
