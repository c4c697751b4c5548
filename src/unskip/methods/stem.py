"""The stem of a network, faster: the same convolution and the same pooling, computed another way.

    y[o] = Σ_k w[k] x[2 o + k - p]     a convolution of stride 2 over few channels. With x cut into 2 x 2 squares, whose
                                       four pixels stand side by side as channels, it is one of stride 1 over 4 C
                                       channels with half the kernel: no arithmetic is wasted on channels of padding.
    code[o] = argmax_k x[2 o + k - 1]  3 x 3 max pooling of stride 2. From the code of the winner, one byte for each
                                       output, the gradient of each of the four pixels of a square is a sum over the
                                       1, 2, 2 and 4 windows that the pixel stands in.

Both are modules with the parameters, the names in `state_dict` and the class of the ordinary ones, whose path they take
for sizes that they are not made for.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNED = 16  # channels that tensor cores take as they are; fewer are padded by a kernel of its own


def space_to_depth_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, channels: int = 0) -> Tensor:
    """A convolution of stride 2 with odd kernel k and padding (k - 1) / 2 of an image with even sides.

    Args:
        x: (B, C, H, W).
        weight: (O, C, k, k).
        channels: how many the cut image is filled up to with zeros, beside its own 4 C.
    """
    kernel = weight.shape[-1]
    pad = kernel // 2
    front = pad % 2  # a column of zeros before the kernel, where it begins in the middle of a square, else behind it
    before, taps = (pad + front) // 2, (kernel + 1) // 2
    after = taps - 1 - before
    batch, inner, height, width = x.shape
    fill = max(0, channels - 4 * inner)
    squares = x.permute(0, 2, 3, 1).reshape(batch, height // 2, 2, width // 2, 2, inner)
    squares = squares.transpose(2, 3).reshape(batch, height // 2, width // 2, 4 * inner)
    squares = F.pad(squares, (0, fill, before, after, before, after)).permute(0, 3, 1, 2)
    w = F.pad(weight, (front, 1 - front) * 2).unflatten(3, (taps, 2)).unflatten(2, (taps, 2))  # (O, C, k, 2, k, 2)
    w = F.pad(w.permute(0, 2, 4, 3, 5, 1).flatten(3), (0, fill)).permute(0, 3, 1, 2)
    return F.conv2d(squares, w, bias)


def pool_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """3 x 3 max pooling, stride 2, padding 1, of an image with even sides, and which of the nine was the largest.

    The first of equals wins and the last NaN, as in F.max_pool2d.
    """
    high, wide = x.shape[2] // 2, x.shape[3] // 2
    first = [(torch.arange(side, device=x.device) == 0).to(torch.int8) for side in (high, wide)]
    # What stands in no window's corner beyond the edge: where nothing is larger than -inf, the first inside wins.
    code = (3 * first[0][:, None] + first[1]).expand(x.shape[0], x.shape[1], high, wide)
    padded = F.pad(x, (1, 0, 1, 0), value=-torch.inf)
    largest = torch.full_like(x[:, :, ::2, ::2], -torch.inf)
    for tap in range(9):
        row, column = divmod(tap, 3)
        value = padded[:, :, row : row + 2 * high - 1 : 2, column : column + 2 * wide - 1 : 2]
        wins = (value > largest) | value.isnan()
        largest, code = torch.where(wins, value, largest), torch.where(wins, tap, code)
    return largest, code.to(torch.int8)


def pool_gradient(gradient: Tensor, code: Tensor) -> Tensor:
    """The gradient of the image whose pooling `pool_codes` did: for each pixel of a square its windows, in order."""

    def of(tap: int, down: int = 0, right: int = 0) -> Tensor:
        """What this window, or the one below or to the right, gives to the pixel at its tap."""
        given = torch.where(code == tap, gradient, 0)
        return F.pad(given[:, :, down:, right:], (0, right, 0, down))

    upper = [of(4), of(5) + of(3, right=1)]
    lower = [of(7) + of(1, down=1), of(8) + of(6, right=1) + of(2, down=1) + of(0, down=1, right=1)]
    rows = [torch.stack(row, dim=-1).flatten(-2) for row in (upper, lower)]
    return torch.stack(rows, dim=-2).flatten(-3, -2)


class Pool(torch.autograd.Function):
    """3 x 3 max pooling that keeps one byte for each output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        largest, code = pool_codes(x)
        ctx.save_for_backward(code)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (code,) = ctx.saved_tensors
        return pool_gradient(gradient, code)


class StemConv2d(nn.Conv2d):
    """A convolution of stride 2, computed over squares of 2 x 2 pixels where the image has even sides."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[2] % 2 or x.shape[3] % 2:
            return super().forward(x)
        return space_to_depth_conv(x, self.weight, self.bias, channels=ALIGNED)
