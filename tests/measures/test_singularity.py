"""Condition numbers, rank and collinearity against numpy and closed forms."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unskip.measures import measure
from unskip.measures.singularity import collinearity, condition_infinity, effective_rank, gram_condition


def covariance(x: Tensor) -> Tensor:
    return torch.from_numpy(np.cov(x.double().numpy(), rowvar=False, bias=True))


def test_condition_of_activations_is_numpys() -> None:
    h = torch.randn(100, 7, dtype=torch.float64)
    assert gram_condition(h.T @ h) == pytest.approx(np.linalg.cond(h.numpy()))
    h[:, 3] = h[:, 2]
    assert gram_condition(h.T @ h) == math.inf


def test_condition_by_the_infinity_norm_is_numpys() -> None:
    z = torch.randn(6, 6, dtype=torch.float64)
    assert condition_infinity(z) == pytest.approx(np.linalg.cond(z.numpy(), np.inf))


def test_effective_rank_and_collinearity_at_their_ends() -> None:
    independent = torch.eye(8, dtype=torch.float64)
    copies = torch.ones(8, 8, dtype=torch.float64)
    assert effective_rank(independent) == pytest.approx(8)
    assert effective_rank(copies) == pytest.approx(1, abs=1e-6)
    assert collinearity(independent) == pytest.approx(0)
    assert collinearity(copies) == pytest.approx(1)


def test_collinearity_is_numpys_mean_correlation() -> None:
    x = torch.randn(60, 5) @ torch.randn(5, 5)
    correlations = np.abs(np.corrcoef(x.numpy(), rowvar=False))
    assert collinearity(covariance(x)) == pytest.approx(correlations[np.triu_indices(5, 1)].mean(), rel=1e-4)


def test_layers_of_a_network() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
    x = torch.randn(8, 3, 9, 9)
    series = measure(model, x, families=["singularity"]).series
    with torch.no_grad():
        h = model[0](x).movedim(1, -1).flatten(0, -2)
    assert series["activation_condition"].values[0] == pytest.approx(np.linalg.cond(h.numpy()), rel=1e-4)
    assert series["collinearity"].values[0] == pytest.approx(collinearity(covariance(h)), rel=1e-4)
    weights = [np.linalg.cond(model[index].weight.detach().flatten(1).numpy()) for index in (0, 2)]
    assert series["weight_condition"].values == pytest.approx(weights, rel=1e-4)


def test_a_layer_of_copies_is_singular() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight.data[:] = model[0].weight.data[0].clone()
    model[0].bias.data.zero_()
    series = measure(model, torch.randn(32, 5), families=["singularity"]).series
    assert series["activation_condition"].values[0] == math.inf
    assert series["collinearity"].values[0] == pytest.approx(1)
    assert series["effective_rank"].values[0] == pytest.approx(1 / 8, rel=1e-3)
