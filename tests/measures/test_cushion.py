"""Cushions against torch.func's Jacobians and by hand (Yu and Tomasi 2019, section 5)."""

import math

import pytest
import timm
import torch
from torch import Tensor, nn

import unskip
from unskip.measures import interlayer_cushion, layer_cushion, measure
from unskip.measures.blocks import blocks_of


def exact(function: object, x: Tensor) -> Tensor:
    """The formula, with torch.func's Jacobian of one sample at a time."""
    values = []
    for sample in x:
        jacobian = torch.func.jacrev(lambda s: function(s[None])[0])(sample).reshape(-1, sample.numel())
        along = jacobian @ sample.flatten()
        values.append(math.sqrt(sample.numel()) * along.norm() / jacobian.norm() / sample.norm())
    return torch.stack(values).detach().double()


def test_layer_cushion_by_hand() -> None:
    weight, x = torch.randn(4, 6), torch.randn(10, 6)
    expected = [((weight @ s).norm() / weight.norm() / s.norm()).item() for s in x]
    assert layer_cushion(weight, x, x @ weight.T).tolist() == pytest.approx(expected, rel=1e-5)
    # For a linear layer the interlayer cushion is sqrt(n) times that.
    linear = nn.Linear(6, 4)
    linear.weight.data = weight
    through, _ = interlayer_cushion(linear, x)
    assert through.tolist() == pytest.approx([math.sqrt(6) * value for value in expected], rel=1e-5)


def test_bias_is_no_part_of_the_layer_cushion() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 36, 4))
    x = torch.randn(6, 3, 8, 8)
    before = measure(model, x, families=["cushion"]).series["layer_cushion"]
    model[0].bias.data.add_(100.0)
    after = measure(model, x, families=["cushion"]).series["layer_cushion"]
    assert after.values[0] == pytest.approx(before.values[0], rel=1e-3)


def test_small_jacobians_are_exact() -> None:
    block = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 5)).double()
    x = torch.randn(7, 9, dtype=torch.float64)
    values, errors = interlayer_cushion(block, x)
    assert values.tolist() == pytest.approx(exact(block, x).tolist())
    assert errors.abs().max() == 0


def test_hutchinson_is_right_within_its_error() -> None:
    block = nn.Sequential(nn.Linear(40, 60), nn.ReLU(inplace=True), nn.Linear(60, 30)).double()
    x = torch.randn(64, 40, dtype=torch.float64)
    values, errors = interlayer_cushion(block, x, max_exact=0, probes=16)
    away = (values - exact(block, x)) / errors
    assert errors.min() > 0
    assert away.abs().median() < 1.2  # 0.7 for a normal error
    assert (away.abs() > 4).double().mean() < 0.06
    assert (errors / values).mean() < 0.1


def test_batch_norm_makes_a_plain_block_scale_free() -> None:
    """The paper's plain block has 2.7e-7, its residual one 0.20: J x = 0, because BatchNorm undoes any scaling of x."""
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, eps=1e-12), nn.ReLU()).double()
    x = torch.randn(20, 6, dtype=torch.float64)
    plain[0].bias.data.zero_()
    values, _ = interlayer_cushion(plain, x, coupled=True)
    assert values.max() < 1e-9
    residual, _ = interlayer_cushion(lambda s: s + plain(s), x, coupled=True)
    assert residual.min() > 0.1


def test_coupled_and_exact_is_the_whole_jacobian() -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(block, x).reshape(5, 3, 15)
    expected = math.sqrt(3) * (jacobian @ x.flatten()).norm(dim=1) / jacobian.flatten(1).norm(dim=1) / x.norm(dim=1)
    assert interlayer_cushion(block, x, coupled=True)[0].tolist() == pytest.approx(expected.tolist())


def test_blocks_of_known_networks() -> None:
    assert [block.name for block in blocks_of(unskip.create_model("resnet20"))][:2] == ["layer1.0", "layer1.1"]
    assert [block.name for block in blocks_of(unskip.create_model("plain_resnet20"))][-1] == "layer3.2"
    assert blocks_of(timm.create_model("test_vit"))[0].name == "blocks.0"
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Flatten())
    assert [(block.name, len(block.modules)) for block in blocks_of(mlp)] == [("0", 2), ("2", 3)]


def test_transformers_and_networks_without_blocks() -> None:
    model = timm.create_model("test_vit", num_classes=4)
    series = measure(model, torch.randn(3, 3, 160, 160), families=["cushion"]).series["interlayer_cushion"]
    assert all(value > 0 for value in series.values)
    assert len(series.values) == len(model.blocks)
    assert measure(nn.Linear(4, 3), torch.randn(5, 4), families=["cushion"]).series["interlayer_cushion"].values == ()
