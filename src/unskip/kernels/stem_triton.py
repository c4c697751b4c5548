"""3 x 3 max pooling of stride 2 on a GPU, as Triton kernels for channels last.

Which of a window's nine was the largest is kept, 3 row + column, in one byte for each output: the first of equals and
the last NaN, as in F.max_pool2d. A program has one row of outputs (forward) or of 2 x 2 squares of the image
(backward), `WIDE` of them by all channels. Reading and writing is all that it costs: `unskip.kernels.stem` has the
formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # numbers that one program holds: 8 for each of its 128 threads, which are read at once


@triton.jit
def pool_forward(  # type: ignore[no-untyped-def]
    x, y, code, high, wide, channels: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, WORK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # image and row of outputs
    o_w = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    o_h = tl.zeros_like(o_w) + row % high  # one number, as often as there are columns
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (o_w < wide)[:, None] & (c < channels)[None, :]
    largest = tl.full([WIDE, CHANNELS], float("-inf"), WORK)
    first = tl.where(o_h == 0, 3, 0) + tl.where(o_w == 0, 1, 0)
    best = tl.broadcast_to(first[:, None], [WIDE, CHANNELS]).to(tl.int8)
    for tap in tl.static_range(9):
        i_h = 2 * o_h + tap // 3 - 1
        i_w = 2 * o_w + tap % 3 - 1
        there = inside & ((i_h >= 0) & (i_w >= 0))[:, None]
        # pixels: of all images before, and of this one
        pixel = ((row // high) * (2 * high) + i_h) * (2 * wide) + i_w
        value = tl.load(x + pixel[:, None] * channels + c[None, :], mask=there, other=float("-inf")).to(WORK)
        wins = there & ((value > largest) | (value != value))
        largest = tl.where(wins, value, largest)
        best = tl.where(wins, tap, best).to(tl.int8)
    at = (row * wide + o_w[:, None]) * channels + c[None, :]
    tl.store(y + at, largest.to(y.dtype.element_ty), mask=inside)
    tl.store(code + at, best, mask=inside)


@triton.jit
def pool_backward(  # type: ignore[no-untyped-def]
    g, code, out, high, wide, channels: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr, WORK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # image and row of squares
    o_w = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    o_h = tl.zeros_like(o_w) + row % high  # one number, as often as there are columns
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (o_w < wide)[:, None] & (c < channels)[None, :]
    right = inside & (o_w + 1 < wide)[:, None]
    below = inside & (o_h + 1 < high)[:, None]
    corner = right & below
    at = (row * wide + o_w[:, None]) * channels + c[None, :]
    down = wide * channels
    g00 = tl.load(g + at, mask=inside, other=0).to(WORK)
    g01 = tl.load(g + at + channels, mask=right, other=0).to(WORK)
    g10 = tl.load(g + at + down, mask=below, other=0).to(WORK)
    g11 = tl.load(g + at + down + channels, mask=corner, other=0).to(WORK)
    c00 = tl.load(code + at, mask=inside, other=9)
    c01 = tl.load(code + at + channels, mask=right, other=9)
    c10 = tl.load(code + at + down, mask=below, other=9)
    c11 = tl.load(code + at + down + channels, mask=corner, other=9)
    none = tl.zeros([WIDE, CHANNELS], WORK)
    p00 = tl.where(c00 == 4, g00, none)
    p01 = tl.where(c00 == 5, g00, none) + tl.where(c01 == 3, g01, none)
    p10 = tl.where(c00 == 7, g00, none) + tl.where(c10 == 1, g10, none)
    p11 = tl.where(c00 == 8, g00, none) + tl.where(c01 == 6, g01, none)
    p11 = p11 + tl.where(c10 == 2, g10, none) + tl.where(c11 == 0, g11, none)
    pixel = ((row // high) * (2 * high) + 2 * o_h) * (2 * wide) + 2 * o_w
    into = pixel[:, None] * channels + c[None, :]
    kind = out.dtype.element_ty
    tl.store(out + into, p00.to(kind), mask=inside)
    tl.store(out + into + channels, p01.to(kind), mask=inside)
    tl.store(out + into + 2 * down, p10.to(kind), mask=inside)
    tl.store(out + into + 2 * down + channels, p11.to(kind), mask=inside)


def tiles(high: int, wide: int, channels: int, batch: int) -> tuple[tuple[int, int, int], int, int]:
    """The grid, and how many outputs by how many channels a program has."""
    across = min(triton.next_power_of_2(channels), 128)
    along = min(triton.next_power_of_2(wide), max(1, TILE // across))
    return (batch * high, triton.cdiv(wide, along), triton.cdiv(channels, across)), along, across


def work(x: Tensor) -> tl.dtype:
    """The precision that is computed in."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def pool(x: Tensor, largest: Tensor, code: Tensor) -> None:
    """Writes the largest of each window, and which of its nine that is; all in channels last."""
    batch, channels, high, wide = code.shape
    grid, along, across = tiles(high, wide, channels, batch)
    with torch.cuda.device_of(x):
        pool_forward[grid](x, largest, code, high, wide, channels, WIDE=along, CHANNELS=across, WORK=work(x))


def pool_gradient(gradient: Tensor, code: Tensor, image: Tensor) -> None:
    """Writes the gradient of the image: for each pixel of a square the sum over its windows, in order."""
    batch, channels, high, wide = code.shape
    grid, along, across = tiles(high, wide, channels, batch)
    with torch.cuda.device_of(gradient):
        pool_backward[grid](
            gradient, code, image, high, wide, channels, WIDE=along, CHANNELS=across, WORK=work(gradient)
        )
