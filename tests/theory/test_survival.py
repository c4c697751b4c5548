"""Surviving neurons (Zhang et al. 2024, section 3.1) against random two-layer blocks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.theory.monte_carlo import assert_mean
from unskip.theory import (
    activation_cosine,
    collapsing_depth,
    linear_fidelity,
    minimum_collapsing_depth,
    relu_cosine,
    response,
    survival_bound,
    surviving_fraction,
    unit_statistics,
)

WIDTH = 256
SCALES = [(0.0, 1.0), (1.0, 1.0), (1.0, 0.1)]


def responses(mu: float, sigma: float, *, blocks: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs x and responses before the last ReLU of plain blocks, (blocks, inputs, units), weights He-normal."""
    rng = np.random.default_rng(seed)
    xs, ys = [], []
    for _ in range(blocks):
        x = mu + sigma * rng.standard_normal((inputs, WIDTH))
        w1, w2 = rng.standard_normal((2, WIDTH, WIDTH)) * math.sqrt(2 / WIDTH)
        xs.append(x)
        ys.append(np.maximum(x @ w1, 0) @ w2)
    return np.stack(xs), np.stack(ys)


@pytest.mark.parametrize(("mu", "sigma"), SCALES)
def test_mean_variance_and_survival_over_units_and_inputs(mu: float, sigma: float) -> None:
    x, plain = responses(mu, sigma, blocks=150, inputs=2)
    for residual, y in ((False, plain), (True, plain + x)):
        exact = response(mu, sigma, residual=residual)
        assert_mean(y.mean((1, 2)), exact.mean)
        assert_mean(((y - exact.mean) ** 2).mean((1, 2)), exact.variance)
        assert_mean((y > 0).mean((1, 2)), surviving_fraction(mu, sigma, residual=residual))


@pytest.mark.parametrize(("mu", "sigma"), SCALES)
def test_a_unit_with_fixed_weights_has_its_own_mean(mu: float, sigma: float) -> None:
    _, y = responses(mu, sigma, blocks=40, inputs=128)
    spread, variance = unit_statistics(mu, sigma)
    # The mean over 128 inputs has a variance of its own, which is no spread of units.
    assert_mean((y.mean(1) ** 2 - y.var(1, ddof=1) / 128).mean(1), spread**2, slack=0.02 * spread**2)
    assert_mean(y.var(1, ddof=1).mean(1), variance, slack=0.02 * variance)


def test_the_printed_variance_is_that_of_a_unit_when_inputs_hardly_differ() -> None:
    _, variance = unit_statistics(1.0, 0.001)
    assert variance == pytest.approx(response(1.0, 0.001, residual=False, reading="printed").variance, rel=0.01)
    assert response(1.0, 0.001, residual=False).variance > 1e5 * variance


def test_cosine_map_is_that_of_a_wide_layer() -> None:
    rng = np.random.default_rng(0)
    for c in (-0.5, 0.0, 0.6, 0.95):
        z = rng.standard_normal((400_000, 2)) @ np.linalg.cholesky([[1, c], [c, 1]]).T
        h = np.maximum(z, 0)
        assert_mean(2 * h[:, 0] * h[:, 1], relu_cosine(c))
    assert relu_cosine(1.0) == 1.0
    assert relu_cosine(-1.0) == pytest.approx(0, abs=1e-12)


SLOPES = np.linspace(0.05, 0.6, 8)
ACTIVATIONS = {
    "relu": (F.relu, 0.0),
    "lrelu": (lambda z: F.leaky_relu(z, 0.3), 0.3),
    "prelu": (lambda z: torch.where(z > 0, z, torch.tensor(SLOPES).repeat(len(z) // 8)[:, None] * z), SLOPES.tolist()),
    "gelu": (F.gelu, None),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_cosine_and_fidelity_of_other_activations(name: str) -> None:
    g, slope = ACTIVATIONS[name]
    rng = np.random.default_rng(1)
    for c in (-0.5, 0.6, 0.95):
        z = torch.from_numpy(rng.standard_normal((160_000, 2)) @ np.linalg.cholesky([[1, c], [c, 1]]).T)
        a, b = g(z).T.numpy()
        square = (a**2).mean()
        if slope is not None:
            assert_mean(a * b / square, relu_cosine(c, slope=slope), slack=2e-3)
        if name != "prelu":
            assert_mean(a * b / square, activation_cosine(g, c), slack=2e-3)
        if slope is not None and name != "prelu":
            assert activation_cosine(g, c) == pytest.approx(relu_cosine(c, slope=slope), abs=2e-6)
    if name != "prelu":
        measured = np.corrcoef(z[:, 0].numpy(), a)[0, 1] ** 2
        assert linear_fidelity(g) == pytest.approx(measured, abs=5e-3)
        assert activation_cosine(g, 1.0) == pytest.approx(1)


def test_the_fidelity_of_relus_is_the_formula() -> None:
    for a in (0.0, 0.3):
        formula = ((1 + a) / 2) ** 2 / ((1 + a * a) / 2 - (1 - a) ** 2 / (2 * math.pi))
        assert linear_fidelity(lambda z, a=a: F.leaky_relu(z, a)) == pytest.approx(formula, rel=1e-9)
    assert linear_fidelity(torch.nn.Identity(), variance=3.0) == pytest.approx(1)


def test_a_leaky_block_lets_more_through() -> None:
    rng = np.random.default_rng(2)
    shares = []
    for _ in range(40):
        x = 1.0 + 0.1 * rng.standard_normal((4, WIDTH))
        w1, w2 = rng.standard_normal((2, WIDTH, WIDTH)) * math.sqrt(2 / (1 + 0.3**2) / WIDTH)
        z = x @ w1
        shares.append((np.where(z > 0, z, 0.3 * z) @ w2 + x > 0).mean())
    assert_mean(np.array(shares), surviving_fraction(1.0, 0.1, residual=True, slope=0.3))
    assert surviving_fraction(1.0, 0.0, residual=True, slope=0.3) > surviving_fraction(1.0, 0.0, residual=True)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("mu", "sigma"), SCALES)
def test_the_exact_reading_bounds_what_is_measured(mu: float, sigma: float, residual: bool) -> None:
    x, y = responses(mu, sigma, blocks=40, inputs=8)
    y = y + x if residual else y
    for delta in (0.0, 0.1 * sigma, sigma):
        assert (y > -delta).mean() >= survival_bound(mu, sigma, delta, residual=residual, reading="exact")


def test_printed_and_corrected_constants_are_no_bound_when_inputs_hardly_differ() -> None:
    x, y = responses(1.0, 0.1, blocks=40, inputs=8)
    share = (y + x > 0).mean()
    for reading in ("printed", "corrected"):
        assert survival_bound(1.0, 0.1, 0.0, residual=True, reading=reading) > share + 0.1
    assert share == pytest.approx(0.76, abs=0.01)


def test_bound_of_each_reading() -> None:
    # The paper's fractions, written out: δ²/(4σ²+δ²), (μ+δ)²/(9σ²+(μ+δ)²), and with μ_y.
    assert survival_bound(1, 0.5, 0.1, residual=False) == pytest.approx(0.01 / 1.01)
    assert survival_bound(1, 0.5, 0.1, residual=True) == pytest.approx(1.21 / (9 / 4 + 1.21))
    assert survival_bound(1, 0.5, 0.1, residual=False, mu_y=0.2) == pytest.approx(0.09 / 1.09)
    assert survival_bound(1, 0.5, 0.1, residual=True, mu_y=0.2) == pytest.approx(1.69 / (9 / 4 + 1.69))
    assert survival_bound(1, 0.5, 0.1, residual=False, reading="corrected") == pytest.approx(0.01 / 0.51)
    assert survival_bound(1, 0.5, 0.1, residual=True, reading="corrected") == pytest.approx(1.21 / (3 / 4 + 1.21))


def test_depths_of_equations_2_and_3() -> None:
    mu, sigma, delta, eps = 1.0, 0.3, 0.05, 0.01
    for residual, ratio in ((False, 2 * sigma / delta), (True, 3 * sigma / (mu + delta))):
        printed = math.ceil(math.log(1 / eps) / math.log(1 + ratio**2))
        assert minimum_collapsing_depth(mu, sigma, delta, eps, residual=residual) == printed
        deeper = minimum_collapsing_depth(mu, sigma, delta, eps, residual=residual, reading="corrected")
        assert deeper >= printed


@given(st.floats(0.01, 0.99), st.floats(1e-6, 0.9))
def test_depth_is_the_least_that_collapses(share: float, epsilon: float) -> None:
    n = collapsing_depth(share, epsilon)
    assert share**n <= epsilon * (1 + 1e-6)
    assert share ** (n - 1) > epsilon * (1 - 1e-6)


def test_half_of_the_units_are_on_at_every_depth() -> None:
    """Survival does not multiply over layers, as Eq. 15 assumes."""
    rng = np.random.default_rng(0)
    h = np.abs(rng.standard_normal((64, WIDTH)))
    shares = []
    for _ in range(20):
        y = h @ (rng.standard_normal((WIDTH, WIDTH)) * math.sqrt(2 / WIDTH))
        shares.append((y > 0).mean())
        h = np.maximum(y, 0)
    assert min(shares) > 0.35
    assert np.mean(shares) == pytest.approx(0.5, abs=0.05)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="reading='right' must be one of"):
        survival_bound(1, 1, 0.1, residual=True, reading="right")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sigma_x=-1 must be finite and above 0"):
        survival_bound(1, -1, 0.1, residual=True)
    with pytest.raises(ValueError, match="exclusive"):
        collapsing_depth(1.0, 0.1)
    with pytest.raises(ValueError, match=r"c=1\.5 must be a cosine"):
        relu_cosine(1.5)
