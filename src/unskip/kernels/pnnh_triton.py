"""Four Triton kernels for a training step of a narrow PNNH block (`unskip.methods.fused` chooses when).

    forward
      read     u = W_1 ⊛ x, and the sums of u and u² over all pixels, which are BatchNorm's statistics
      write    y = σ(W_2 ⊛ a + M x), where a = σ(norm(u)) is made anew wherever it is read; notes the statistics
    backward, from g, the gradient of y where y > 0, to that of x
      unwrite  b = (W_2ᵀ ⊛ g) [a > 0]; the sums of b and b û, the gradients of the norm's bias and gain; ∂W_2 = g ⊗ a
      unread   ∂x = W_1ᵀ ⊛ v + Mᵀ g, where v = norm'(b) is made anew wherever it is read; ∂W_1 = v ⊗ x

A kernel ends where the next needs a sum over all pixels. What passes between them is u or b, of the hidden width; a
block keeps x, u and y for backward, and y is the next block's x. Sums are added up by atomics, in whichever order
programs come, so that two runs differ in the last bits.

Images are NHWC, seen as (P, C) with P pixels. Everything is computed in float32 but the products of convolutions, whose
factors have the type of x; weights are float32 and rounded as they are read. M is a closed-form coder: σ of the sums of
`GROUP` neighbouring channels among the first `CARRIED`, times a scale. `FULL` channels of x and y go through all nine
taps of W_1 and W_2, the others through the centre alone (`unskip.methods.partial`).

A weight gradient shares its launch with the convolution that does not depend on it; the first programs take that work.
Importing this file imports Triton. With TRITON_INTERPRET=1 set before, everything here runs on a CPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

COPIES = 8  # of the sums over all pixels: programs add to different copies, and readers sum the copies


@triton.jit
def tile(src, other, at, mask, alpha, beta, gamma, SOURCE: tl.constexpr):
    """What a convolution reads. 0: src itself; 1: a = σ(alpha u + gamma); 2: v = alpha b + beta u + gamma."""
    v = tl.load(src + at, mask=mask, other=0.0)
    if SOURCE > 0:
        n = v.to(tl.float32) * alpha[None, :] + gamma[None, :]
        if SOURCE == 1:
            n = tl.maximum(n, 0.0)
        else:
            n += tl.load(other + at, mask=mask, other=0.0).to(tl.float32) * beta[None, :]
        v = tl.where(mask, n, 0.0).to(src.dtype.element_ty)  # what is behind the edge is zero here, not before
    return v


@triton.jit
def shifted(src, other, p, t, alpha, beta, gamma, P,
            H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr,
            TAPS: tl.constexpr, KP: tl.constexpr, SOURCE: tl.constexpr):  # fmt: skip
    """(BLOCK, TAPS * N padded): channels FIRST to FIRST + N around the pixels p, for one tap or the three of a row."""
    k = tl.arange(0, KP)
    row, col = (p // W) % H, p % W
    dy = t * TAPS // 3 - 1
    up = (row + dy >= 0) & (row + dy < H) & (p < P)
    if TAPS == 3:
        dx = -1
        column = col[:, None] + (k // N)[None, :] - 1
        mask = up[:, None] & (k < 3 * N)[None, :] & (column >= 0) & (column < W)
    else:
        dx = t % 3 - 1
        mask = (up & (col + dx >= 0) & (col + dx < W))[:, None] & (k < N)[None, :]
    at = (p + dy * W + dx)[:, None] * C + (k // N * C + FIRST + k % N)[None, :]
    return tile(src, other, at, mask, alpha, beta, gamma, SOURCE)


@triton.jit
def tap(acc, src, other, p, t, alpha, beta, gamma, w, centre, P,
        H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, NI: tl.constexpr, FULL_I: tl.constexpr,
        FULL_O: tl.constexpr, WI: tl.constexpr, WT: tl.constexpr, WO: tl.constexpr, ZI: tl.constexpr, ZO: tl.constexpr,
        TAPS: tl.constexpr, KP: tl.constexpr, COP: tl.constexpr, SOURCE: tl.constexpr, FLIP: tl.constexpr):  # fmt: skip
    """One tap of a convolution, or the three of a row, added to acc."""
    v = shifted(src, other, p, t, alpha, beta, gamma, P, H, W, CI, 0, FULL_I, TAPS, KP, SOURCE)
    k, co = tl.arange(0, KP), tl.arange(0, COP)
    km, which = (k < TAPS * FULL_I) & (k % FULL_I < NI), t * TAPS + k // FULL_I
    of = (8 - which if FLIP else which) * WT + k % FULL_I * WI
    weight = tl.load(w + of[:, None] + co[None, :] * WO, mask=km[:, None] & (co < FULL_O)[None, :], other=0.0)
    if FULL_O < CO:
        rest = (km & (which == 4))[:, None] & ((co >= FULL_O) & (co < CO))[None, :]
        weight += tl.load(centre + (k % FULL_I * ZI)[:, None] + ((co - FULL_O) * ZO)[None, :], mask=rest, other=0.0)
    return tl.dot(v, weight.to(v.dtype), acc, input_precision="ieee")


@triton.jit
def convolve(src, other, p, alpha, beta, gamma, w, centre, P,
             BLOCK: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
             NI: tl.constexpr, FULL_I: tl.constexpr, FULL_O: tl.constexpr,
             WI: tl.constexpr, WT: tl.constexpr, WO: tl.constexpr, ZI: tl.constexpr, ZO: tl.constexpr,
             TAPS: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr, COP: tl.constexpr, SOURCE: tl.constexpr,
             FLIP: tl.constexpr):  # fmt: skip
    """(BLOCK, COP): a 3 x 3 convolution with 'same' padding of tile(src, other), or the transposed one (FLIP).

    Of FULL_I channels that are read through all taps, NI have weights. W* and Z* are the strides of w and centre over
    inputs, taps and outputs.
    """
    acc = tl.zeros((BLOCK, COP), tl.float32)
    if TAPS == 3:
        for t in tl.static_range(3):
            acc = tap(acc, src, other, p, t, alpha, beta, gamma, w, centre, P, H, W, CI, CO, NI, FULL_I,
                      FULL_O, WI, WT, WO, ZI, ZO, TAPS, KP, COP, SOURCE, FLIP)  # fmt: skip
    else:
        for t in range(9):
            acc = tap(acc, src, other, p, t, alpha, beta, gamma, w, centre, P, H, W, CI, CO, NI, FULL_I,
                      FULL_O, WI, WT, WO, ZI, ZO, TAPS, KP, COP, SOURCE, FLIP)  # fmt: skip
    if FULL_I < CI:  # SOURCE is 0 where inputs go through the centre alone
        r, co = tl.arange(0, RP), tl.arange(0, COP)
        rm = r < CI - FULL_I
        v = tl.load(src + p[:, None] * CI + (FULL_I + r)[None, :], mask=(p < P)[:, None] & rm[None, :], other=0.0)
        weight = tl.load(
            centre + (r * ZI)[:, None] + (co * ZO)[None, :], mask=rm[:, None] & (co < CO)[None, :], other=0.0
        )
        acc = tl.dot(v, weight.to(v.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def weight_gradient(left, left_other, la, lb, lg, right, right_other, ra, rb, rg, out, chunk, t, P,
                    BLOCK: tl.constexpr, TURNS: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                    CL: tl.constexpr, FIRST_L: tl.constexpr, SL: tl.constexpr, NL: tl.constexpr, LP: tl.constexpr,
                    LEFT: tl.constexpr,
                    CR: tl.constexpr, FIRST_R: tl.constexpr, SR: tl.constexpr, NR: tl.constexpr, RIGHT: tl.constexpr,
                    OL: tl.constexpr, OT: tl.constexpr, OR: tl.constexpr,
                    TAPS: tl.constexpr, KP: tl.constexpr):  # fmt: skip
    """out[o, tap, i] += the sum over a chunk of pixels of left[p, o] right[p + tap, i]; O* are the strides of out.

    Of each side S channels from FIRST on are read, of which N have weights.
    """
    o, k = tl.arange(0, LP), tl.arange(0, KP)
    acc = tl.zeros((LP, KP), tl.float32)
    for turn in range(TURNS):
        p = (chunk * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        at = p[:, None] * CL + (FIRST_L + o)[None, :]
        lv = tile(left, left_other, at, (p < P)[:, None] & (o < SL)[None, :], la, lb, lg, LEFT)
        rv = shifted(right, right_other, p, t, ra, rb, rg, P, H, W, CR, FIRST_R, SR, TAPS, KP, RIGHT)
        acc = tl.dot(tl.trans(lv), rv, acc, input_precision="ieee")
    to = (t * TAPS + k // SR) * OT + k % SR * OR
    mask = (o < NL)[:, None] & ((k < TAPS * SR) & (k % SR < NR))[None, :]
    tl.atomic_add(out + (o * OL)[:, None] + to[None, :], acc, mask=mask, sem="relaxed")


@triton.jit
def added(sums, c, cm, P, H: tl.constexpr, COPIES: tl.constexpr):
    """Means over all pixels of the two things that were summed, of the hidden channels c."""
    at = (tl.arange(0, COPIES) * (2 * H))[:, None] + c[None, :]
    first = tl.sum(tl.load(sums + at, mask=cm[None, :], other=0.0), 0)
    second = tl.sum(tl.load(sums + H + at, mask=cm[None, :], other=0.0), 0)
    return first / P, second / P


@triton.jit
def moments(sums, c, cm, P, eps, H: tl.constexpr, COPIES: tl.constexpr):
    """Mean, variance and reciprocal deviation of u.

    E[u²] - E[u]² in float32 loses (mean / deviation)² units in the last place; at a ratio where that is felt (some
    hundreds), u as bfloat16 has lost its deviation altogether.
    """
    mean, square = added(sums, c, cm, P, H, COPIES)
    var = tl.maximum(square - mean * mean, 0.0)
    return mean, var, tl.rsqrt(var + eps)


@triton.jit
def normed(mean, rstd, gain, bias, c, cm):
    """alpha and gamma of norm(u) = alpha u + gamma."""
    alpha = rstd * tl.load(gain + c, mask=cm, other=0.0)
    return alpha, tl.load(bias + c, mask=cm, other=0.0) - mean * alpha


@triton.jit
def slopes(stats, back, gain, c, cm, P, H: tl.constexpr, COPIES: tl.constexpr):
    """alpha, beta and gamma of v = norm'(b) = alpha b + beta u + gamma."""
    mean, rstd = tl.load(stats + c, mask=cm, other=0.0), tl.load(stats + H + c, mask=cm, other=0.0)
    mean_b, mean_bu = added(back, c, cm, P, H, COPIES)
    alpha = rstd * tl.load(gain + c, mask=cm, other=0.0)
    beta = -alpha * rstd * mean_bu
    return alpha, beta, -alpha * mean_b - beta * mean


@triton.jit
def grouped(src, p, P, C: tl.constexpr, CP: tl.constexpr, CARRIED: tl.constexpr, GROUP: tl.constexpr):
    """(BLOCK, CP): for each channel that is carried the sum of its group."""
    c = tl.arange(0, CP)
    v = tl.load(src + p[:, None] * C + c[None, :], mask=(p < P)[:, None] & (c < CARRIED)[None, :], other=0.0)
    if GROUP == 1:
        return v.to(tl.float32)
    members = (c[:, None] // GROUP == c[None, :] // GROUP).to(v.dtype)
    return tl.dot(v, members, input_precision="ieee")


@triton.jit
def note(sums, stats, running_mean, running_var, batches, P, eps, momentum,
         HIDDEN: tl.constexpr, HP: tl.constexpr, COPIES: tl.constexpr):  # fmt: skip
    """Mean and reciprocal deviation for backward, and what nn.BatchNorm2d notes of a batch."""
    h = tl.arange(0, HP)
    hm = h < HIDDEN
    mean, var, rstd = moments(sums, h, hm, P, eps, HIDDEN, COPIES)
    tl.store(stats + h, mean, mask=hm)
    tl.store(stats + HIDDEN + h, rstd, mask=hm)
    old_mean, old_var = tl.load(running_mean + h, mask=hm), tl.load(running_var + h, mask=hm)
    tl.store(running_mean + h, old_mean + momentum * (mean - old_mean), mask=hm)
    tl.store(running_var + h, old_var + momentum * (var * (P / (P - 1.0)) - old_var), mask=hm)
    tl.store(batches, tl.load(batches) + 1)


@triton.jit
def read_kernel(
    x, w, centre, u, sums, P,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, HS: tl.constexpr, FULL: tl.constexpr,
    WO: tl.constexpr, WT: tl.constexpr, WI: tl.constexpr, ZO: tl.constexpr, ZI: tl.constexpr,
    BLOCK: tl.constexpr, TAPS: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr, HP: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    p = pid * BLOCK + tl.arange(0, BLOCK)
    acc = convolve(x, x, p, 0, 0, 0, w, centre, P, BLOCK, H, W, C, HIDDEN, FULL, FULL, HIDDEN, WI, WT, WO, ZI,
                   ZO, TAPS, KP, RP, HP, 0, False)  # fmt: skip
    h = tl.arange(0, HP)
    hm = h < HIDDEN
    value = acc.to(u.dtype.element_ty)
    tl.store(u + p[:, None] * HS + h[None, :], value, mask=(p < P)[:, None] & (h < HS)[None, :])
    n = value.to(tl.float32)  # the norm is that of what is stored
    to = sums + pid % COPIES * (2 * HIDDEN) + h
    tl.atomic_add(to, tl.sum(n, 0), mask=hm, sem="relaxed")
    tl.atomic_add(to + HIDDEN, tl.sum(n * n, 0), mask=hm, sem="relaxed")


@triton.jit
def write_kernel(
    x, u, w, centre, gain, bias, sums, stats, running_mean, running_var, batches, y, ahead,
    P, eps, momentum, scale, size,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, HS: tl.constexpr, FULL: tl.constexpr,
    WO: tl.constexpr, WT: tl.constexpr, WI: tl.constexpr, ZO: tl.constexpr, ZI: tl.constexpr,
    CARRIED: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK: tl.constexpr, TAPS: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    p = pid * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, KP)
    km = (k < TAPS * HS) & (k % HS < HIDDEN)
    mean, _, rstd = moments(sums, k % HS, km, P, eps, HIDDEN, COPIES)
    alpha, gamma = normed(mean, rstd, gain, bias, k % HS, km)
    acc = convolve(u, u, p, alpha, alpha, gamma, w, centre, P, BLOCK, H, W, HS, C, HIDDEN, HS, FULL, WI, WT, WO, ZI,
                   ZO, TAPS, KP, 16, CP, 1, False)  # fmt: skip
    acc += scale * tl.maximum(grouped(x, p, P, C, CP, CARRIED, GROUP), 0.0)
    c = tl.arange(0, CP)
    value = tl.maximum(acc, 0.0).to(y.dtype.element_ty)
    tl.store(y + p[:, None] * C + c[None, :], value, mask=(p < P)[:, None] & (c < C)[None, :])
    z = pid * ZEROS + tl.arange(0, ZEROS)  # for the next block to sum up in
    tl.store(ahead + z, tl.zeros((ZEROS,), tl.float32), mask=z < size)
    if pid == 0:
        note(sums, stats, running_mean, running_var, batches, P, eps, momentum, HIDDEN, HP, COPIES)


@triton.jit
def unwrite_kernel(
    g, u, w, centre, gain, bias, stats, back, b, dw, dcentre, P, jobs, chunks,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, HS: tl.constexpr, FULL: tl.constexpr,
    WO: tl.constexpr, WT: tl.constexpr, WI: tl.constexpr, ZO: tl.constexpr, ZI: tl.constexpr,
    BLOCK: tl.constexpr, TAPS: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr, FP: tl.constexpr, HP: tl.constexpr,
    CHUNK: tl.constexpr, TURNS: tl.constexpr, G_TAPS: tl.constexpr, GKP: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    h = tl.arange(0, HP)
    hm = h < HIDDEN
    mean, rstd = tl.load(stats + h, mask=hm, other=0.0), tl.load(stats + HIDDEN + h, mask=hm, other=0.0)
    alpha, gamma = normed(mean, rstd, gain, bias, h, hm)
    if pid < jobs:
        chunk, t = pid % chunks, pid // chunks
        if t < 9 // G_TAPS:
            k = tl.arange(0, GKP)
            kc = k % HS
            km = (k < G_TAPS * HS) & (kc < HIDDEN)
            mean_k = tl.load(stats + kc, mask=km, other=0.0)
            rstd_k = tl.load(stats + HIDDEN + kc, mask=km, other=0.0)
            alpha_k, gamma_k = normed(mean_k, rstd_k, gain, bias, kc, km)
            weight_gradient(g, g, 0, 0, 0, u, u, alpha_k, alpha_k, gamma_k, dw, chunk, t, P, CHUNK, TURNS, H, W,
                            C, 0, FULL, FULL, FP, 0, HS, 0, HS, HIDDEN, 1, WO, WT, WI, G_TAPS, GKP)  # fmt: skip
        elif FULL < C:
            weight_gradient(g, g, 0, 0, 0, u, u, alpha, alpha, gamma, dcentre, chunk, 4, P, CHUNK, TURNS, H, W,
                            C, FULL, C - FULL, C - FULL, RP, 0, HS, 0, HS, HIDDEN, 1, ZO, 0, ZI, 1, HP)  # fmt: skip
    else:
        p = (pid - jobs) * BLOCK + tl.arange(0, BLOCK)
        acc = convolve(g, g, p, 0, 0, 0, w, centre, P, BLOCK, H, W, C, HIDDEN, FULL, FULL, HIDDEN, WO, WT, WI, ZO,
                       ZI, TAPS, KP, RP, HP, 0, True)  # fmt: skip
        at = p[:, None] * HS + h[None, :]
        mask = (p < P)[:, None] & (h < HS)[None, :]
        n = tl.load(u + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.where(n * alpha[None, :] + gamma[None, :] > 0, acc, 0.0).to(b.dtype.element_ty)
        tl.store(b + at, value, mask=mask)
        value = value.to(tl.float32)
        to = back + pid % COPIES * (2 * HIDDEN) + h
        tl.atomic_add(to, tl.sum(value, 0), mask=hm, sem="relaxed")
        tl.atomic_add(to + HIDDEN, tl.sum(value * (n - mean[None, :]) * rstd[None, :], 0), mask=hm, sem="relaxed")


@triton.jit
def unread_kernel(
    g, x, u, b, w, centre, gain, stats, back, gx, dw, dcentre, dgain, dbias, P, scale, jobs, chunks,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr, HS: tl.constexpr, FULL: tl.constexpr,
    WO: tl.constexpr, WT: tl.constexpr, WI: tl.constexpr, ZO: tl.constexpr, ZI: tl.constexpr,
    CARRIED: tl.constexpr, GROUP: tl.constexpr, RECTIFIED: tl.constexpr,
    BLOCK: tl.constexpr, TAPS: tl.constexpr, KP: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr,
    CHUNK: tl.constexpr, TURNS: tl.constexpr, G_TAPS: tl.constexpr, GKP: tl.constexpr, RP: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """RECTIFIED: x is what a ReLU gave, whose gradient is zero where x is; then this one is, too."""
    pid = tl.program_id(0)
    if pid < jobs:
        h = tl.arange(0, HP)
        alpha, beta, gamma = slopes(stats, back, gain, h, h < HIDDEN, P, HIDDEN, COPIES)
        chunk, t = pid % chunks, pid // chunks
        if t < 9 // G_TAPS:
            weight_gradient(b, u, alpha, beta, gamma, x, x, 0, 0, 0, dw, chunk, t, P, CHUNK, TURNS, H, W,
                            HS, 0, HS, HIDDEN, HP, 2, C, 0, FULL, FULL, 0, WO, WT, WI, G_TAPS, GKP)  # fmt: skip
        elif FULL < C:
            weight_gradient(b, u, alpha, beta, gamma, x, x, 0, 0, 0, dcentre, chunk, 4, P, CHUNK, TURNS, H, W,
                            HS, 0, HS, HIDDEN, HP, 2, C, FULL, C - FULL, C - FULL, 0, ZO, 0, ZI, 1, RP)  # fmt: skip
        if pid == 0:
            mean_b, mean_bu = added(back, h, h < HIDDEN, P, HIDDEN, COPIES)
            tl.store(dbias + h, mean_b * P, mask=h < HIDDEN)
            tl.store(dgain + h, mean_bu * P, mask=h < HIDDEN)
    else:
        p = (pid - jobs) * BLOCK + tl.arange(0, BLOCK)
        k = tl.arange(0, KP)
        km = (k < TAPS * HS) & (k % HS < HIDDEN)
        alpha_k, beta_k, gamma_k = slopes(stats, back, gain, k % HS, km, P, HIDDEN, COPIES)
        acc = convolve(b, u, p, alpha_k, beta_k, gamma_k, w, centre, P, BLOCK, H, W, HS, C, HIDDEN, HS, FULL, WO, WT,
                       WI, ZO, ZI, TAPS, KP, 16, CP, 2, True)  # fmt: skip
        c = tl.arange(0, CP)
        at = p[:, None] * C + c[None, :]
        mask = (p < P)[:, None] & (c < C)[None, :]
        path = scale * grouped(g, p, P, C, CP, CARRIED, GROUP)
        if RECTIFIED:
            acc = tl.where(tl.load(x + at, mask=mask, other=0.0).to(tl.float32) > 0, acc + path, 0.0)
        else:
            acc += tl.where(grouped(x, p, P, C, CP, CARRIED, GROUP) > 0, path, 0.0)
        tl.store(gx + at, acc.to(gx.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------- launches

WARPS, STAGES = 4, 1  # one stage: loads go through the first cache
TOGETHER = 16  # channels up to which the three taps of a row are one product
CHUNK = 128  # pixels that a program of a weight gradient takes at a time
AHEAD = "_unskip_zeros"  # on an output: the zeroed workspace of the next block, and the stream it is ready on
# On a gradient that is zero where the output that it belongs to is: the version of the tensor of which that is true.
MARK = "_unskip_rectified"


def pixels_each(pixels: int) -> int:
    """Pixels for each program of a convolution."""
    return 128 if pixels >= 32768 else 64


def fewer_each(pixels: int, channels: int) -> int:
    """The same where the output is as wide as the block: the sums of a program must fit its registers."""
    return min(pixels_each(pixels), max(32, 8192 // padded(channels)))


def padded(size: int) -> int:
    """The size that a matrix product needs: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


def taps(channels: int) -> tuple[int, int]:
    """How many taps are one product, and the padded size of their channels."""
    count = 3 if channels <= TOGETHER else 1
    return count, padded(count * channels)


def share(channels: int, pixels: int, centre: Tensor | None) -> tuple[int, int, int, int, int]:
    """Of a weight gradient: programs in all and for each product; chunks in turn, taps together, their padded size."""
    together, size = taps(channels)
    turns = max(1, min(8, pixels // CHUNK // 32))
    chunks = triton.cdiv(pixels, CHUNK * turns)
    return chunks * (9 // together + (centre is not None)), chunks, turns, together, size


@dataclass(frozen=True, kw_only=True)
class Path:
    """A closed-form coder: the first `carried` channels, summed in groups, times the scale."""

    carried: int
    group: int
    scale: float


def strides(weight: Tensor, centre: Tensor | None) -> tuple[int, ...]:
    """Over outputs, taps and inputs of a 3 x 3 weight, over outputs and inputs of its centred part."""
    assert weight.stride(2) == 3 * weight.stride(3)
    own = weight.stride(0), weight.stride(3), weight.stride(1)
    return *own, *((1, 1) if centre is None else centre.stride()[:2])


class Workspace:
    """One buffer of float32 for what a block sums up, forward, backward and for its gradients. It starts as zeros."""

    def __init__(self, hidden: int, parameters: tuple[Tensor | None, ...], zeros: Tensor | None = None) -> None:
        self.hidden, self.parameters = hidden, parameters
        sizes = [2 * COPIES * hidden] * 2 + [2 * hidden] + [0 if p is None else p.numel() for p in parameters]
        sizes = [-(-size // 32) * 32 for size in sizes]  # addresses that wide loads like
        if zeros is None or len(zeros) != sum(sizes):
            assert parameters[0] is not None
            zeros = parameters[0].new_zeros(sum(sizes))
        self.all = zeros
        self.sums, self.back, self.stats, *self.places = zeros.split(sizes)
        self.fresh = True  # nothing of backward is in it

    def renewed(self) -> "Workspace":
        """For a second backward pass over one graph: zeros again, and the statistics."""
        other = Workspace(self.hidden, self.parameters)
        other.stats.copy_(self.stats)
        return other

    def gradients(self) -> list[Tensor | None]:
        """In the memory layout of the parameters, so that autograd takes them as they are."""
        return [
            None if p is None else place.as_strided(p.shape, p.stride(), place.storage_offset())
            for p, place in zip(self.parameters, self.places, strict=True)
        ]


class FusedBlock(torch.autograd.Function):
    """y = σ(W_2 ⊛ σ(norm(W_1 ⊛ x)) + M x). Kept for backward: x, u and y, which is the next block's x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (B, C, H, W), channels last
        w1: Tensor,
        centre1: Tensor | None,
        gain: Tensor,
        bias: Tensor,
        w2: Tensor,
        centre2: Tensor | None,
        norm: nn.BatchNorm2d,
        path: Path,
        rectified: bool,
        work: Workspace,
        ahead: Tensor,  # filled with zeros
    ) -> Tensor:
        batch, channels, height, width = x.shape
        hidden, full = w1.shape[0], w2.shape[0]
        pixels = batch * height * width
        stored = -(-hidden // 8) * 8  # so that u is read 16 bytes at a time
        u, y = x.new_empty(pixels, stored), torch.empty_like(x)
        shape = (height, width, channels, hidden, stored, full)
        hp, cp, rp = padded(stored), padded(channels), padded(channels - full)
        with torch.cuda.device_of(x):
            block = pixels_each(pixels)
            read_kernel[(triton.cdiv(pixels, block),)](
                x, w1, w1 if centre1 is None else centre1, u, work.sums, pixels, *shape, *strides(w1, centre1),
                block, *taps(full), rp, hp, COPIES, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
            block = fewer_each(pixels, channels)
            programs = triton.cdiv(pixels, block)
            zeros = triton.next_power_of_2(triton.cdiv(len(ahead), programs))
            write_kernel[(programs,)](
                x, u, w2, w2 if centre2 is None else centre2, gain, bias, work.sums, work.stats,
                norm.running_mean, norm.running_var, norm.num_batches_tracked, y, ahead,
                pixels, norm.eps, norm.momentum, path.scale, len(ahead),
                *shape, *strides(w2, centre2), path.carried, path.group, zeros,
                block, *taps(stored), cp, hp, COPIES, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
        ctx.save_for_backward(x, u, y, w1, centre1, gain, bias, w2, centre2)
        ctx.work, ctx.path, ctx.rectified = work, path, rectified
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, u, y, w1, centre1, gain, bias, w2, centre2 = ctx.saved_tensors
        path, work = ctx.path, ctx.work if ctx.work.fresh else ctx.work.renewed()
        work.fresh = False
        channels, height, width = x.shape[1:]
        hidden, full = w1.shape[0], w2.shape[0]
        pixels, stored = u.shape
        if getattr(g, MARK, None) != g._version:
            g = torch.ops.aten.threshold_backward(g.contiguous(memory_format=torch.channels_last), y, 0)
        b, gx = torch.empty_like(u), torch.empty_like(x)
        dw1, dcentre1, dgain, dbias, dw2, dcentre2 = work.gradients()
        shape = (height, width, channels, hidden, stored, full)
        hp, cp, rp, fp = padded(stored), padded(channels), padded(channels - full), padded(full)
        with torch.cuda.device_of(x):
            block = pixels_each(pixels)
            jobs, chunks, *products = share(stored, pixels, centre2)
            unwrite_kernel[(jobs + triton.cdiv(pixels, block),)](
                g, u, w2, w2 if centre2 is None else centre2, gain, bias, work.stats, work.back, b,
                dw2, dw2 if dcentre2 is None else dcentre2, pixels, jobs, chunks, *shape, *strides(w2, centre2),
                block, *taps(full), rp, fp, hp, CHUNK, *products, COPIES, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
            block = fewer_each(pixels, channels)
            jobs, chunks, *products = share(full, pixels, centre1)
            unread_kernel[(jobs + triton.cdiv(pixels, block),)](
                g, x, u, b, w1, w1 if centre1 is None else centre1, gain, work.stats, work.back, gx,
                dw1, dw1 if dcentre1 is None else dcentre1, dgain, dbias, pixels, path.scale, jobs, chunks,
                *shape, *strides(w1, centre1), path.carried, path.group, ctx.rectified,
                block, *taps(stored), cp, hp, CHUNK, *products, rp, COPIES, num_warps=WARPS, num_stages=STAGES,
            )  # fmt: skip
        if ctx.rectified:
            setattr(gx, MARK, gx._version)
        return gx, dw1, dcentre1, dgain, dbias, dw2, dcentre2, None, None, None, None, None


def run(x: Tensor, conv1: nn.Conv2d, norm: nn.BatchNorm2d, conv2: nn.Conv2d, path: Path, *, rectified: bool) -> Tensor:
    """A block in training. `rectified`: x is what a ReLU gave."""
    w1, w2 = conv1.weight, conv2.weight
    centre1, centre2 = getattr(conv1, "centre", None), getattr(conv2, "centre", None)
    # A block zeroes the workspace of the next one, which saves a launch between them. It is used once. If the next
    # block has another shape, or x comes from elsewhere, a new one is made.
    given = vars(x).pop(AHEAD, None)
    here = (stream(x), torch.cuda.is_current_stream_capturing()) if x.is_cuda else None
    usable = given is not None and given[0] == here
    work = Workspace(len(norm.weight), (w1, centre1, norm.weight, norm.bias, w2, centre2), given[1] if usable else None)
    ahead = torch.empty_like(work.all)
    y = FusedBlock.apply(x, w1, centre1, norm.weight, norm.bias, w2, centre2, norm, path, rectified, work, ahead)
    setattr(y, AHEAD, (here, ahead))
    return y


def stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream
