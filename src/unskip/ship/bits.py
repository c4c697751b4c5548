"""What few bits cost in loss: W8A8 and W8A6 of a network beside that of its residual twin.

By fake quantisation (`unskip.ship.fake_quant`) of every convolution and linear layer: weights with a scale for each
output channel, what a layer reads with one scale whose range is the minimum and maximum on the calibration data.
Embeddings, norms, softmax and the products of attention stay in float. For transformers too, whose answers are logits
of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.ship.accuracy import CHUNK
from unskip.ship.fake_quant import fake_quantized
from unskip.ship.fold import fold
from unskip.surgery.readers.transformer import SkipFreeBlock

W8 = ((8, 8), (8, 6))  # bits of weights and of what layers read


@dataclass(frozen=True, kw_only=True)
class BitLoss:
    """Cross-entropy of a network in float and in few bits, in nats; of its residual twin where it was given."""

    exact: float
    quantized: dict[tuple[int, int], float]  # by bits of weights and of activations
    residual: "BitLoss | None" = None

    def increase(self, bits: tuple[int, int]) -> float:
        return self.quantized[bits] - self.exact

    def __str__(self) -> str:
        networks = {"network": self} | ({"residual": self.residual} if self.residual is not None else {})
        lines = [f"{'':<10}" + "".join(f"{name:>22}" for name in networks)]
        lines.append(f"{'float':<10}" + "".join(f"{each.exact:>22.4f}" for each in networks.values()))
        for w, a in self.quantized:
            cells = (f"{each.quantized[w, a]:.4f} ({each.increase((w, a)):+.4f})" for each in networks.values())
            lines.append(f"{f'W{w}A{a}':<10}" + "".join(f"{cell:>22}" for cell in cells))
        return "\n".join(lines)


def loss_in_bits(
    model: nn.Module,
    calibrate: Tensor,
    test: tuple[Tensor, Tensor],
    *,
    bits: Sequence[tuple[int, int]] = W8,
    residual: nn.Module | None = None,
) -> BitLoss:
    """Returns the loss of a network in float and with few bits.

    Args:
        model: in eval mode; what `unskip.fold` takes is folded first.
        calibrate: inputs whose minimum and maximum at each layer become its range.
        test: inputs and their classes; of a text the tokens behind those of the input, (B, T) both.
        bits: of weights and of what layers read, 2 to 8 each.
        residual: the residual twin, in eval mode, to be measured in the same way.
    """
    x, y = test
    if len(x) != len(y) or not len(x):
        raise ValueError(
            f"loss_in_bits: test has {len(x)} inputs and {len(y)} targets; give as many of both, one at least."
        )
    if any(isinstance(module, SkipFreeBlock) for module in model.modules()):
        model = fold(model, example=calibrate[:2])
    exact = cross_entropy(model, x, y)
    found = {(w, a): cross_entropy(fake_quantized(model, calibrate, bits=w, activation_bits=a), x, y) for w, a in bits}
    twin = None if residual is None else loss_in_bits(residual, calibrate, test, bits=bits)
    return BitLoss(exact=exact, quantized=found, residual=twin)


@torch.no_grad()
def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean over all answers, in nats."""
    total = 0.0
    for inputs, targets in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        logits = model(inputs.clone())
        total += F.cross_entropy(logits.flatten(0, -2).double(), targets.flatten(), reduction="sum").item()
    return total / y.numel()
