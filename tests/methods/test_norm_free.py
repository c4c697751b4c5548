"""Blocks without norms on other people's networks: bottlenecks, groups, dropout, norms with an activation in them."""

import pytest
import timm
import torch
import torchvision
from timm.layers.norm_act import BatchNormAct2d
from torch import nn
from torch.nn import functional as F

import unskip
from unskip.methods import BlockSpec
from unskip.methods.iso import Iso
from unskip.methods.norm_free import norm_free
from unskip.models.cifar import cifar_resnet

NETWORKS = {
    "timm bottleneck": lambda: timm.create_model("resnet26"),
    "torchvision vanilla": lambda: torchvision.models.resnet18(),
    "grouped": lambda: torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], groups=8, width_per_group=8
    ),
}


@pytest.mark.parametrize("method", ["iso", "delta_tanh"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_gradients_of_the_first_and_last_block_are_alike(kind: str, method: str) -> None:
    """Also through bottlenecks, where independent orthogonal draws would lose 3/4 in each block."""
    network = unskip.plainify(NETWORKS[kind](), method)
    F.cross_entropy(network(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    blocks = [network.get_submodule(path) for path in network.surgery.replaced]
    assert not any(isinstance(module, nn.BatchNorm2d) for block in blocks for module in block.modules())
    first, last = (
        torch.stack([m.weight.grad.norm() for m in block.modules() if isinstance(m, nn.Conv2d)]).log().mean().exp()
        for block in (blocks[0], blocks[-1])
    )
    assert 0.1 < first / last < 10


def test_dropout_stays_and_a_norm_with_an_activation_goes() -> None:
    convs = [nn.Conv2d(6, 6, 3, padding=1) for _ in range(2)]
    branch = (convs[0], nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), convs[1])
    spec = BlockSpec(path="x", pre=(BatchNormAct2d(6),), branch=branch)
    block = Iso().build(spec, None)
    assert [type(m).__name__ for m in block] == ["SReLU", "Conv2d", "SReLU", "Dropout", "Conv2d"]
    assert block[3].p == 0.3
    assert not block[1].bias.any()


def test_dtype_and_device_follow_the_block() -> None:
    residual = cifar_resnet(8).double()
    for method in ("iso", "delta_tanh", "dirac", "looks_linear"):
        network = unskip.plainify(residual, method)
        assert {p.dtype for p in network.parameters()} == {torch.float64}
    with torch.device("meta"):
        meta = cifar_resnet(8)
    assert all(p.is_meta for p in unskip.plainify(meta, "iso").parameters())


def test_an_mlp_is_refused() -> None:
    spec = BlockSpec(path="x", pre=(nn.LayerNorm(6),), branch=(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)))
    with pytest.raises(ValueError, match=r"an MLP of linear layers, .* 'looks_linear', 'plain' or 'pnnh' take it"):
        norm_free(spec, act=lambda channels: nn.Tanh(), initialise=lambda conv: None)
