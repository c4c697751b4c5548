"""Equalisation keeps every bit of the output; bias correction takes back the mean that rounding moves."""

import pytest
import torch
from torch import nn

from unskip.ship import equalize, fake_quantized, quantize
from unskip.ship.equalize import bias_shifts, output_sqnr, scales, shifted
from unskip.ship.fake_quant import rounded


def uneven() -> nn.Sequential:
    """Channels that differ a thousandfold, through activations, pooling, groups and a linear layer."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LeakyReLU(0.1),
        nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(8, 12, 3, 2, groups=2), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
        nn.Linear(12, 5),
    ).eval()  # fmt: skip
    with torch.no_grad():
        for layer in (net[0], net[2], net[5]):
            size = 10 ** torch.linspace(-1.5, 1.5, len(layer.weight))[torch.randperm(len(layer.weight))]
            layer.weight *= size.view(-1, 1, 1, 1)
            layer.bias *= size
    return net


def test_the_function_is_the_same_to_the_bit_and_is_rounded_with_less_error() -> None:
    net, x = uneven(), torch.randn(64, 3, 8, 8)
    same = equalize(net, x)
    with torch.no_grad():
        exact = net(x)
        assert torch.equal(same(x), exact)
    changed = [i for i in (0, 2, 5, 9) if not torch.equal(same[i].weight, net[i].weight)]
    assert changed == [0, 2, 5, 9]
    for i in (0, 2, 5):  # by powers of two, channel by channel
        s = (net[i].weight / same[i].weight).flatten(1)[:, 0].log2()
        assert torch.equal(s, s.round())
        assert s.abs().max() >= 2
    assert output_sqnr(same, x, 7, exact) > output_sqnr(net, x, 7, exact) + 1


def test_scales_balance_the_range_of_a_channel_with_that_of_its_column() -> None:
    second = nn.Linear(3, 2)
    second.weight.data = torch.tensor([[1.0, 1.0, 0.0], [-4.0, 0.25, 0.0]])
    # sqrt(r / w): sqrt(4 / 4) and sqrt(16 / 1), over their geometric mean 2; the dead column stays as it is.
    assert scales(torch.tensor([4.0, 16.0, 5.0]), second).tolist() == [0.5, 2.0, 1.0]


def test_a_channel_that_something_else_reads_is_left_alone() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).relu()
            return y + self.b(y)

    net, x = Skip().eval(), torch.randn(4, 3, 4, 4)
    same = equalize(net, x)
    assert torch.equal(same.a.weight, net.a.weight)
    assert torch.equal(same.b.weight, net.b.weight)


def test_bias_correction_takes_back_the_mean_error() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()).eval(), torch.rand(128, 4, 8, 8)
    corrected = shifted(net, bias_shifts(net, x, 3))
    with torch.no_grad():
        exact = nn.functional.conv2d(x, net[0].weight, net[0].bias)
        coarse = rounded(net[0].weight, 3)
        before, after = (nn.functional.conv2d(x, coarse, m[0].bias) - exact for m in (net, corrected))
    assert before.mean((0, 2, 3)).abs().max() > 0.01
    assert after.mean((0, 2, 3)).abs().max() < 1e-5


@pytest.mark.parametrize("bits", [7, 8])
def test_only_seven_bits_are_safe_where_two_products_are_added_in_16_bits(bits: int) -> None:
    """A CPU without VNNI adds uint8 x int8 + uint8 x int8 in int16 (vpmaddubsw), which saturates at 32767."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 16)
    weight = rounded(layer.weight, bits)
    scale = layer.weight.abs().amax(1) / {7: 64, 8: 127}[bits]
    largest = (weight / scale[:, None]).round().abs().max()
    assert (2 * 255 * largest <= 32767) == (bits == 7)


def test_fake_quantisation_is_quantise_and_dequantise() -> None:
    """Beside the formula, in NumPy's words."""
    layer = nn.Linear(2, 1)
    layer.weight.data, layer.bias.data = torch.tensor([[0.5, -1.0]]), torch.zeros(1)
    x = torch.tensor([[-1.0, 0.3], [3.0, 1.0]])
    net = fake_quantized(layer.eval(), x, bits=8)
    step = 4 / 255
    q = ((x / step).round() + 64).clamp(0, 255) - 64
    w = (layer.weight * 127).round() / 127
    torch.testing.assert_close(net(x), (q * step) @ w.T)


def test_one_scale_for_a_layer_is_never_equalised(tmp_path) -> None:  # type: ignore[no-untyped-def]
    net, x = uneven(), torch.randn(64, 3, 8, 8)
    with pytest.raises(ValueError, match="equalize=True does harm with per_channel=False"):
        quantize(net, tmp_path / "a.onnx", calibrate=x, equalize=True, per_channel=False)
    by_channel = quantize(net, tmp_path / "b.onnx", calibrate=x, limit=100, residual=net)
    by_layer = quantize(net, tmp_path / "c.onnx", calibrate=x, limit=100, per_channel=False)
    assert by_channel.equalized
    assert not by_layer.equalized
    assert by_channel.accuracy.sqnr > by_layer.accuracy.sqnr
    assert "equalised" in by_channel.metadata["int8"]
    assert by_channel.residual == by_channel.accuracy
    assert "residual INT8" in str(by_channel)
    # Another function is compared with its own float network.
    apart = quantize(net, tmp_path / "d.onnx", calibrate=x, limit=100, residual=uneven())
    assert apart.accuracy == by_channel.accuracy
    assert apart.residual.sqnr > 15


def test_a_network_that_can_not_be_equalised_is_quantised_as_it_is(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Layers with one weight can't have scales of their own; by default that is no reason to refuse them."""
    net = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    net[0].weight.data *= torch.logspace(-3, 2, 4).view(4, 1, 1, 1)
    net[2].weight = net[0].weight
    x = torch.randn(64, 4, 4, 4)
    with pytest.raises(ValueError, match="equalize: the outputs are not the same numbers afterwards: layers share"):
        quantize(net.eval(), tmp_path / "a.onnx", calibrate=x, limit=100, equalize=True)
    assert not quantize(net, tmp_path / "a.onnx", calibrate=x, limit=100).equalized
