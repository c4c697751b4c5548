"""Scaling ratios (Hu) against autograd on random operators."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.theory.monte_carlo import assert_mean
from unskip.theory import (
    Scaling,
    activation,
    batch_norm,
    growth_rate,
    linear,
    max_pool,
    residual,
    two_layer,
    unnormalised,
)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def back(y: Tensor, x: Tensor) -> Tensor:
    """The gradient at x for independent N(0, 1) gradients at y."""
    (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
    return gradient


@pytest.mark.parametrize(("g", "printed"), [(nn.SELU(), 1.072), (nn.Tanh(), 1.178), (nn.ReLU(), 1.467)], ids=repr)
def test_rates_that_the_paper_prints(g: nn.Module, printed: float) -> None:
    assert round(growth_rate(g), 3) == printed


def test_relu_in_closed_form() -> None:
    assert growth_rate(nn.ReLU()) == pytest.approx(math.pi / (math.pi - 1), rel=1e-12)
    assert activation(nn.ReLU(), variance=9.0).forward == pytest.approx((1 - 1 / math.pi) / 2, rel=1e-12)


@pytest.mark.parametrize("g", [nn.ReLU(), nn.GELU(), nn.SELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid()], ids=repr)
@pytest.mark.parametrize("mean", [-1.0, 0.0, 0.5])
def test_nonlinear_operators_scale_gradients_more(g: nn.Module, mean: float) -> None:
    assert activation(g, mean=mean, variance=1.7).growth > 1.001  # Proposition 3.12


def test_affine_operators_scale_both_alike() -> None:
    assert activation(lambda x: 3 * x - 1, mean=2.0, variance=5.0).growth == pytest.approx(1, abs=1e-12)


def test_linear_layer() -> None:
    W = normal(48, 32)
    x = normal(20_000, 32).requires_grad_()
    y = x @ W.T
    ratio = linear(W)
    assert_mean((y.detach() ** 2).mean(1), ratio.forward)
    assert_mean((back(y, x) ** 2).mean(1), ratio.backward)


@pytest.mark.parametrize("batch", [3, 4, 8, 64])
def test_batch_norm_loses_one_part_in_b_minus_1(batch: int) -> None:
    """Gradients of any distribution; ratio to their own variance in the batch, as the paper defines it."""
    units = 40_000
    x = (normal(batch, units) * 3 + 1).requires_grad_()
    y = F.batch_norm(x, None, None, training=True, eps=1e-12)
    given = torch.distributions.Exponential(torch.tensor(1.0, dtype=torch.float64)).sample(y.shape)
    (gradient,) = torch.autograd.grad(y, x, given)
    variance = x.detach().var(0, correction=0)
    ratio = gradient.var(0, correction=0) / given.var(0, correction=0) * variance
    assert_mean(ratio, batch_norm(1.0, batch).backward)
    if batch <= 8:
        printed = 1 - 1 / batch
        assert abs(ratio.mean() - printed) > 10 * ratio.std() / math.sqrt(units)
    assert batch_norm(4.0).forward == batch_norm(4.0).backward == 0.25


@pytest.mark.parametrize("g", [nn.ReLU(), nn.Tanh(), nn.GELU()], ids=repr)
def test_activation(g: nn.Module) -> None:
    x = (normal(200_000) * 1.5 + 0.3).requires_grad_()
    y = g(x)
    ratio = activation(g, mean=0.3, variance=2.25)
    out = y.detach()
    assert_mean((out - out.mean()) ** 2 / 2.25, ratio.forward)
    assert_mean(back(y, x) ** 2, ratio.backward)


def test_max_pool() -> None:
    x = normal(2_000, 1, 16, 16).requires_grad_()
    y = F.max_pool2d(x, 2)
    ratio = max_pool(4)
    assert round(ratio.forward, 3) == 0.492  # C.1
    out = y.detach()
    assert_mean(((out - out.mean()) ** 2).mean((1, 2, 3)), ratio.forward)
    assert_mean((back(y, x) ** 2).mean((1, 2, 3)), ratio.backward)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_residual_block(scale: float) -> None:
    d, ratios = 512, []
    branch = linear(torch.zeros(2, 2))
    for _ in range(30):
        W, M = normal(2, d, d) * math.sqrt(2 / d)
        x = normal(64, d).requires_grad_()
        y = x + scale * F.relu(x @ W.T) @ M.T
        ratios.append(((y.var(0).mean()).item(), (back(y, x) ** 2).mean().item()))
    untied = two_layer(1.0, tied=False)
    block = residual(untied, scale=scale)
    forward, backward = np.array(ratios).T
    assert_mean(forward, block.forward, slack=3 / d)  # exact up to O(1/d)
    assert_mean(backward, block.backward, slack=3 / d)
    assert residual(branch, scale=1.0) == Scaling(forward=1.0, backward=1.0)
    assert 1 < block.growth < untied.growth  # C.3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("d", "k"), [(32, 2), (32, 4), (8, 1)])
def test_two_layer_module(tied: bool, d: int, k: int) -> None:
    """Exact in expectation over weights, also for narrow modules; the printed formula is the limit of wide ones."""
    D = k * d
    draws = 300
    W, M = normal(2, draws, D, d) * math.sqrt(2 / D)
    M = W if tied else M
    x = normal(draws, 256, d).requires_grad_()
    y = F.relu(x @ W.mT) @ M
    ratio = two_layer(k, tied=tied, d=d)
    assert_mean(y.detach().var(1).mean(1), ratio.forward)
    assert_mean((back(y, x) ** 2).mean((1, 2)), ratio.backward)
    wide = two_layer(k, tied=tied, d=10**6)
    assert wide.forward == pytest.approx(two_layer(k, tied=tied).forward, abs=1e-4)
    assert two_layer(k, tied=tied, gain=1.0).backward == pytest.approx(two_layer(k, tied=tied).backward / 4)


@pytest.mark.parametrize(
    ("g", "gain", "chi"), [(nn.ReLU(), 2.0, 1.0), (nn.SELU(), 1.0, 1.0716), (nn.Tanh(), 2.0, 1.1055)]
)
def test_without_batch_norm(g: nn.Module, gain: float, chi: float) -> None:
    """A wide network converges to variance q, and its gradients grow by χ per layer."""
    fixed = unnormalised(g, gain=gain)
    assert fixed.growth == pytest.approx(chi, abs=1e-4)
    rates, sizes = [], []
    d, depth = 192, 20
    for _ in range(16):
        first = normal(16, d)
        first = first / first.square().mean(1, keepdim=True).sqrt()  # q stays what it is at ReLU's every fixed point
        x = first.requires_grad_()
        gradients, signals = [x], x
        for _ in range(depth):
            z = signals @ (normal(d, d) * math.sqrt(gain / d))
            signals = g(z)
            gradients.append(signals)
        sizes.append((z.detach() ** 2).mean().item())
        norms = [n.square().mean().item() for n in torch.autograd.grad(signals, gradients, torch.randn_like(signals))]
        rates.append(math.log(norms[4] / norms[-1]) / (depth - 4))
    assert_mean(np.array(rates), math.log(fixed.growth), slack=0.01)
    if not isinstance(g, nn.ReLU):
        assert_mean(np.array(sizes), fixed.variance, slack=0.02)


def test_ratios_of_operators_in_sequence_multiply() -> None:
    layer = linear(np.eye(4)) * activation(nn.ReLU())
    assert layer == Scaling(forward=activation(nn.ReLU()).forward, backward=0.5)


def test_proposition_3_14_holds_with_the_square_and_not_as_printed() -> None:
    """Var[ReLU(x)] = ½ - ¼ (E|x|)² for symmetric x of variance 1; the printed formula subtracts ¼ E|x|."""
    rng = np.random.default_rng(0)
    n = 400_000
    sign = rng.choice([-1.0, 1.0], n)
    for x in (rng.standard_normal(n), math.sqrt(3) * rng.uniform(-1, 1, n), sign * rng.exponential(math.sqrt(0.5), n)):
        relu = np.maximum(x, 0)
        size = np.abs(x).mean()
        assert_mean((relu - relu.mean()) ** 2, 0.5 - size**2 / 4, slack=2e-3)
        assert relu.var() > 0.5 - size / 4 + 0.02


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight of shape \(3,\) must be a matrix"):
        linear([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="batch=2 must be finite and at least 3"):
        batch_norm(1.0, 2)
    with pytest.raises(ValueError, match="vanishes"):
        unnormalised(nn.Tanh(), gain=0.5)
    with pytest.raises(ValueError, match="explodes"):
        unnormalised(nn.ReLU(), gain=3.0)
