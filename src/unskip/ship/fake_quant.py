"""Fake quantisation: layers that compute in float what the INT8 file computes, to measure it and to train for it.

    x -> s_x (clamp(round(x / s_x) + z, 0, 255) - z)      what a layer reads: uint8, one scale, range by min and max;
                                                           2^n - 1 in place of 255 for n bits
    W -> s_o clamp(round(W / s_o), -q, q)                 s_o = max |W_o| / q for each output channel o, q = 64 or 127

Gradients pass the rounding unchanged (Bengio et al. 2013, https://arxiv.org/abs/1308.3432), as PyTorch's operations do.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unskip._core.layers import behaves_as, has_ordinary_weight
from unskip._core.modules import copied
from unskip.methods import replaced

LARGEST = {7: 64, 8: 127}  # integers of a weight, by bits; others are symmetric too


class FakeQuantized(nn.Module):
    """A convolution or linear layer whose input and weight are rounded as in an INT8 file.

    The weight's scale follows the weight; the input's range is fixed, and stays with the layer in a network file.
    """

    def __init__(
        self, layer: nn.Conv2d | nn.Linear, low: float, high: float, bits: int, activation_bits: int = 8
    ) -> None:
        super().__init__()
        low, high = min(low, 0.0), max(high, 0.0)  # zero, which pads, must be one of the numbers
        self.layer = layer
        self.levels = 2**activation_bits - 1  # of the input, less one
        self.scale = (high - low) / self.levels or 1.0
        self.zero_point = round(-low / self.scale)
        self.bits = bits

    def to_ordinary(self) -> nn.Module:
        return self.layer

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero_point, 0, self.levels)
        weight = rounded(self.layer.weight, self.bits)
        if isinstance(self.layer, nn.Linear):
            return nn.functional.linear(x, weight, self.layer.bias)
        return self.layer._conv_forward(x, weight, self.layer.bias)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The weight of a layer as an INT8 file holds it: symmetric, with a scale for each output channel."""
    largest = LARGEST.get(bits, 2 ** (bits - 1) - 1)
    scale = weight.detach().abs().flatten(1).amax(1).float() / largest
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    zero = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -largest, largest)


def weighted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d | nn.Linear]]:
    """Path and layer of every ordinary convolution and linear layer of a model, each once."""
    for path, module in model.named_modules():
        if has_ordinary_weight(module) and behaves_as(module, nn.Conv2d, nn.Linear):
            assert isinstance(module, nn.Conv2d | nn.Linear)
            if not isinstance(module, nn.Conv2d) or module.padding_mode == "zeros":
                yield path, module


@torch.no_grad()
def fake_quantized(model: nn.Module, inputs: Tensor, *, bits: int = 8, activation_bits: int = 8) -> nn.Module:
    """A copy of a folded network that computes what its INT8 file will: to train on, and for `unskip.ship.quantize`.

    Args:
        model: a folded network in eval mode.
        inputs: some hundreds of inputs, whose minimum and maximum at each layer become its range.
        bits: of the weights, 2 to 8; `quantize` writes 7 and 8.
        activation_bits: of what layers read, 2 to 8; `quantize` writes 8.

    Returns:
        The network, each convolution and linear layer a `FakeQuantized`. `quantize` keeps its ranges.
    """
    for name, value in (("bits", bits), ("activation_bits", activation_bits)):
        if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= 8:
            raise ValueError(f"fake_quantized: {name}={value!r} must be a whole number from 2 to 8.")
    model = copied("fake_quantized", model)
    ranges: dict[nn.Module, tuple[float, float]] = {}

    def watch(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        low, high = ranges.get(layer, (math.inf, -math.inf))
        ranges[layer] = (min(low, float(args[0].min())), max(high, float(args[0].max())))

    layers = [layer for _, layer in weighted_layers(model)]
    if not layers:
        raise ValueError(f"fake_quantized: {type(model).__name__} has no ordinary convolution or linear layer.")
    run_watched(model, inputs, [layer.register_forward_pre_hook(watch) for layer in layers])
    quantized = {
        layer: FakeQuantized(layer, *ranges[layer], bits, activation_bits).train(layer.training)
        for layer in layers
        if layer in ranges
    }
    if model in quantized:
        return quantized[model]
    for parent in list(model.modules()):
        parent._modules.update({name: quantized[m] for name, m in parent._modules.items() if m in quantized})
    return model


def run_watched(model: nn.Module, inputs: Tensor, handles: list[RemovableHandle]) -> None:
    """Runs a model on inputs, 64 at a time, for the hooks with these handles, and removes them."""
    try:
        for chunk in inputs.split(64):
            model(chunk.clone())
    finally:
        for handle in handles:
            handle.remove()


def without_fake_quant(model: nn.Module) -> nn.Module:
    """A copy of a network with ordinary layers in place of its `FakeQuantized` ones."""
    model = copied("quantize", model)
    for module in list(model.modules()):
        if isinstance(module, FakeQuantized):
            model = replaced(model, module, module.layer)
    return model


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two sums of squares; 6 dB are a bit."""
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


def sqnr(exact: Tensor, found: Tensor) -> float:
    """The ratio of signal to quantisation noise in decibel."""
    exact, found = exact.double(), found.double()
    return decibel(float(exact.square().sum()), float((found - exact).square().sum()))
