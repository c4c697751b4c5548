"""A pruned network is the same function with fewer channels, and only dead ones are gone."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

import unskip
from tests.ship.test_fold import error, mobilenet, trained
from unskip.kernels.depthwise import JoinedSequential
from unskip.methods import CappedReLU
from unskip.models.cifar import cifar_resnet
from unskip.ship import prune


def size(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@torch.no_grad()
def test_carried_channels_die_with_what_they_copy() -> None:
    """The last five channels of the first stage are zero in a trained network: they go, and all their copies."""
    network = trained(cifar_resnet(14)).double()
    for norm in (network.bn1, network.layer1[0].bn2, network.layer1[1].bn2):
        norm.weight[11:] = 0
        norm.bias[11:] = -0.1
    network.layer1[0].bn1.weight[[2, 4]] = 0  # in the branch
    network.layer1[0].bn1.bias[[2, 4]] = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    network.layer1[1].bn1.weight[3] = 0  # a constant that a padded convolution reads: it stays
    network.layer1[1].bn1.bias[3] = 1.0
    plain = unskip.fold(unskip.plainify(network, "rm"))
    pruned = prune(plain)
    x = torch.randn(2, 3, 16, 17, dtype=torch.float64)
    assert error(network, pruned, x) <= 1e-12
    assert pruned.conv1.out_channels == 11
    first, second = pruned.layer1
    assert first.conv1.weight.shape == (16 - 2 + 11, 11, 3, 3)
    assert first.conv2.weight.shape == (11, 25, 3, 3)
    assert second.conv1.weight.shape == (16 + 11, 11, 3, 3)
    assert pruned.pruning.removed["layer1.0.conv1"] == 2 + 5
    assert pruned.pruning.exact <= 1e-12
    assert size(pruned) < size(plain)
    assert size(prune(pruned)) == size(pruned)
    # The copies that the next stage's shortcut would project.
    assert pruned.layer2[0].conv1.out_channels == 32 + 11


class Chain(nn.Module):
    """1 x 1 layers, a depthwise one, an activation by channel, pooling and a classifier."""

    def __init__(self, act: nn.Module, padding: int = 0) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Conv2d(3, 8, 1), act, nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.third, self.pool = nn.Conv2d(8, 6, 1 + 2 * padding, padding=padding), nn.MaxPool2d(2)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.act(self.first(x))).relu()
        return self.fc(self.pool(self.third(x).relu()).mean((2, 3)))


def caps() -> Tensor:
    return torch.tensor([6.0, 5, 4, 3, 2, 1, torch.inf, 0.5])


@pytest.mark.parametrize("act", [CappedReLU(caps()), nn.PReLU(8), nn.LeakyReLU(), nn.GELU(), nn.Sigmoid()])
@pytest.mark.parametrize("padding", [0, 1])
@torch.no_grad()
def test_dead_channels_of_every_kind(act: nn.Module, padding: int) -> None:
    network = Chain(copy.deepcopy(act), padding).eval().double()
    network.first.weight[[0, 1, 2]] = 0
    network.first.bias[[0, 1, 2]] = torch.tensor([0.0, -1.0, 2.0], dtype=torch.float64)
    network.second.weight[3] = 0
    network.second.bias[:] = torch.tensor([-1.0, -1, -1, 0.7, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
    network.third.weight[:, 4] = 0  # nobody reads it
    network.third.weight[5] = 0  # a constant before the classifier
    network.third.bias[5] = 3.0
    pruned = prune(network)
    assert error(network, pruned, torch.randn(2, 3, 9, 8, dtype=torch.float64)) <= 1e-12
    assert pruned.fc.in_features == 5
    # 4 is unread; 3 is constant, 0.7, which a padded layer can't take over; 0 is zero where the activation keeps zero.
    gone = {4} | ({3} if not padding else set())
    zero_at_zero = not isinstance(act, nn.Sigmoid)
    zero_below = isinstance(act, CappedReLU)
    gone |= {0} if zero_at_zero else set()
    gone |= {1} if zero_below else set()
    assert pruned.first.out_channels == pruned.second.groups == pruned.third.in_channels == 8 - len(gone)


@torch.no_grad()
def test_what_is_shared_or_grouped_or_normed_stays() -> None:
    layer = nn.Conv2d(4, 4, 1)
    layer.weight[1] = 0
    layer.bias[1] = -1
    twice = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), layer, nn.ReLU(), layer, nn.ReLU()).eval()
    assert not prune(twice).pruning.removed
    grouped = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2)).eval()
    grouped[0].weight[1], grouped[0].bias[1] = 0, 0
    assert not prune(grouped).pruning.removed
    normed = nn.Sequential(layer, nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    assert not prune(normed, example=torch.randn(1, 4, 3, 3)).pruning.removed
    dead = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    dead[2].weight.zero_()
    assert prune(dead)[0].out_channels == 1  # a layer has at least one channel


def test_a_skip_is_no_chain_and_nothing_is_touched() -> None:
    network = trained(timm.create_model("resnet10t", num_classes=10))
    with torch.no_grad():
        network.layer1[0].bn2.weight[:9] = 0
    state = copy.deepcopy(network.state_dict())
    pruned = prune(network, example=torch.randn(1, 3, 32, 32))
    assert error(network, pruned, torch.randn(1, 3, 32, 32)) <= 1e-5
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


def test_wrong_arguments_get_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"prune: model='net' is not an nn.Module"):
        prune("net")
    with pytest.raises(ValueError, match=r"prune: 'Conv2d' is in training mode"):
        prune(nn.Conv2d(3, 3, 1))


@torch.no_grad()
def test_of_a_fast_form_depthwise_convolutions_keep_a_multiple_of_8() -> None:
    example = torch.randn(2, 3, 32, 32)
    fast = unskip.fold(trained(mobilenet("pnnh")), "fast", example=example)
    assert not prune(fast, example=example).pruning.removed  # neither the zeros that it was filled up with
    path, block = next(
        (path, module)
        for path, module in fast.named_modules()
        if type(module) is JoinedSequential and not module[4].weight[:, -1].any()
    )
    filled, width = block[2].groups, int(block[4].weight.flatten(2).any(2).any(0).sum())
    for tensor in (block[0].weight, block[0].bias, block[2].bias):
        tensor[:11] = 0
    pruned = prune(fast, example=example)
    assert pruned.get_submodule(path)[2].groups == width - 11 + (11 - width) % 8 < filled
    assert pruned.pruning.removed == {f"{path}.0": filled - pruned.get_submodule(path)[2].groups}
