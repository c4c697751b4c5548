"""σ(s u + t), then a 3 x 3 depthwise convolution, on a GPU, as Triton kernels for channels last.

What the convolution reads is made from u as it is loaded, forwards and backwards, and never written. A thread has
squares of a few outputs, for a few channels each: every pixel is loaded, and made, once for all outputs of the square,
and all is loaded before anything is computed, so that enough is on its way. The formulas are in
`unskip.kernels.depthwise`.
"""

# Tuples grow under one name, and by +, since Triton does not know (*a, b).
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"
import torch
import triton
import triton.language as tl
from torch import Tensor

from unskip.kernels.stem_triton import work

EACH = 4  # channels of a thread
# By stride: rows and columns of a square of outputs, and squares of a program at a time. The fastest of those timed in
# benchmarks/records/2026-11-16_mobilenet_h200.
FORWARD = {1: (2, 7, 4), 2: (2, 2, 8)}
BACKWARD = {1: (2, 2, 8), 2: (2, 2, 8)}
WAVE = 1056  # programs that keep a large GPU busy; backwards one goes on with more squares where there would be more


@triton.jit
def activated(n, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """ReLU, bounded by TOP unless that is 0."""
    n = tl.maximum(n, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if TOP != 0:
        n = tl.minimum(n, TOP, propagate_nan=tl.PropagateNan.ALL)
    return n


@triton.jit
def vector(x, c, channels: tl.constexpr, WORK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One number for each channel of the program."""
    return tl.load(x + c, mask=c < channels, other=0).to(WORK)[None, :]


@triton.jit
def taps_of(weight, c, channels: tl.constexpr, WORK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nine weights, which lie as (9, channels)."""
    w = ()
    for k in tl.static_range(9):
        w = w + (vector(weight + k * channels, c, channels, WORK),)
    return w


@triton.jit
def pixels(  # type: ignore[no-untyped-def]
    x, image, row, column, c, mine, high, wide: tl.constexpr, channels: tl.constexpr,
    TALL: tl.constexpr, BROAD: tl.constexpr, other,
):  # fmt: skip
    """TALL x BROAD pixels from this corner on, row by row, in the precision of x; outside of the image `other`."""
    corner = x + ((image.to(tl.int64) * high + row) * wide + column)[:, None] * channels + c[None, :]
    found = ()
    for k in tl.static_range(TALL * BROAD):
        r, m = row + k // BROAD, column + k % BROAD
        there = mine & ((r >= 0) & (r < high) & (m >= 0) & (m < wide))[:, None]
        found = found + (tl.load(corner + (k // BROAD * wide + k % BROAD) * channels, mask=there, other=other),)
    return found


@triton.jit
def share(channels: tl.constexpr, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of this program among those of its channels, and its channels; programs of one pixel run together."""
    chunks: tl.constexpr = (channels + CHANNELS - 1) // CHANNELS
    return tl.program_id(0) // chunks, tl.program_id(0) % chunks * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def place(square, high, wide: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Image, first row and first column of a square of outputs."""
    across: tl.constexpr = (wide + COLUMNS - 1) // COLUMNS
    each = tl.cdiv(high, ROWS) * across
    return square // each, square % each // across * ROWS, square % across * COLUMNS


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    u, scale, shift, weight, bias, y, images, high, wide: tl.constexpr, channels: tl.constexpr,
    STRIDE: tl.constexpr, TOP: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARES: tl.constexpr, CHANNELS: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """y = w ⊛ σ(s u + t), or σ(w ⊛ σ(u + t) + b), with or without t. `high` and `wide` are those of y."""
    TALL: tl.constexpr = (ROWS - 1) * STRIDE + 3
    BROAD: tl.constexpr = (COLUMNS - 1) * STRIDE + 3
    program, c = share(channels, CHANNELS)
    image, o, j = place(program * SQUARES + tl.arange(0, SQUARES), high, wide, ROWS, COLUMNS)
    mine = (image < images)[:, None] & (c < channels)[None, :]
    s, t, outside = 1.0, 0.0, 0.0
    if SHIFT:
        t = vector(shift, c, channels, WORK)
        outside = float("-inf")  # from which σ makes 0
    if SCALE:
        s = vector(scale, c, channels, WORK)
        s = tl.where(tl.abs(s) < 1e-30, 1e-30, s)
        outside = tl.where(s > 0, float("-inf"), float("inf")).to(u.dtype.element_ty)
    v = pixels(
        u, image, o * STRIDE - 1, j * STRIDE - 1, c, mine, high * STRIDE, wide * STRIDE, channels, TALL, BROAD, outside
    )
    w = taps_of(weight, c, channels, WORK)
    x = ()
    for k in tl.static_range(TALL * BROAD):
        x = x + (activated(v[k].to(WORK) * s + t, TOP),)
    if BIAS:
        b = vector(bias, c, channels, WORK)
    corner = y + ((image.to(tl.int64) * high + o) * wide + j)[:, None] * channels + c[None, :]
    for k in tl.static_range(ROWS * COLUMNS):
        done = tl.zeros([SQUARES, CHANNELS], WORK)
        for tap in tl.static_range(9):
            done += w[tap] * x[(k // COLUMNS * STRIDE + tap // 3) * BROAD + k % COLUMNS * STRIDE + tap % 3]
        if BIAS:
            done = activated(done + b, TOP)
        there = mine & ((o + k // COLUMNS < high) & (j + k % COLUMNS < wide))[:, None]
        at = corner + (k // COLUMNS * wide + k % COLUMNS) * channels
        tl.store(at, done.to(y.dtype.element_ty), mask=there)


@triton.jit
def backward(  # type: ignore[no-untyped-def]
    g, u, scale, shift, weight, out, sums, images, high, wide: tl.constexpr, channels: tl.constexpr,
    STRIDE: tl.constexpr, TOP: tl.constexpr, TIMES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARES: tl.constexpr, CHANNELS: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """The gradient of u, and of each channel the sums over my pixels: nine for w, those for t and for s.

    `high` and `wide` are those of the output. Of u, a square has the pixels under its outputs: as many, or with stride
    2 four times as many.
    """
    EDGE: tl.constexpr = 2 - STRIDE  # rows and columns of outputs before the square that read from its pixels
    TALL: tl.constexpr = ROWS + 1 + EDGE
    BROAD: tl.constexpr = COLUMNS + 1 + EDGE
    DOWN: tl.constexpr = ROWS * STRIDE
    ALONG: tl.constexpr = COLUMNS * STRIDE
    program, c = share(channels, CHANNELS)
    s, t = vector(scale, c, channels, WORK), vector(shift, c, channels, WORK)
    w = taps_of(weight, c, channels, WORK)
    total = ()
    for _ in tl.static_range(11):
        total = total + (tl.zeros([SQUARES, CHANNELS], WORK),)
    for time in range(TIMES):
        image, o, j = place((program * TIMES + time) * SQUARES + tl.arange(0, SQUARES), high, wide, ROWS, COLUMNS)
        mine = (image < images)[:, None] & (c < channels)[None, :]
        r, m = o * STRIDE, j * STRIDE
        around = pixels(g, image, o - EDGE, j - EDGE, c, mine, high, wide, channels, TALL, BROAD, 0.0)
        v = pixels(u, image, r, m, c, mine, high * STRIDE, wide * STRIDE, channels, DOWN, ALONG, 0.0)
        corner = out + ((image.to(tl.int64) * high * STRIDE + r) * (wide * STRIDE) + m)[:, None] * channels + c[None, :]
        for k in tl.static_range(DOWN * ALONG):
            there = mine & ((r + k // ALONG < high * STRIDE) & (m + k % ALONG < wide * STRIDE))[:, None]
            value = v[k].to(WORK)
            n = tl.where(there, value * s + t, 0.0)
            x = activated(n, TOP)
            gx = tl.zeros([SQUARES, CHANNELS], WORK)
            grown = ()
            for tap in tl.static_range(9):
                # Through this weight the pixel was a part of an output, if there is one at a whole number of strides.
                if (k // ALONG + 1 - tap // 3) % STRIDE + (k % ALONG + 1 - tap % 3) % STRIDE == 0:
                    gy = around[
                        ((k // ALONG + 1 - tap // 3) // STRIDE + EDGE) * BROAD
                        + (k % ALONG + 1 - tap % 3) // STRIDE
                        + EDGE
                    ].to(WORK)
                    gx += w[tap] * gy
                    grown = grown + (total[tap] + x * gy,)
                else:
                    grown = grown + (total[tap],)
            off = n <= 0
            if TOP != 0:
                off = off | (n >= TOP)
            gn = tl.where(off, 0.0, gx)
            total = grown + (total[9] + gn, total[10] + gn * value)
            at = corner + (k // ALONG * (wide * STRIDE) + k % ALONG) * channels
            tl.store(at, (gn * s).to(out.dtype.element_ty), mask=there)
    to = sums + program.to(tl.int64) * 11 * channels + c
    for k in tl.static_range(11):
        tl.store(to + k * channels, tl.sum(total[k], 0), mask=c < channels)


def width(channels: int) -> int:
    """Channels of a program: as many as lie in 128 bytes, or fewer where too many of these would be none."""
    for across in (64, 32):
        if triton.cdiv(channels, across) * across <= 1.1 * channels:
            return across
    return 16


def taps(weight: Tensor) -> Tensor:
    """(C, 1, 3, 3) as (9, C), so that neighbouring channels lie side by side."""
    return weight.flatten(1).T.contiguous()


def warps(squares: int, across: int) -> int:
    return max(1, squares * across // (32 * EACH))


def convolve(
    u: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor | None, y: Tensor,
    stride: int, top: float,
) -> None:  # fmt: skip
    """Writes y; the images in channels last, the vectors contiguous."""
    images, channels, high, wide = y.shape
    rows, columns, squares = FORWARD[stride]
    across = width(channels)
    squares = squares * 64 // across
    every = images * triton.cdiv(high, rows) * triton.cdiv(wide, columns)
    with torch.cuda.device_of(u):
        forward[(triton.cdiv(channels, across) * triton.cdiv(every, squares),)](
            u, scale, shift, taps(weight), bias, y, images, high, wide, channels,
            STRIDE=stride, TOP=top, SCALE=scale is not None, SHIFT=shift is not None, BIAS=bias is not None,
            ROWS=rows, COLUMNS=columns, SQUARES=squares, CHANNELS=across, WORK=work(u),
            num_warps=warps(squares, across),
        )  # fmt: skip


def differentiate(
    g: Tensor, u: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, out: Tensor, stride: int, top: float
) -> Tensor:
    """Writes the gradient of u. Returns (11, channels): the gradients of the nine weights, of shift and of scale."""
    images, channels, high, wide = g.shape
    rows, columns, squares = BACKWARD[stride]
    across = width(channels)
    squares = squares * 64 // across
    every = triton.cdiv(images * triton.cdiv(high, rows) * triton.cdiv(wide, columns), squares)
    chunks = triton.cdiv(channels, across)
    times = min(32, triton.next_power_of_2(max(1, every * chunks // WAVE)))
    programs = triton.cdiv(every, times)
    sums = u.new_empty(programs, 11, channels, dtype=torch.promote_types(u.dtype, torch.float32))
    with torch.cuda.device_of(u):
        backward[(chunks * programs,)](
            g, u, scale, shift, taps(weight), out, sums, images, high, wide, channels,
            STRIDE=stride, TOP=top, TIMES=times, ROWS=rows, COLUMNS=columns, SQUARES=squares, CHANNELS=across,
            WORK=work(u), num_warps=warps(squares, across),
        )  # fmt: skip
    return sums.sum(0)
