"""Quadrature against closed forms and against sampling."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.theory.monte_carlo import assert_mean
from unskip.theory import activation_moments
from unskip.theory.normal import quadrature, variance_of_maximum


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (0.7, 2.0), (-3.0, 0.01), (40.0, 900.0)])
def test_relu_has_its_closed_form_for_any_normal(mean: float, variance: float) -> None:
    s = math.sqrt(variance)
    phi = math.exp(-0.5 * (mean / s) ** 2) / math.sqrt(2 * math.pi)
    above = 0.5 * math.erfc(-mean / s / math.sqrt(2))
    moments = activation_moments(nn.ReLU(), mean=mean, variance=variance)
    assert moments.mean == pytest.approx(mean * above + s * phi, rel=1e-11, abs=1e-14)
    assert moments.square == pytest.approx((mean**2 + variance) * above + mean * s * phi, rel=1e-11, abs=1e-14)
    assert moments.slope_square == moments.slope == pytest.approx(above, rel=1e-11, abs=1e-14)


@pytest.mark.parametrize(
    "g", [nn.GELU(), nn.SELU(), nn.Tanh(), nn.Hardswish(), nn.LeakyReLU(0.3), nn.ReLU6()], ids=repr
)
def test_moments_agree_with_sampling(g: nn.Module) -> None:
    x = (torch.randn(200_000, dtype=torch.float64) * math.sqrt(2) + 0.5).requires_grad_()
    y = g(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    moments = activation_moments(g, mean=0.5, variance=2.0)
    for samples, formula in (
        (y, moments.mean),
        (y**2, moments.square),
        (slope, moments.slope),
        (slope**2, moments.slope_square),
    ):
        assert_mean(samples.detach().numpy(), formula)


def test_an_in_place_activation_and_no_grad_give_the_same() -> None:
    with torch.no_grad():
        assert activation_moments(nn.ReLU(inplace=True)) == activation_moments(nn.ReLU())


def test_weights_sum_to_one() -> None:
    x, w = quadrature(5.0, 1e-4)
    assert w.sum() == pytest.approx(1, abs=1e-13)
    assert w @ x == pytest.approx(5, abs=1e-12)


MAXIMA = [(1, 1.0), (2, 1 - 1 / math.pi), (3, 1 + math.sqrt(3) / (2 * math.pi) - 9 / (4 * math.pi))]


@pytest.mark.parametrize(("k", "variance"), MAXIMA)
def test_maximum_of_normals(k: int, variance: float) -> None:
    assert variance_of_maximum(k) == pytest.approx(variance, abs=1e-12)
    largest = np.random.default_rng(0).standard_normal((200_000, k)).max(1)
    assert_mean((largest - largest.mean()) ** 2, variance_of_maximum(k))


def test_what_is_not_element_wise_is_refused() -> None:
    with pytest.raises(ValueError, match="not element-wise"):
        activation_moments(lambda x: x[:3])
    with pytest.raises(ValueError, match=r"variance=0\.0 must be finite and above 0"):
        activation_moments(nn.ReLU(), variance=0.0)
