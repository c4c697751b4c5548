"""The loss in few bits: against rounding by hand, and on networks that read tokens."""

import math

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.models.gpt import GPT
from unskip.ship import loss_in_bits


def rounded_by_hand(x: Tensor, low: Tensor, high: Tensor, largest: int, smallest: int, zero: Tensor) -> Tensor:
    scale = (high - low) / (largest - smallest)
    return scale * ((x / scale + zero).round().clamp(smallest, largest) - zero)


@pytest.mark.parametrize("activations", [8, 6, 3])
@torch.no_grad()
def test_one_layer_by_hand(activations: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4).eval()
    calibrate, x, y = torch.randn(50, 6), torch.randn(40, 6), torch.randint(4, (40,))
    found = loss_in_bits(layer, calibrate, (x, y), bits=[(8, activations)])
    low, high = calibrate.min().clamp(max=0), calibrate.max().clamp(min=0)
    levels = 2**activations - 1
    zero = torch.round(-low / ((high - low) / levels))
    read = rounded_by_hand(x, low, high, levels, 0, zero)
    bound = layer.weight.abs().amax(1, keepdim=True)
    weight = rounded_by_hand(layer.weight, -bound, bound, 127, -127, torch.zeros(()))
    expected = F.cross_entropy(F.linear(read, weight, layer.bias), y).item()
    assert found.exact == pytest.approx(F.cross_entropy(layer(x), y).item(), rel=1e-6)
    assert found.quantized[8, activations] == pytest.approx(expected, rel=1e-5)
    assert found.increase((8, activations)) == pytest.approx(expected - found.exact, abs=1e-5)


def test_transformers_beside_their_residual_twin() -> None:
    torch.manual_seed(0)
    ids = torch.randint(65, (6, 17))
    twin = GPT(num_classes=65, width=32, depth=2, heads=4, context=16).eval()
    plain = unskip.plainify(twin, "pnnh", attention="shaped").eval()
    found = loss_in_bits(plain, ids[:, :-1], (ids[:, :-1], ids[:, 1:]), residual=twin)
    assert found.residual is not None
    for each, model in ((found, plain), (found.residual, twin)):
        logits = model(ids[:, :-1])
        assert each.exact == pytest.approx(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item(), rel=1e-5)
        assert 0 < abs(each.increase((8, 8))) < 0.02
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["network", "float", "W8A8", "W8A6"]
    assert f"{found.residual.quantized[8, 6]:.4f} ({found.residual.increase((8, 6)):+.4f})" in lines[3]
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, num_heads=4, depth=2, num_classes=5)
    vit = unskip.plainify(vit, "pnnh", attention="shaped").eval()
    images = torch.randn(4, 3, 32, 32)
    found = loss_in_bits(vit, images, (images, torch.arange(4)), bits=[(8, 8), (2, 2)])
    assert abs(found.increase((8, 8))) < abs(found.increase((2, 2)))
    assert math.isfinite(found.quantized[2, 2])


def test_what_is_refused() -> None:
    layer, x = nn.Linear(6, 4).eval(), torch.randn(3, 6)
    with pytest.raises(ValueError, match="test has 3 inputs and 2 targets; give as many of both"):
        loss_in_bits(layer, x, (x, torch.zeros(2, dtype=torch.long)))
    with pytest.raises(ValueError, match="activation_bits=9 must be a whole number from 2 to 8"):
        loss_in_bits(layer, x, (x, torch.zeros(3, dtype=torch.long)), bits=[(8, 9)])
    low = unskip.ship.fake_quantized(nn.Sequential(layer), x, bits=7, activation_bits=6)
    with pytest.raises(ValueError, match="reads numbers of fewer than 8 bits"):
        unskip.quantize(low, "net.onnx", calibrate=x)
