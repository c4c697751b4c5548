"""Scaling ratios against the theory of Hu and against autograd."""

import math

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from unskip import theory
from unskip.measures import measure


def test_linear_batch_norm_and_relu_are_as_in_theory() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(200, 300, bias=False), nn.BatchNorm1d(300), nn.ReLU(inplace=True))
    nn.init.normal_(model[0].weight, std=0.2)
    x, signal = torch.randn(512, 200), torch.randn(512, 300)
    series = measure(model, x, loss=lambda y, _: (y * signal).sum(), families=["scaling"]).series
    forward, backward = series["forward_ratio"].values, series["backward_ratio"].values
    linear = theory.linear(model[0].weight.detach().numpy())
    relu = theory.activation(torch.relu)
    norm = theory.batch_norm(linear.forward, batch=512)
    for index, expected in enumerate([linear, norm, relu]):
        assert forward[index] == pytest.approx(expected.forward, rel=0.05)
        assert backward[index] == pytest.approx(expected.backward, rel=0.05)


def test_a_branch_counts_only_what_came_through_it() -> None:
    """At a residual branch the gradient of the shared input is the sum of two; R_b is that of the operator alone."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Linear(6, 6, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.branch(x)

    model = nn.Sequential(nn.Linear(6, 6), Residual())
    x, signal = torch.randn(40, 6), torch.randn(40, 6)
    series = measure(model, x, loss=lambda y, _: (y * signal).sum(), families=["scaling"]).series
    back = dict(zip(series["backward_ratio"].layers, series["backward_ratio"].values, strict=True))
    through = signal @ model[1].branch.weight.detach()
    assert back["1.branch"] == pytest.approx((through.var(0).mean() / signal.var(0).mean()).item(), rel=1e-4)


def test_sequences_and_reused_modules_have_ratios_too() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    series = measure(model, torch.randn(16, 5, 8), families=["scaling"]).series
    values = dict(zip(series["backward_ratio"].layers, series["backward_ratio"].values, strict=True))
    assert all(math.isfinite(values[name]) for name in ("linear1", "linear2", "norm1", "norm2"))
    blocks = torchvision.models.resnet18(num_classes=4)
    series = measure(blocks, torch.randn(8, 3, 32, 32), families=["scaling"]).series
    assert np.isfinite(series["forward_ratio"].values).all()
    assert np.isfinite(series["backward_ratio"].values).all()
