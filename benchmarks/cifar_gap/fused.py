"""Eight Triton kernels a block instead of about twenty-five.

Narrow 3x3 convolutions (8 to 128 channels) run far under the memory rate in the usual library. Tensors are NHWC, seen
as (P, C) with P = B * H * W pixels. Norm statistics are sums that the kernels accumulate; weight gradients are added
straight into the flat float32 gradient of the network.

    forward   u = W_1 * x, and the sums of u and u^2
              a = relu(norm(u))
              y = relu(W_2 * a + M x)
    backward  g = gy [y > 0]; a block returns gx [x > 0], which its producer, always a relu, would do anyway,
              so only the last block of a stage masks
              b = (W_2^T * g) [a > 0], and the sums of b and b u_hat (the gradients of the norm's bias and gain)
              v = norm'(b)
              gx = (W_1^T * v + M g) [x > 0];  dW_2 = g (x) a;  dW_1 = v (x) x

With a second norm (ResNet, or PNNH with norm2) three element-wise kernels are added.

A fitted coder W_dec * relu(W_enc * x) rides along: W_1 stands above W_enc and W_2 beside W_dec, so u and a have C_B
more channels, the code, which no norm touches and whose weights get no gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PATHS = {
    "none": (0, 0),
    "identity": (1, 1),
    "half": (2, 1),
    "pair": (3, 2),
    "turns": (4, 2),
    "quarter": (5, 4),
}  # code, channels mixed


@triton.jit
def mixed(a, p, c, C: tl.constexpr, PATH: tl.constexpr, N: tl.constexpr, shape: tl.constexpr, mask):
    """Rows p, columns c of M a; M is symmetric."""
    total = tl.zeros(shape, tl.float32)
    for j in tl.static_range(N):
        if PATH == 4:  # noqa: SIM108  (a constant: only one branch is compiled)
            cc = ((((c + C - 1) % C) ^ j) + 1) % C
        else:
            cc = c ^ j
        v = tl.load(a + p[:, None] * C + cc[None, :], mask=mask, other=0.0).to(tl.float32)
        if PATH == 2:
            v = tl.where(c[None, :] < C // 2, v, 0.0)
        total += v
    if N > 1:
        total = total * (1.0 / N)
    return total


@triton.jit
def norm_vectors(sums, squares, gamma, beta, c, normed, P: tl.constexpr):
    """Mean, 1/std, gain and bias of the channels c; the identity's where they are not `normed`."""
    mean = tl.load(sums + c, mask=normed, other=0.0) / P
    var = tl.load(squares + c, mask=normed, other=0.0) / P - mean * mean
    rstd = tl.where(normed, tl.rsqrt(tl.maximum(var, 0.0) + 1e-5), 1.0)
    return mean, rstd, tl.load(gamma + c, mask=normed, other=1.0), tl.load(beta + c, mask=normed, other=0.0)


@triton.jit
def conv_kernel(
    src, w, out, sums, squares, e1, e2, out_sums, out_sums2,
    P: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    CI: tl.constexpr, CO: tl.constexpr, COP: tl.constexpr, BLOCK: tl.constexpr,
    CT: tl.constexpr, RP: tl.constexpr,  # inputs read through all taps; the others, padded, through the centre alone
    ALL: tl.constexpr,  # taps of the kernel: 9 (3x3) or 1 (1x1)
    TAPS: tl.constexpr, KP: tl.constexpr,  # taps of one row taken together (1 or 3), and TAPS * CT padded
    FLIP: tl.constexpr,  # transposed convolution
    EPILOGUE: tl.constexpr,  # 0 none; 1 relu(acc + M e1); 2 acc [e2 > 0]; 3 (acc + M e1) [e2 > 0]
    STATS: tl.constexpr,  # 0 none; 1 sums of out and out^2; 2 sums of out and out * u_hat, u = e1
    NORMED: tl.constexpr,  # so many outputs, the first, have them
    PATH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, col = (p // W) % H, p % W
    k, co = tl.arange(0, KP), tl.arange(0, COP)
    om = co < CO
    acc = tl.zeros((BLOCK, COP), tl.float32)
    for t in range(ALL // TAPS):
        dy = t * TAPS // 3 - 1 if ALL == 9 else 0
        dx = -1 if TAPS == 3 else (t % 3 - 1 if ALL == 9 else 0)
        km = k < TAPS * CT
        ok = (row + dy >= 0) & (row + dy < H)
        if TAPS == 3:
            column = col[:, None] + (k // CT)[None, :] - 1
            mask = ok[:, None] & km[None, :] & (column >= 0) & (column < W)
        else:
            mask = (ok & (col + dx >= 0) & (col + dx < W))[:, None] & km[None, :]
        at_v = k // CT * CI + k % CT
        v = tl.load(src + (p + dy * W + dx)[:, None] * CI + at_v[None, :], mask=mask, other=0.0)
        if FLIP:
            tap = ALL - 1 - t * TAPS - k // CT
            at_w = (k % CT * (ALL * CO) + tap * CO)[:, None] + co[None, :]
        else:
            at_w = co[None, :] * (ALL * CI) + t * TAPS * CI + at_v[:, None]
        weight = tl.load(w + at_w, mask=km[:, None] & om[None, :], other=0.0)
        acc = tl.dot(v, weight, acc)
    if CT < CI:
        r = CT + tl.arange(0, RP)
        rm = r < CI
        v = tl.load(src + p[:, None] * CI + r[None, :], mask=(p >= 0)[:, None] & rm[None, :], other=0.0)
        if FLIP:
            at_w = (r * (ALL * CO) + ALL // 2 * CO)[:, None] + co[None, :]
        else:
            at_w = co[None, :] * (ALL * CI) + ALL // 2 * CI + r[:, None]
        weight = tl.load(w + at_w, mask=rm[:, None] & om[None, :], other=0.0)
        acc = tl.dot(v, weight, acc)
    mask = (p >= 0)[:, None] & om[None, :]
    at = p[:, None] * CO + co[None, :]
    if (EPILOGUE == 1) or (EPILOGUE == 3):
        acc += mixed(e1, p, co, CO, PATH, N, (BLOCK, COP), mask)
    if EPILOGUE == 1:
        acc = tl.maximum(acc, 0.0)
    if (EPILOGUE == 2) or (EPILOGUE == 3):
        acc = tl.where(tl.load(e2 + at, mask=mask, other=0.0).to(tl.float32) > 0, acc, 0.0)
    normed = co < NORMED
    if STATS == 1:
        tl.atomic_add(out_sums + co, tl.sum(acc, 0), mask=normed)
        tl.atomic_add(out_sums2 + co, tl.sum(acc * acc, 0), mask=normed)
    if STATS == 2:
        mean = tl.load(sums + co, mask=normed, other=0.0) / P
        rstd = tl.rsqrt(tl.maximum(tl.load(squares + co, mask=normed, other=0.0) / P - mean * mean, 0.0) + 1e-5)
        u_hat = (tl.load(e1 + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        tl.atomic_add(out_sums + co, tl.sum(acc, 0), mask=normed)
        tl.atomic_add(out_sums2 + co, tl.sum(acc * u_hat, 0), mask=normed)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def wgrad_kernel(
    g, x, dw,
    H: tl.constexpr, W: tl.constexpr,
    CG: tl.constexpr, CX: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
    FIRST: tl.constexpr, CT: tl.constexpr,  # of x, the channels from FIRST on, so many
    CENTRE: tl.constexpr,  # through the centre alone
    ALL: tl.constexpr, TAPS: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """dw[o, tap, i] += sum over the program's pixels of g[p, o] x[p + tap, i], for one tap or the three of a row, and
    the first OUT of g's CG channels."""
    chunk, t = tl.program_id(0), tl.program_id(1)
    if CENTRE:
        t = ALL // 2
    dy = t * TAPS // 3 - 1 if ALL == 9 else 0
    dx = -1 if TAPS == 3 else (t % 3 - 1 if ALL == 9 else 0)
    o, k = tl.arange(0, OUTP), tl.arange(0, KP)
    om, km = o < OUT, k < TAPS * CT
    at_x = k // CT * CX + FIRST + k % CT
    acc = tl.zeros((OUTP, KP), tl.float32)
    for turn in range(TURNS):
        p = (chunk * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        row, col = (p // W) % H + dy, p % W
        ok = (row >= 0) & (row < H)
        if TAPS == 3:
            column = col[:, None] + (k // CT)[None, :] - 1
            mask = ok[:, None] & km[None, :] & (column >= 0) & (column < W)
        else:
            mask = (ok & (col + dx >= 0) & (col + dx < W))[:, None] & km[None, :]
        gv = tl.load(g + p[:, None] * CG + o[None, :], mask=ok[:, None] & om[None, :], other=0.0)
        v = tl.load(x + (p + dy * W + dx)[:, None] * CX + at_x[None, :], mask=mask, other=0.0)
        acc = tl.dot(tl.trans(gv), v, acc)
    tl.atomic_add(dw + o[:, None] * (ALL * CX) + t * TAPS * CX + at_x[None, :], acc, mask=om[:, None] & km[None, :])


@triton.jit
def norm_kernel(
    u, extra, out, sums, squares, gamma, beta, g_gamma, g_beta,
    P: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
    NORMED: tl.constexpr,  # so many channels, the first, are normalised
    # 0 out = relu(norm(u)); 1 out = relu(norm(u) + M extra); 2 gradients of gain and bias; 3 out = norm'(extra)
    MODE: tl.constexpr,
    PATH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, CP)
    cm, normed = c < C, c < NORMED
    mean, rstd, gain, shift = norm_vectors(sums, squares, gamma, beta, c, normed, P)
    if MODE == 3:
        mean_g = tl.load(g_beta + c, mask=normed, other=0.0) / P
        mean_gu = tl.load(g_gamma + c, mask=normed, other=0.0) / P
    sum_g, sum_gu = tl.zeros((CP,), tl.float32), tl.zeros((CP,), tl.float32)
    for turn in range(TURNS):
        p = (tl.program_id(0) * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        mask = (p >= 0)[:, None] & cm[None, :]
        at = p[:, None] * C + c[None, :]
        u_hat = (tl.load(u + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
        if MODE <= 1:
            v = u_hat * gain[None, :] + shift[None, :]
            if MODE == 1:
                v += mixed(extra, p, c, C, PATH, N, (BLOCK, CP), mask)
            tl.store(out + at, tl.maximum(v, 0.0).to(out.dtype.element_ty), mask=mask)
        else:
            g = tl.load(extra + at, mask=mask, other=0.0).to(tl.float32)
            if MODE == 2:
                sum_g += tl.sum(g, 0)
                sum_gu += tl.sum(tl.where(mask, g * u_hat, 0.0), 0)
            else:
                v = (rstd * gain)[None, :] * (g - mean_g[None, :] - u_hat * mean_gu[None, :])
                tl.store(out + at, v.to(out.dtype.element_ty), mask=mask)
    if MODE == 2:
        tl.atomic_add(g_beta + c, sum_g, mask=normed)
        tl.atomic_add(g_gamma + c, sum_gu, mask=normed)


# ---------------------------------------------------------------- launches


def padded(channels: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(channels))


def pixels(x: Tensor) -> tuple[int, int, int]:
    return x.shape[0] * x.shape[2] * x.shape[3], x.shape[2], x.shape[3]


def taps(channels: int, every: int) -> tuple[int, int, int]:
    """Taps of the kernel, taps taken together, and the padded length of their product."""
    together = 3 if channels <= 16 and every == 9 else 1
    return every, together, padded(together * channels)


def conv(
    src, w, out, *, norm=None, e1=None, e2=None, sums=None, flip=False, epilogue=0, stats=0, path="none", lasting=None
) -> None:
    """`lasting`: so many channels of src are read through all taps, the others through the centre alone; None: all."""
    (P, H, W), ci, co = pixels(src), src.shape[1], out.shape[1]
    ct = lasting or ci
    block = min(P, 128 if P >= 32768 else 64)
    mean_sums, square_sums = norm[:2] if norm else (w, w)
    out_sums, out_sums2 = sums or (w, w)
    conv_kernel[(P // block,)](
        src, w, out, mean_sums, square_sums, w if e1 is None else e1, w if e2 is None else e2, out_sums, out_sums2,
        P, H, W, ci, co, padded(co), block, ct, padded(ci - ct), *taps(ct, w.numel() // (ci * co)), flip, epilogue,
        stats, len(out_sums) if sums else co, *PATHS[path], num_warps=4,
    )  # fmt: skip


def wgrad(g, x, dw, lasting=None, outputs=None, inputs=None) -> None:
    """`outputs`, `inputs`: only so many of dw's, the first, are wanted; None: all."""
    (P, H, W), cg, cx = pixels(x), g.shape[1], x.shape[1]
    outputs, inputs = outputs or cg, inputs or cx
    block = min(P, 128 if outputs <= 128 else 64)  # shared memory
    turns = max(1, min(8, P // block // 32))
    every = dw.numel() // (cg * cx)
    lasting = lasting or inputs

    def launch(first: int, channels: int, centre: bool) -> None:
        _, together, kp = taps(channels, 1 if centre else every)
        wgrad_kernel[(P // block // turns, 1 if centre else every // together)](
            g, x, dw, H, W, cg, cx, outputs, padded(outputs), block, turns, first, channels, centre, every, together,
            kp, num_warps=4,
        )  # fmt: skip

    launch(0, lasting, False)
    if lasting < inputs:
        launch(lasting, inputs - lasting, True)


def norm_pass(u, extra, out, mode, norm, path="none") -> None:
    (P, _, _), c = pixels(u), u.shape[1]
    cp = padded(c, least=8)
    block = min(P, 4096 // cp)
    turns = 4 if mode == 2 and P // block >= 512 else 1
    norm_kernel[(P // block // turns,)](
        u,
        u if extra is None else extra,
        u if out is None else out,
        *norm,
        P,
        c,
        cp,
        block,
        turns,
        len(norm[2]),
        mode,
        *PATHS[path],
        num_warps=4,
    )


class FusedBlock(torch.autograd.Function):
    """A stride-1 block. `block` gives

    w1, w2          memory O, kh, kw, I; dw1, dw2 their gradients in float32
    norm1, norm2    (sums, sums of squares, gain, bias, gradient of the gain, of the bias)
    code            channels that a fitted coder adds to the hidden ones, after them
    path            of the coder
    lasting         channels of x that are read, and of y that are written, through all taps; None: all
    last            whether the gradient comes from outside
    """

    @staticmethod
    def forward(ctx, x: Tensor, block) -> Tensor:
        batch, _, height, width = x.shape
        x = x.contiguous(memory_format=torch.channels_last)
        hidden = block.norm1[2].shape[0]
        u = torch.empty(
            (batch, hidden + block.code, height, width),
            dtype=x.dtype,
            device=x.device,
            memory_format=torch.channels_last,
        )
        a, y = torch.empty_like(u), torch.empty_like(x)
        conv(x, block.w1, u, sums=block.norm1[:2], stats=1, lasting=block.lasting)
        norm_pass(u, None, a, 0, block.norm1)
        if block.norm2 is None:
            conv(a, block.w2, y, e1=x, epilogue=1, path=block.path)
            ctx.save_for_backward(x, u, a, y)
        else:
            o = torch.empty_like(x)
            conv(a, block.w2, o, sums=block.norm2[:2], stats=1)
            norm_pass(o, x, y, 1, block.norm2, block.path)
            ctx.save_for_backward(x, u, a, y, o)
        ctx.block = block
        return y

    @staticmethod
    def backward(ctx, g: Tensor):
        x, u, a, y, *rest = ctx.saved_tensors
        block, g = ctx.block, g.contiguous(memory_format=torch.channels_last)
        if block.last:
            g = g * (y > 0)
        b, v, gx = torch.empty_like(u), torch.empty_like(u), torch.empty_like(x)
        go = g
        if block.norm2 is not None:
            go = torch.empty_like(x)
            norm_pass(rest[0], g, None, 2, block.norm2)
            norm_pass(rest[0], g, go, 3, block.norm2)
        g_gamma, g_beta = block.norm1[4:]
        conv(
            go, block.w2, b, norm=block.norm1, e1=u, e2=a, sums=(g_beta, g_gamma), flip=True, epilogue=2, stats=2,
            lasting=block.lasting,
        )  # fmt: skip
        wgrad(go, a, block.dw2, inputs=len(g_gamma))
        norm_pass(u, b, v, 3, block.norm1)
        conv(v, block.w1, gx, e1=g, e2=x, flip=True, epilogue=3, path=block.path)
        wgrad(v, x, block.dw1, block.lasting, outputs=len(g_gamma))
        return gx, None
