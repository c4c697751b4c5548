"""Method `plain`: the branch, and nothing but the branch."""

import timm
import torch

import unskip
from unskip.models.cifar import cifar_resnet


@torch.no_grad()
def test_plain_is_the_branch_alone_with_its_weights() -> None:
    residual = cifar_resnet(8).eval()
    network = unskip.plainify(residual, "plain")
    x = torch.rand(2, 16, 8, 8)
    for old, new in ((residual.layer1[0], network.layer1[0]), (residual.layer2[0], network.layer2[0])):
        y = old.bn2(old.conv2(old.bn1(old.conv1(x)).relu())).relu()
        torch.testing.assert_close(new(x), y)


@torch.no_grad()
def test_a_zero_gain_is_revived() -> None:
    """timm starts the last norm of each block at zero; without a skip such a network would put out a constant."""
    residual = timm.create_model("resnet18")
    assert not residual.layer1[0].bn2.weight.any()
    network = unskip.plainify(residual, "plain")
    one, two = network(torch.randn(2, 3, 32, 32))
    assert not torch.allclose(one, two)
    assert not residual.layer1[0].bn2.weight.any(), "the given network stays untouched"


@torch.no_grad()
def test_squeeze_excite_stays_where_it_was() -> None:
    residual = timm.create_model("seresnet18").double().eval()
    network = unskip.plainify(residual, "plain")
    old = residual.layer1[0]
    x = torch.rand(1, 64, 8, 8, dtype=torch.float64)
    expected = old.act2(old.se(network.layer1[0][6](old.conv2(old.act1(old.bn1(old.conv1(x)))))))
    torch.testing.assert_close(network.layer1[0](x), expected)


@torch.no_grad()
def test_stochastic_depth_goes_with_the_skip() -> None:
    network = unskip.plainify(timm.create_model("resnet18", drop_path_rate=0.9), "plain").train()
    assert network.layer4[1](torch.rand(8, 512, 2, 2)).flatten(1).any(dim=1).all()
