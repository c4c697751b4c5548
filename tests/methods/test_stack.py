"""Learner + coder is one ordinary block: the stacked form equals it to 1e-12 in float64, on the signs that it sees."""

import copy

import pytest
import timm
import torch
import torchvision
from torch import nn

import unskip
from unskip.methods import PNNHBlock
from unskip.methods.stack import stack, stacked
from unskip.models.cifar import cifar_resnet, wide_resnet


def randomise_norms(network: nn.Module) -> None:
    """Statistics and gains as after training, so that absorbing them is not trivial."""
    for norm in network.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            if norm.affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)


def blocks_of(network: nn.Module) -> list[PNNHBlock]:
    network = network.double().eval()
    randomise_norms(network)
    return [module for module in network.modules() if isinstance(module, PNNHBlock)]


def mobilenet(signed: str) -> nn.Module:
    return unskip.plainify(torchvision.models.mobilenet_v2(), signed=signed)


def with_silu(network: nn.Module) -> nn.Module:
    for path, module in list(network.named_modules()):
        if isinstance(module, nn.ReLU):
            network.set_submodule(path, nn.SiLU())
    return network


def without_gain(network: nn.Module) -> nn.Module:
    for path, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            network.set_submodule(path, nn.BatchNorm2d(module.num_features, affine=False))
    return network


NETWORKS = {
    # name: (network, whether its blocks read both signs)
    "vanilla": (lambda: unskip.plainify(cifar_resnet(8)), False),
    "vanilla fitted": (lambda: unskip.plainify(cifar_resnet(8), pretext="rectified_normal"), False),
    "vanilla second norm": (lambda: unskip.plainify(cifar_resnet(8), norm="both"), False),
    "vanilla whole": (lambda: unskip.plainify(cifar_resnet(14), transition="whole"), False),
    "vanilla quarter": (lambda: unskip.plainify(cifar_resnet(8), ratio=0.25), False),
    "vanilla without coder": (lambda: unskip.plainify(cifar_resnet(8), pretext="none"), False),
    "bottleneck": (lambda: unskip.plainify(timm.create_model("resnet26")), False),
    "bottleneck random": (lambda: unskip.plainify(timm.create_model("resnet26"), pretext="random"), False),
    "sync norm": (lambda: unskip.plainify(nn.SyncBatchNorm.convert_sync_batchnorm(cifar_resnet(8))), False),
    "norm without gain": (lambda: unskip.plainify(without_gain(cifar_resnet(8))), False),
    "dilated": (lambda: unskip.plainify(timm.create_model("resnet18", output_stride=8), pretext="random"), False),
    "grouped": (lambda: unskip.plainify(torchvision.models.resnext50_32x4d()), False),
    "inverted paired": (lambda: mobilenet("paired"), True),
    "inverted rectified": (lambda: mobilenet("rectify"), False),
    "pre-activation": (lambda: unskip.plainify(wide_resnet(10, 2)), True),
    "silu": (lambda: unskip.plainify(with_silu(cifar_resnet(8))), True),
    "mlp": (lambda: unskip.plainify(timm.create_model("vit_tiny_patch16_224", depth=2)), True),
    "mlp paired": (
        lambda: unskip.plainify(timm.create_model("vit_tiny_patch16_224", depth=2), pretext="group_average"),
        True,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_learner_and_coder_are_one_stacked_block(name: str) -> None:
    build, signed = NETWORKS[name]
    blocks = blocks_of(build())
    assert blocks
    seen = set()
    for block in blocks:
        first = next(m for m in block.learner if isinstance(m, nn.Conv2d | nn.Linear))
        shape = tuple(first.weight.shape)
        if shape in seen:  # one of each width and kind
            continue
        seen.add(shape)
        if isinstance(first, nn.Linear):
            x = torch.randn(2, 5, first.in_features, dtype=torch.float64)
        else:
            x = torch.randn(2, first.in_channels, 9, 8, dtype=torch.float64)  # odd and even sides
        x = x if signed else x.abs()
        single = stack(block)
        expected, actual = block(x), single(x)
        assert (expected - actual).abs().max() <= 1e-12 * max(1, expected.abs().max())
        parts = [type(m).__name__ for m in single.modules() if not list(m.children())]
        convs = [kind for kind in parts if kind in ("Conv2d", "Linear")]
        assert len(convs) == sum(isinstance(m, nn.Conv2d | nn.Linear) for m in block.learner)


@pytest.mark.parametrize("name", ["vanilla", "bottleneck", "inverted paired", "pre-activation"])
@torch.no_grad()
def test_a_whole_network_is_stacked_and_stays_the_same_function(name: str) -> None:
    network = NETWORKS[name][0]().double().eval()
    randomise_norms(network)
    # Deep and freshly randomised: keep the numbers within reach of 1e-12 relative error.
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    plain = stacked(network)
    expected, actual = network(x), plain(x)
    assert (expected - actual).abs().max() <= 1e-10 * expected.abs().max()
    assert not any(isinstance(m, PNNHBlock) for m in plain.modules())
    assert any(isinstance(m, PNNHBlock) for m in network.modules())


def test_a_middle_identity_stays_grouped() -> None:
    """ResNeXt: 32 groups of 2 for the learner, 32 of 2 for the carried channels, not one dense convolution."""
    block = blocks_of(unskip.plainify(torchvision.models.resnext50_32x4d()))[1]
    middle = stack(block)[2]
    assert isinstance(middle, nn.Conv2d)
    assert middle.groups == 64


def test_training_mode_is_refused() -> None:
    network = unskip.plainify(cifar_resnet(8))
    with pytest.raises(ValueError, match="training mode"):
        stacked(network)


def test_a_weight_that_is_made_from_others_is_refused_in_a_sentence() -> None:
    block = unskip.plainify(cifar_resnet(8), "pnnh").eval().layer1[0]
    nn.utils.parametrizations.weight_norm(block.learner.conv1)
    with pytest.raises(ValueError, match=r"^stack: the block can't become one ordinary block: .*remove_param"):
        stack(block)
    nn.utils.parametrize.remove_parametrizations(block.learner.conv1, "weight")
    assert len(stack(block)) == 4


def test_a_norm_that_depends_on_its_input_is_refused() -> None:
    network = copy.deepcopy(cifar_resnet(8))
    for path, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            network.set_submodule(path, nn.GroupNorm(4, module.num_features))
    plain = unskip.plainify(network).eval()
    with pytest.raises(ValueError, match=r"stack: layer1\.0 has a GroupNorm that depends on its input"):
        stacked(plain)
