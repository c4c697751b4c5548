"""Costs against counts by hand and against the networks themselves."""

import pytest
import timm
import torch
import torchvision
from torch import nn

import unskip
from unskip.models.cifar import cifar_resnet
from unskip.surgery import cost
from unskip.surgery.cost import on_meta, size


def test_numbers_by_hand() -> None:
    """Two 3 x 3 convolutions, 8 -> 8 channels: 16 inside afterwards, on 10 x 10 pixels."""
    block = timm.models.resnet.BasicBlock(8, 8)
    network = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.ReLU(), block).eval()
    price = cost(network, "rm", example=torch.empty(5, 3, 10, 10))
    stem, conv = 3 * 8, 8 * 8 * 9
    assert price.before.parameters == stem + 2 * conv + 2 * 2 * 8
    # The second norm became a bias, the first is still there.
    assert price.after.parameters == stem + 4 * conv + 2 * 8 + 8
    assert price.before.macs == 100 * (stem + 2 * conv)
    assert price.after.macs == 100 * (stem + 4 * conv)
    tensor = 4 * 8 * 100  # bytes of one 8-channel image
    # Residual: x, what the second convolution reads and what it writes. Plain: twice as wide, and what it writes.
    assert price.before.memory == 3 * tensor
    assert price.after.memory == 3 * tensor
    assert price.growth == price.after.parameters / price.before.parameters
    assert "one image of 3 x 10 x 10 " in str(price)


def test_what_is_counted_is_what_is_built() -> None:
    for network, method in ((cifar_resnet(14).eval(), "rm"), (cifar_resnet(14), "pnnh")):
        price = cost(network, method, example=torch.randn(1, 3, 32, 32))
        plain = unskip.plainify(network, method)
        assert price.before.parameters == sum(p.numel() for p in network.parameters())
        assert price.after.parameters == sum(p.numel() for p in plain.parameters())
        assert price.after.macs == size(on_meta(plain), (3, 32, 32)).macs


@pytest.mark.parametrize(
    ("build", "times"),
    [
        (lambda: timm.create_model("resnet18"), 1.73),
        (lambda: torchvision.models.resnet34(), 1.85),
        (lambda: torchvision.models.mobilenet_v2(), 1.10),
    ],
)
def test_ordinary_networks_stay_below_the_limit(build: object, times: float) -> None:
    with torch.device("meta"):
        network = build().eval()
    price = cost(network)
    assert price.growth == pytest.approx(times, abs=0.005)
    assert price.shape == (3, 224, 224)
    assert unskip.plainify(network, "rm").surgery.replaced


def test_wrong_arguments_get_a_sentence() -> None:
    network = cifar_resnet(8).eval()
    with pytest.raises(ValueError, match=r"cost: example=\(3,\) must be a batch of inputs"):
        cost(network, "rm", example=torch.randn(3))
    with pytest.raises(ValueError, match=r"cost: CifarResNet does not run on an input of shape \(4, 8, 8\)"):
        cost(network, "rm", example=torch.randn(1, 4, 8, 8))
    with pytest.raises(ValueError, match=r"cost: model=1 is not an nn.Module"):
        cost(1)
    with pytest.raises(ValueError, match="cost: 'CifarResNet' is in training mode"):
        cost(cifar_resnet(8))
    assert "unknown" in str(cost(nn.Sequential(nn.Conv2d(3, 64, 300), timm.models.resnet.BasicBlock(64, 64)).eval()))


def test_norms_without_gain_and_bias_are_counted_too() -> None:
    """On the meta device nothing says whether a network was trained."""
    net = cifar_resnet(8)
    for block in (*net.layer1, *net.layer2, *net.layer3):
        block.bn1 = nn.BatchNorm2d(block.bn1.num_features, affine=False)
    assert cost(net, "pnnh").growth < 1
