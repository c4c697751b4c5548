"""convert is plainify with its proof: what is not the same function, nobody gets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import timm
import torch
from torch import nn
from torchvision.models.mobilenetv2 import MobileNetV2

import unskip
from tests.ship.test_fold import error, functions, trained
from unskip.methods import Plain
from unskip.models.cifar import cifar_resnet, wide_resnet
from unskip.ship import convert
from unskip.surgery import cost


def test_a_converted_network_comes_with_cost_and_proof() -> None:
    network = trained(cifar_resnet(8))
    converted = convert(network, example=torch.randn(2, 3, 16, 17))
    assert {p.dtype for p in converted.parameters()} == {torch.float32}
    assert converted.conversion.exact <= 1e-9
    assert converted.conversion.check.worst() <= 1e-4
    assert converted.conversion.cost.shape == (3, 16, 17)
    assert converted.conversion.cost.after.parameters == sum(p.numel() for p in converted.parameters())
    assert converted.surgery.replaced == ("layer1.0", "layer2.0", "layer3.0")
    assert error(network, converted, torch.randn(2, 3, 15, 16)) <= 1e-4
    assert {p.dtype for p in convert(network.bfloat16()).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("build", [lambda: cifar_resnet(8), lambda: wide_resnet(10, 1)])
def test_a_residual_half_network_becomes_plain(build: Callable[[], nn.Module]) -> None:
    """C_B = C: a plain block of hidden width H + C, or H + 2 C where what it reads has both signs."""
    network = trained(unskip.plainify(build(), "residual_half"))
    plain = unskip.fold(convert(network, limit=10))
    x = torch.randn(2, 3, 15, 16)
    assert error(network, plain, x) <= 1e-4
    assert "conv2d" in functions(plain, x)
    assert not {"add", "add_", "cat"} & functions(plain, x)


def test_the_hidden_width_of_a_residual_half_block_grows_by_its_channels() -> None:
    network = trained(unskip.plainify(cifar_resnet(8), "residual_half"))
    hidden, channels = network.layer1[0].learner.conv1.out_channels, 16
    assert convert(network).layer1[0].conv1.out_channels == hidden + channels


def test_an_example_is_found_that_an_average_pooling_takes() -> None:
    network = trained(timm.create_model("resnet26d", layers=(1, 1, 1, 1), channels=(8, 8, 8, 8), num_classes=10))
    assert convert(network, limit=100).conversion.exact <= 1e-9
    with pytest.raises(ValueError, match=r"can't run on an example of shape \(1, 3, 33, 32\): rm: .* 9 x 8"):
        convert(network, limit=100, example=torch.randn(1, 3, 33, 32))


@dataclass(frozen=True, kw_only=True)
class Liar(Plain):
    """Says that it keeps the function, and drops the skip."""

    exact: ClassVar[bool] = True


def test_a_method_that_only_says_so_is_found_out() -> None:
    network = trained(cifar_resnet(8))
    with pytest.raises(
        ValueError, match=r"(?s)plainify: the new network is not the same function.*They part at 'layer1"
    ):
        convert(network, Liar())
    with pytest.raises(ValueError, match="convert: method='pnnh' does not keep the network's function"):
        convert(network, "pnnh")
    with pytest.raises(ValueError, match=r"plainify: 'CifarResNet' is in training mode"):
        convert(cifar_resnet(8))
    with pytest.raises(ValueError, match=r"convert: model=3 is not an nn.Module"):
        convert(3)


def test_an_input_out_of_range_is_refused_with_the_scale_that_does_it() -> None:
    blocks = [[1, 8, 1, 1], [6, 12, 2, 2], [6, 16, 3, 2]]
    network = trained(MobileNetV2(10, inverted_residual_setting=blocks, width_mult=0.35))
    with torch.no_grad():
        for block in (m for m in network.modules() if getattr(m, "use_res_connect", None) is False):
            block.conv[-1].weight.mul_(40)
    x = torch.randn(1, 3, 32, 32)
    with pytest.raises(
        ValueError, match=r"plainify: block 'features\.\d' would have to carry \S+, and its bound is 6; a scale"
    ):
        convert(network, example=x, relu6="scale", scale=0)
    converted = convert(network, example=x, relu6="scale", scale=12)
    assert converted.conversion.exact <= 1e-9


@pytest.mark.parametrize("call", [unskip.plainify, convert])
def test_a_large_growth_is_refused_with_its_table(call: object) -> None:
    network = timm.create_model("resnet50").eval()
    with pytest.raises(ValueError, match="more than limit=4") as refusal:
        call(network, "rm")
    text = str(refusal.value)
    assert "10.9 times its parameters, more than limit=4" in text
    assert "middle='grouped' costs less" in text
    for row in ("parameters", "MACs", "activations at once"):
        assert row in text
    assert "25.56 M      277.31 M" in text


@pytest.mark.full
def test_resnet50_is_done_with_the_limit_raised() -> None:
    network = trained(timm.create_model("resnet50"))
    converted = unskip.plainify(network, "rm", limit=12)
    assert error(network, converted, torch.randn(1, 3, 33, 32)) <= 1e-4
    count = sum(p.numel() for p in converted.parameters())
    assert count == cost(network, "rm").after.parameters
    assert 10.8 < count / sum(p.numel() for p in network.parameters()) < 10.9
