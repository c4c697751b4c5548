"""Dominant gradient flow (Yu and Tomasi 2019, D.4.1 and E) against random products of matrices."""

import math

import numpy as np
import pytest
import torch

from tests.theory.monte_carlo import assert_mean
from unskip.theory import (
    dominance_ratio,
    expected_dominance_plain,
    expected_dominance_residual,
    probability_larger,
    probability_larger_logistic,
)

COMMON = {"hops": 5, "p": 0.9, "epsilon": 0.1, "sigma_A": 0.01}  # the setting of Figure 11, with n = 20


def flows(
    n: int, *, hops: int, p: float, epsilon: float | None, sigma_A: float, trials: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Θ_ii, R_i = Σ_{j≠i} Θ_ij and whether unit i is on in all layers, (trials, n); epsilon None is a plain network."""
    rng = np.random.default_rng(seed)
    theta = np.broadcast_to(np.eye(n), (trials, n, n))
    on = np.ones((trials, n), bool)
    for _ in range(hops):
        A = sigma_A * rng.standard_normal((trials, n, n))
        K = A if epsilon is None else np.eye(n) + epsilon * A
        S = rng.random((trials, n)) < p
        on &= S
        theta = theta @ K * S[:, None, :]
    theta = theta * rng.standard_normal((trials, 1, n))
    own = np.einsum("tii->ti", theta)
    return own, theta.sum(2) - own, on


@pytest.mark.parametrize("r", [0.01, 0.5, 1.0, 3.0, 40.0])
def test_one_normal_is_larger_than_another(r: float) -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 200_000))
    assert_mean(np.abs(r * x) > np.abs(y), probability_larger(r))
    # Eq. 14 as it stands, by the trapezoidal rule.
    u = np.linspace(0, 10 * r + 10, 20_001)
    cdf = 0.5 * (1 + np.array([math.erf(v) for v in u / math.sqrt(2)]))
    density = np.exp(-0.5 * (u / r) ** 2) / (math.sqrt(2 * math.pi) * r)
    assert probability_larger(r) == pytest.approx(
        4 * torch.trapezoid(torch.from_numpy(density * cdf), torch.from_numpy(u)).item() - 1, abs=1e-4
    )


def test_the_logistic_approximation_is_off_by_less_than_a_hundredth() -> None:
    off = [abs(probability_larger(r) - probability_larger_logistic(r)) for r in np.logspace(-5, 5, 2001)]
    assert 0.008 < max(off) < 0.0082


@pytest.mark.parametrize("change", [{}, {"p": 0.6}, {"hops": 1}, {"hops": 9}, {"sigma_A": 0.1}], ids=str)
def test_residual_networks(change: dict[str, float]) -> None:
    setting = COMMON | change
    own, others, on = flows(20, **setting, trials=4000)
    larger = np.abs(own) > np.abs(others)
    expected = expected_dominance_residual(20, **setting)
    assert_mean(larger[on], expected / setting["p"] ** setting["hops"], slack=2e-3)  # given Z_i
    # A unit that is off somewhere counts as not dominated (Eq. 9). Where so many units are off that nothing is left of
    # the others either, it may be: 0.087 of units instead of 0.078 at p = 0.6.
    neglected = 0.012 if setting["p"] < 0.9 else 2e-3
    assert_mean(larger.mean(1), expected, slack=neglected)
    assert expected_dominance_residual(20, **setting, logistic=True) == pytest.approx(expected, abs=8.2e-3)


def test_the_spread_of_other_units_is_that_of_a_bernoulli_times_a_normal() -> None:
    """Var[R_i | Z_i] shows that p' is Σ p^k, not the printed Σ p^2k or L - l."""
    setting = {"hops": 5, "p": 0.6, "epsilon": 0.1, "sigma_A": 0.01}
    own, others, on = flows(20, **setting, trials=12_000)
    measured = own[on].std() / others[on].std()
    right = dominance_ratio(20, **setting, form="corrected")
    assert measured == pytest.approx(right, rel=0.05)
    for wrong in ("derived", "concluded"):
        assert abs(dominance_ratio(20, **setting, form=wrong) / right - 1) > 0.2


@pytest.mark.parametrize("change", [{}, {"p": 0.3}, {"p": 1.0}, {"hops": 1}, {"n": 4}, {"n": 30}], ids=str)
def test_plain_networks_exactly(change: dict[str, float]) -> None:
    setting = {"n": 20, "hops": 5, "p": 0.9} | change
    own, others, _ = flows(**setting, epsilon=None, sigma_A=0.3, trials=4000)  # type: ignore[arg-type]
    assert_mean((np.abs(own) > np.abs(others)).mean(1), expected_dominance_plain(**setting))  # type: ignore[arg-type]


def test_plain_networks_whose_layers_are_often_off() -> None:
    own, others, _ = flows(3, hops=6, p=0.4, epsilon=None, sigma_A=1.0, trials=40_000)
    assert_mean((np.abs(own) > np.abs(others)).mean(1), expected_dominance_plain(3, hops=6, p=0.4))


def test_extremes_and_wrong_arguments() -> None:
    assert expected_dominance_residual(20, hops=5, p=0.0, epsilon=0.1, sigma_A=0.01) == 0
    assert expected_dominance_plain(20, hops=5, p=0.0) == 0
    assert probability_larger(0.0) == probability_larger_logistic(0.0) == 0
    assert probability_larger(math.inf) == pytest.approx(1)
    with pytest.raises(ValueError, match="form='printed' must be one of"):
        dominance_ratio(20, **COMMON, form="printed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"p=1\.2 must be a probability"):
        expected_dominance_plain(20, hops=5, p=1.2)


def test_plain_networks_of_thousands_of_units() -> None:
    # E_m[θ] ~ sqrt(2 / (π m)) for large m, so that σ falls with the root of the width.
    wide, wider = (expected_dominance_plain(n, hops=3, p=0.5) for n in (1000, 4000))
    assert wide / wider == pytest.approx(2, rel=1e-3)
