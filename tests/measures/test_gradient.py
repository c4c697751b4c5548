"""Gradient norms against torch's own backward pass, and growth rates against the theory of Hu."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from unskip.measures import growth, measure
from unskip.theory import growth_rate


def deep(act: type[nn.Module], depth: int = 20, width: int = 128) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width, bias=False)
        nn.init.kaiming_normal_(linear.weight)
        layers += [linear, nn.BatchNorm1d(width), act()]
    return nn.Sequential(*layers)


def test_norms_are_those_of_backward() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y = torch.randn(5, 6), torch.randint(4, (5,))
    measured = measure(model, x, y, families=["gradient"])
    hidden = model[:2](x)
    hidden.retain_grad()
    F.cross_entropy(model[2](hidden), y).backward()
    assert measured.series["gradient_norm"].layers == ("0", "2")
    expected = [model[0].weight.grad.norm().item(), model[2].weight.grad.norm().item()]
    assert measured.series["gradient_norm"].values == pytest.approx(expected, rel=1e-5)
    back = dict(
        zip(*(getattr(measured.series["activation_gradient_norm"], k) for k in ("layers", "values")), strict=True)
    )
    assert back["1"] == pytest.approx(hidden.grad.norm().item(), rel=1e-5)
    assert measured.numbers["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)


def test_growth_is_numpys_straight_line() -> None:
    norms = np.exp(-0.3 * np.arange(12) + 0.1 * np.random.default_rng(0).normal(size=12))
    line = growth(norms)
    (slope, _), covariance = np.polyfit(np.arange(12), np.log(norms), 1, cov=True)
    assert line.rate == pytest.approx(-slope)
    assert line.error == pytest.approx(covariance[0, 0] ** 0.5)
    holes = [0.0, math.nan, math.inf, *norms]
    assert growth(holes).rate == pytest.approx(line.rate)
    assert math.isnan(growth([1.0, 2.0]).rate)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
def test_gradients_grow_as_theory_says(act: type[nn.Module]) -> None:
    """½ ln r(σ) a layer with BatchNorm (Hu, section 3.1), and R_b / R_f of the activation is r(σ)."""
    rates, ratios = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = deep(act), torch.randn(128, 128)
        signal = torch.randn(128, 128)
        measured = measure(model, x, loss=lambda y, _, s=signal: (y * s).sum(), families=["gradient", "scaling"])
        rates.append(measured.numbers["gradient_growth"])
        ratios.append(measured.numbers["activation_rate"])
    expected = growth_rate(act())
    assert np.mean(ratios) == pytest.approx(expected, rel=0.05)
    assert np.mean(rates) == pytest.approx(0.5 * math.log(expected), rel=0.15)


def test_saturation_is_where_no_gradient_comes_back() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].weight.data.mul_(300)
    assert measure(model, torch.randn(16, 8)).numbers["gradient_blocked"] > 0.9
    model[0].weight.data.mul_(1 / 3000)
    assert measure(model, torch.randn(16, 8)).numbers["gradient_blocked"] == 0
