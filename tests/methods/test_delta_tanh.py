"""Delta-orthogonal tanh networks: on the critical line of mean-field theory, so that gradients pass 1,000 layers."""

import math

import pytest
import torch
from scipy import integrate, optimize
from torch import nn
from torch.nn import functional as F

import unskip
from unskip.methods.delta_tanh import DeltaTanh
from unskip.models.cifar import cifar_resnet


def normal_mean(f: object) -> float:
    """E[f(z)] of a standard normal z, by scipy's quadrature."""
    density = 1 / math.sqrt(2 * math.pi)
    return integrate.quad(lambda z: f(z) * math.exp(-z * z / 2) * density, -10, 10)[0]


def test_the_defaults_are_critical() -> None:
    """χ = 1 at the fixed point q* fixes σ_b for a given σ_w."""
    method = DeltaTanh()
    sw2 = method.gain**2

    def chi(q: float) -> float:
        return sw2 * normal_mean(lambda z: (1 - math.tanh(math.sqrt(q) * z) ** 2) ** 2)

    q = optimize.brentq(lambda q: chi(q) - 1, 1e-6, 1)
    sb2 = q - sw2 * normal_mean(lambda z: math.tanh(math.sqrt(q) * z) ** 2)
    assert sb2 == pytest.approx(method.bias**2, rel=0.01)


@torch.no_grad()
def test_the_definition() -> None:
    block = unskip.plainify(cifar_resnet(14), "delta_tanh").layer2[0].double()
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64)
    hidden = torch.tanh(F.conv2d(x, block[0].weight, block[0].bias, stride=2, padding=1))
    torch.testing.assert_close(block(x), torch.tanh(F.conv2d(hidden, block[2].weight, block[2].bias, padding=1)))
    assert len(list(block.parameters())) == 4


def test_gradients_pass_110_layers() -> None:
    network = unskip.plainify(cifar_resnet(110), "delta_tanh")
    F.cross_entropy(network(torch.randn(4, 3, 16, 16)), torch.arange(4)).backward()
    norms = [m.weight.grad.norm().item() for m in network.layer1.modules() if isinstance(m, nn.Conv2d)]
    assert len(norms) == 36
    assert 0.3 < norms[0] / norms[-1] < 3


def test_gain_and_bias() -> None:
    torch.manual_seed(0)
    block = unskip.plainify(cifar_resnet(8), "delta_tanh", gain=2.0, bias=0.5).layer3[0]
    W = block[2].weight[:, :, 1, 1]
    torch.testing.assert_close(W @ W.T, 4 * torch.eye(64), rtol=0, atol=1e-5)
    assert 0.35 < block[2].bias.std() < 0.65


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gain": 0}, "gain=0 must be above 0"),
        ({"bias": -1}, "bias=-1 is a standard deviation"),
        ({"gain": "x"}, "gain='x'"),
    ],
)
def test_wrong_options(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=f"delta_tanh: {says}"):
        unskip.plainify(cifar_resnet(8), "delta_tanh", **options)
