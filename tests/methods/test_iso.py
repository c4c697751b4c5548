"""ISONet's blocks: the shifted ReLU, isometry at initialisation, and the penalty that keeps it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unskip
from unskip.methods import SReLU
from unskip.models.cifar import cifar_resnet, wide_resnet
from unskip.train import Orthogonal


def test_srelu_against_torchs_relu() -> None:
    """max(x, b) = relu(x - b) + b, in value and gradient."""
    act = SReLU(5).double()
    assert (act.b == -1).all()
    nn.init.normal_(act.b)
    x = torch.randn(3, 5, 4, 4, dtype=torch.float64, requires_grad=True)
    b = act.b.detach().clone().requires_grad_()
    other = F.relu(x - b.view(-1, 1, 1)) + b.view(-1, 1, 1)
    weights = torch.randn_like(other)
    theirs = torch.autograd.grad((other * weights).sum(), [x, b])
    ours = torch.autograd.grad((act(x) * weights).sum(), [x, act.b])
    torch.testing.assert_close(act(x), other)
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])


@torch.no_grad()
def test_the_definition() -> None:
    block = unskip.plainify(cifar_resnet(14), "iso").layer2[0].double()
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64) * 2
    hidden = F.conv2d(x, block[0].weight, stride=2, padding=1).clamp_min(-1)
    torch.testing.assert_close(block(x), F.conv2d(hidden, block[2].weight, padding=1).clamp_min(-1))
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in block.modules())


@pytest.mark.parametrize("init", ["orthogonal", "identity"])
def test_110_layers_keep_signals_and_gradients_at_initialisation(init: str) -> None:
    stage = unskip.plainify(cifar_resnet(110), "iso", init=init).layer1.double()
    x = 0.3 * torch.randn(4, 16, 8, 8, dtype=torch.float64, requires_grad=True)
    y = stage(x)
    assert 0.9 < y.norm() / x.norm() < 1.01  # what is below -1 is cut, and little is
    g = torch.randn_like(y)
    (back,) = torch.autograd.grad(y, x, g)
    assert 0.9 < back.norm() / g.norm() < 1.01
    plain = unskip.plainify(cifar_resnet(110), "plain").layer1.double().train()
    (back,) = torch.autograd.grad(plain(x), x, g)
    assert not 0.9 < back.norm() / g.norm() < 1.01  # so the test can fail


def test_it_starts_where_the_penalty_is_zero() -> None:
    layer = unskip.plainify(cifar_resnet(20), "iso").layer1
    assert Orthogonal(1.0)(layer).item() == pytest.approx(0, abs=1e-8)
    assert Orthogonal(1.0)(unskip.plainify(cifar_resnet(20), "plain").layer1).item() > 1


def test_a_pre_activation_block_begins_with_srelu_and_ends_without() -> None:
    block = unskip.plainify(wide_resnet(10, 1), "iso").layer1[0]
    assert [type(module).__name__ for module in block] == ["SReLU", "Conv2d", "SReLU", "Conv2d"]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"init": "zeros"}, "init='zeros' is not known. Known: orthogonal, identity"), ({"shift": "x"}, "shift='x' must")],
)
def test_wrong_options(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=f"iso: {says}"):
        unskip.plainify(cifar_resnet(8), "iso", **options)
