"""Hu, Figures 1, 5 and 6: gradients of 20-layer, 256-wide networks."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from unskip.reproduce import reproduce
from unskip.reproduce.seqnet_figure5 import predicted
from unskip.reproduce.seqnet_running_variance import at_start, deviations, slope
from unskip.reproduce.seqnet_simulation import SimulatedNetwork, gradient_norms, log_rate


@pytest.mark.parametrize("activation", ["ReLU", "Tanh"])
def test_with_batch_norm_gradients_grow_at_half_the_log_of_r(activation: str) -> None:
    rate = log_rate(gradient_norms(SimulatedNetwork(activation=activation), repeats=6, seed=0))
    assert rate.error < 0.02 * rate.value
    assert rate.value == pytest.approx(predicted(activation, norm=True), rel=0.10)


def test_selu_and_the_cases_without_batch_norm() -> None:
    for activation, norm, slack in (("SELU", True, 0.35), ("SELU", False, 0.15), ("Tanh", False, 0.12)):
        rate = log_rate(gradient_norms(SimulatedNetwork(activation=activation, norm=norm), repeats=4, seed=0))
        assert rate.value == pytest.approx(predicted(activation, norm=norm), rel=slack)


def test_relu_without_batch_norm_does_not_grow() -> None:
    rate = log_rate(gradient_norms(SimulatedNetwork(activation="ReLU", norm=False), repeats=8, seed=0))
    assert predicted("ReLU", norm=False) == pytest.approx(0, abs=1e-12)
    assert abs(rate.value) < 4 * rate.error
    assert rate.value < 0.15 * predicted("ReLU", norm=True)


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_are_those_of_modules(residual: bool) -> None:
    """The same network of torch's own layers has the same gradients."""
    network = SimulatedNetwork(depth=4, width=8, batch=16, residual=residual)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(4, 8, 8, generator=generator) * math.sqrt(2 / 8)
    x = torch.randn(16, 8, generator=generator)
    linears = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    norms = [nn.BatchNorm1d(8, affine=False) for _ in range(4)]
    for linear, weight in zip(linears, weights, strict=True):
        linear.weight.data = weight.T.clone()
    skip = x
    for k in range(4):
        z = norms[k](linears[k](x))
        x = torch.relu(z + skip if residual and k % 2 else z)
        skip = x if k % 2 else skip
    x.backward(torch.randn(16, 8, generator=generator) / math.sqrt(8))
    ours = gradient_norms(network, repeats=1, seed=3)[0]
    assert ours == pytest.approx([linear.weight.grad.norm().item() for linear in linears], rel=1e-4)  # type: ignore[union-attr]


def test_rate_of_an_exact_exponential() -> None:
    layer = np.arange(1, 21)
    norms = np.stack([c * np.exp(-0.2 * layer) for c in (1.0, 7.0)])
    norms[:, 0] = 100.0  # the first layer is left out
    assert log_rate(norms).value == pytest.approx(0.2)
    assert log_rate(norms).error == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "name", ["seqnet-figure6", *(pytest.param(f"seqnet-figure{k}", marks=pytest.mark.full) for k in (1, 5))]
)
def test_figures_are_drawn(name: str, tmp_path: Path) -> None:
    options = {"wide_repeats": 0} if name == "seqnet-figure6" else {}
    written = reproduce(name, out=tmp_path, repeats=2, **options)
    assert 10_000 < written.files[0].stat().st_size < 150_000
    assert all("log-rate" in line for line in written.outcome.lines)


def test_what_a_user_gets_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="repeats=1 must be between 2 and"):
        reproduce("seqnet-figure6", out=tmp_path, repeats=1)
    with pytest.raises(ValueError, match="depth=21 must be even"):
        reproduce("seqnet-figure1", out=tmp_path, depth=21)
    with pytest.raises(ValueError, match="batch=2 must be between 3 and"):
        reproduce("seqnet-figure5", out=tmp_path, batch=2)


def test_running_variance_of_a_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))
    x = torch.randn(16, 1, 8, 8)
    first = model[0](x).transpose(0, 1).flatten(1).var(1).mean().sqrt().item()
    found = at_start(model, x)
    assert found[0] == pytest.approx(first, rel=1e-4)
    assert deviations(model) == [1, 1], "the given network is untouched"
    assert slope(np.exp(0.3 * np.arange(5))) == pytest.approx(0.3)


@pytest.mark.full
def test_running_variance_by_its_command(tmp_path: Path) -> None:
    written = reproduce("seqnet-running-variance", out=tmp_path, epochs=1, seeds=1)
    assert len(written.outcome.numbers["plain_resnet20"][0]["after"]) == 19
    assert written.files[0].stat().st_size < 150_000
