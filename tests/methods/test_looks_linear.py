"""Looks-linear: exactly linear at initialisation, through any number of blocks, and no longer after a step."""

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import unskip
from unskip.methods import CReLU
from unskip.models.cifar import cifar_resnet, wide_resnet

STAGES = {
    "vanilla": (lambda: cifar_resnet(20), "layer1 layer2 layer3", 16),
    "bottleneck": (lambda: timm.create_model("resnet26"), "layer1 layer2 layer3 layer4", 64),
    "torchvision": (lambda: torchvision.models.resnet18(), "layer1 layer2 layer3 layer4", 64),
    "pre-activation": (lambda: wide_resnet(16, 2), "layer1 layer2 layer3", 16),
}


def stages(name: str) -> nn.Sequential:
    build, names, _ = STAGES[name]
    network = unskip.plainify(build(), "looks_linear").double()
    return nn.Sequential(*[network.get_submodule(part) for part in names.split()])


def written(y: Tensor, name: str) -> Tensor:
    """z of y = CReLU(z); a pre-activation block writes z itself."""
    if name == "pre-activation":
        return y
    positive, negative = y.chunk(2, dim=1)
    return positive - negative


@pytest.mark.parametrize("name", STAGES)
@torch.no_grad()
def test_a_network_is_exactly_linear_at_initialisation(name: str) -> None:
    """f(2 x - 3 y) = 2 f(x) - 3 f(y), for inputs of both signs, transitions included."""
    body, channels = stages(name), STAGES[name][2]
    x, y = torch.randn(2, 3, channels, 17, 16, dtype=torch.float64)
    together = written(body(2 * x - 3 * y), name)
    apart = 2 * written(body(x), name) - 3 * written(body(y), name)
    assert together.norm() > 0.1
    assert (together - apart).abs().max() <= 1e-12 * together.abs().max()
    last = [m for m in body.modules() if isinstance(m, nn.Conv2d)][-1]
    last.weight.add_(0.1 * torch.randn_like(last.weight))  # the mirror is broken, and linearity with it
    together = written(body(2 * x - 3 * y), name)
    apart = 2 * written(body(x), name) - 3 * written(body(y), name)
    assert (together - apart).abs().max() > 1e-3 * together.abs().max()


@torch.no_grad()
def test_norms_pass_110_layers_whole() -> None:
    stage = unskip.plainify(cifar_resnet(110), "looks_linear").layer1.double()
    z = torch.randn(2, 8, 8, 8, dtype=torch.float64)
    y = stage(CReLU()(z))
    torch.testing.assert_close(y.norm(), z.norm(), rtol=1e-6, atol=0)  # |CReLU(z)| = |z|


@torch.no_grad()
def test_crelu_against_torch() -> None:
    x = torch.randn(2, 5, 3, 3)
    torch.testing.assert_close(CReLU()(x), torch.cat([x.clamp_min(0), (-x).clamp_min(0)], dim=1))
    assert CReLU(-1)(x).shape == (2, 5, 3, 6)


@torch.no_grad()
def test_an_mlp_reads_its_norm_and_is_linear_behind_it() -> None:
    network = unskip.plainify(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), "looks_linear").double()
    mlp = network.blocks[0].mlp
    assert isinstance(mlp[0], nn.LayerNorm)
    x, y = torch.randn(2, 3, 5, 192, dtype=torch.float64)
    f = mlp[1:]
    assert (f(x - y) - f(x) + f(y)).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        (lambda: torchvision.models.resnext50_32x4d(), {}, "32 groups can't subtract the two halves of a CReLU"),
        (lambda: timm.create_model("mobilenetv2_050"), {}, "groups can't subtract the two halves of a CReLU"),
        (lambda: nn.Sequential(timm.models.resnet.BasicBlock(7, 7)), {}, "its width 7 is odd"),
        (
            lambda: nn.Sequential(timm.models.resnet.BasicBlock(7, 8, downsample=nn.Conv2d(7, 8, 1))),
            {},
            "it reads 7 channels, and what comes out of a CReLU is an even number",
        ),
        (lambda: cifar_resnet(8), {"gain": -1.0}, "gain=-1.0 must be above 0"),
    ],
)
def test_what_can_not_be_done_is_a_sentence(build: object, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        unskip.plainify(build(), "looks_linear", **options)
