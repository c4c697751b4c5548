"""Ways to compute the stem of a ResNet (7x7 convolution, norm, ReLU, max pooling): milliseconds of each, and whether
it is the same function.

    python benchmarks/stem.py OUT                                  # a GPU: bf16 autocast, channels last, 256 at 224 px
    python benchmarks/stem.py OUT --device cpu --batch 2 --size 32 --eager   # to try it out

Forward and backward of the stem alone, compiled, one CUDA graph; each is timed in rounds beside the others. All numbers
are in OUT/stem.json, with kernel times of each variant.
"""

import argparse
import collections
import copy
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.methods import stem
from unskip.methods.stem_kernels import max_pool, tiles


class Stem(nn.Module):
    """timm's stem; what others do differently they override."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = network.conv1, network.bn1, network.act1

    def conv(self, x: Tensor) -> Tensor:
        return self.conv1(x)

    def pool(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.act1(self.bn1(self.conv(x))))


class Squares12(Stem):
    def conv(self, x: Tensor) -> Tensor:
        return stem.space_to_depth_conv(x, self.conv1.weight)


class Squares16(Stem):
    def conv(self, x: Tensor) -> Tensor:
        return stem.space_to_depth_conv(x, self.conv1.weight, channels=16)


class Parity(Stem):
    """Pooling in plain operations, the four pixels of a square stacked."""

    def pool(self, x: Tensor) -> Tensor:
        return stem.Pool.apply(x)


class GatherPool(torch.autograd.Function):
    """The same, each pixel looking up its windows."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        largest, code = stem.pool_codes(x)
        ctx.save_for_backward(code)
        return largest

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (code,) = ctx.saved_tensors
        high, wide = (2 * side for side in code.shape[2:])
        rows, columns = (torch.arange(side, device=code.device) for side in (high, wide))
        total = None
        for down in (0, 1):
            for right in (0, 1):
                o_h, o_w = (rows + down) // 2, (columns + right) // 2
                tap = 3 * (rows - 2 * o_h + 1)[:, None] + (columns - 2 * o_w + 1)
                # The second window of a pixel in an even row is its first one again, and the last row has none below.
                valid = torch.ones_like(tap, dtype=torch.bool)
                if down:
                    valid = valid & ((rows % 2 == 1) & (o_h < code.shape[2]))[:, None]
                if right:
                    valid = valid & ((columns % 2 == 1) & (o_w < code.shape[3]))
                o_h, o_w = o_h.clamp(max=code.shape[2] - 1), o_w.clamp(max=code.shape[3] - 1)
                index = (slice(None), slice(None), o_h[:, None], o_w)
                part = torch.where(valid & (code[index] == tap.to(torch.int8)), gradient[index], 0)
                total = part if total is None else total + part
        return total


class Gather(Stem):
    def pool(self, x: Tensor) -> Tensor:
        return GatherPool.apply(x)


class Kernel(Stem):
    """Pooling by Triton kernels."""

    def pool(self, x: Tensor) -> Tensor:
        return max_pool(x)[0]


class Squares16Parity(Squares16, Parity):
    pass


class Squares16Kernel(Squares16, Kernel):
    pass


class Quads(Stem):
    """All of it over squares of 4 x 4 pixels: 48 channels to 4 x 64 by a 3x3 convolution at a quarter of the sides.

    The four outputs of a square are channels, so that the gradient of pooling is a sum of shifted slices.
    """

    def forward(self, x: Tensor) -> Tensor:
        batch, inner, height, width = x.shape
        high, wide = height // 4, width // 4
        squares = x.permute(0, 2, 3, 1).reshape(batch, high, 4, wide, 4, inner).transpose(2, 3)
        squares = squares.reshape(batch, high, wide, 16 * inner).permute(0, 3, 1, 2)
        weight = self.conv1.weight  # (O, C, 7, 7); output p of a square reads rows 2 p - 3 to 2 p + 3, of -4 to 7
        outer = weight.shape[0]
        rows = [F.pad(weight, (0, 0, 1 + 2 * p, 4 - 2 * p - 1 + 1)) for p in (0, 1)]  # (O, C, 12, 7)
        whole = [F.pad(row, (1 + 2 * q, 4 - 2 * q)) for row in rows for q in (0, 1)]
        w = torch.cat(whole).reshape(4 * outer, inner, 3, 4, 3, 4).permute(0, 3, 5, 1, 2, 4)
        u = F.conv2d(squares, w.reshape(4 * outer, 16 * inner, 3, 3), padding=1)
        norm = self.bn1
        split = u.unflatten(1, (4, outer)).transpose(1, 2)  # (B, O, 4, H/4, W/4)
        if norm.training:
            norm.num_batches_tracked.add_(1)
        v = F.batch_norm(
            split, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training, norm.momentum, norm.eps
        )
        return QuadPool.apply(self.act1(v))


class QuadPool(torch.autograd.Function):
    """Pooling of images whose four parities stand side by side: (B, C, 4, H, W) -> (B, C, H, W)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        high, wide = x.shape[3:]
        first = [(torch.arange(side, device=x.device) == 0).to(torch.int8) for side in (high, wide)]
        code = (3 * first[0][:, None] + first[1]).expand(*x.shape[:2], high, wide)
        largest = torch.full_like(x[:, :, 0], -torch.inf)
        for tap in range(9):
            (up, p), (left, q) = ((1, 1) if k == 0 else (0, k - 1) for k in divmod(tap, 3))
            value = x[:, :, 2 * p + q]
            value = F.pad(value, (left, 0, up, 0), value=-torch.inf)[:, :, :high, :wide]
            wins = (value > largest) | value.isnan()
            largest, code = torch.where(wins, value, largest), torch.where(wins, tap, code)
        ctx.save_for_backward(code.to(torch.int8))
        return largest

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (code,) = ctx.saved_tensors

        def of(tap: int, down: int = 0, right: int = 0) -> Tensor:
            given = torch.where(code == tap, gradient, 0)
            return F.pad(given[:, :, down:, right:], (0, right, 0, down))

        four = [of(4), of(5) + of(3, right=1), of(7) + of(1, down=1)]
        four.append(of(8) + of(6, right=1) + of(2, down=1) + of(0, down=1, right=1))
        return torch.stack(four, dim=2)


# ---------------------------------------------------------------- norm, ReLU and pooling in one


@triton.jit
def fused_forward(u, scale, shift, y, code, high, wide, channels: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    o_h = tl.zeros_like(o_w) + row % high
    c = tl.program_id(2) * C + tl.arange(0, C)
    inside = (o_w < wide)[:, None] & (c < channels)[None, :]
    s = tl.load(scale + c, mask=c < channels, other=0)[None, :]
    t = tl.load(shift + c, mask=c < channels, other=0)[None, :]
    kind = u.dtype.element_ty
    largest = tl.zeros([WIDE, C], s.dtype)
    best = tl.full([WIDE, C], 9, tl.int8)  # nothing above zero: no gradient
    for tap in tl.static_range(9):
        i_h = 2 * o_h + tap // 3 - 1
        i_w = 2 * o_w + tap % 3 - 1
        there = inside & ((i_h >= 0) & (i_w >= 0))[:, None]
        pixel = ((row // high) * (2 * high) + i_h) * (2 * wide) + i_w
        value = tl.load(u + pixel[:, None] * channels + c[None, :], mask=there, other=0)
        value = (value.to(s.dtype) * s + t).to(kind).to(s.dtype)
        wins = there & ((value > largest) | (value != value))
        largest = tl.where(wins, value, largest)
        best = tl.where(wins, tap, best).to(tl.int8)
    at = (row * wide + o_w[:, None]) * channels + c[None, :]
    tl.store(y + at, largest.to(kind), mask=inside)
    tl.store(code + at, best, mask=inside)


@triton.jit
def four(g, code, row, o_h, o_w, c, high, wide, channels: tl.constexpr, WORK: tl.constexpr):
    """Gradients of the four pixels of squares."""
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
    p00 = tl.where(c00 == 4, g00, 0)
    p01 = tl.where(c00 == 5, g00, 0) + tl.where(c01 == 3, g01, 0)
    p10 = tl.where(c00 == 7, g00, 0) + tl.where(c10 == 1, g10, 0)
    p11 = tl.where(c00 == 8, g00, 0) + tl.where(c01 == 6, g01, 0)
    p11 = p11 + tl.where(c10 == 2, g10, 0) + tl.where(c11 == 0, g11, 0)
    return p00, p01, p10, p11


@triton.jit
def place(row, o_h, o_w, c, high, wide, channels: tl.constexpr):
    """Where the first pixel of squares stands. Apart from `four`: what comes with a gradient counts as written to."""
    pixel = ((row // high) * (2 * high) + 2 * o_h) * (2 * wide) + 2 * o_w
    return pixel[:, None] * channels + c[None, :]


@triton.jit
def fused_sums(g, code, u, mean, sums, high, wide, ROWS: tl.constexpr, channels: tl.constexpr, WIDE: tl.constexpr,
               C: tl.constexpr, WORK: tl.constexpr):  # fmt: skip
    """Σ g and Σ g (u - mean) of so many rows of squares."""
    c = tl.program_id(1) * C + tl.arange(0, C)
    m = tl.load(mean + c, mask=c < channels, other=0)[None, :]
    first = tl.zeros([WIDE, C], WORK)
    second = tl.zeros([WIDE, C], WORK)
    down = 2 * wide * channels
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        for start in range(0, wide, WIDE):
            o_w = start + tl.arange(0, WIDE)
            o_h = tl.zeros_like(o_w) + row % high
            inside = (o_w < wide)[:, None] & (c < channels)[None, :]
            at = place(row, o_h, o_w, c, high, wide, channels)
            p00, p01, p10, p11 = four(g, code, row, o_h, o_w, c, high, wide, channels, WORK)
            first += p00 + p01 + p10 + p11
            second += p00 * (tl.load(u + at, mask=inside, other=0).to(WORK) - m)
            second += p01 * (tl.load(u + at + channels, mask=inside, other=0).to(WORK) - m)
            second += p10 * (tl.load(u + at + down, mask=inside, other=0).to(WORK) - m)
            second += p11 * (tl.load(u + at + down + channels, mask=inside, other=0).to(WORK) - m)
    into = tl.program_id(0) * 2 * channels + c
    tl.store(sums + into, tl.sum(first, 0), mask=c < channels)
    tl.store(sums + into + channels, tl.sum(second, 0), mask=c < channels)


@triton.jit
def fused_gradient(g, code, u, scale, a, b, out, high, wide, channels: tl.constexpr, WIDE: tl.constexpr,
                   C: tl.constexpr, WORK: tl.constexpr):  # fmt: skip
    """scale g + a u + b."""
    row = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    o_h = tl.zeros_like(o_w) + row % high
    c = tl.program_id(2) * C + tl.arange(0, C)
    s = tl.load(scale + c, mask=c < channels, other=0)[None, :]
    a = tl.load(a + c, mask=c < channels, other=0)[None, :]
    b = tl.load(b + c, mask=c < channels, other=0)[None, :]
    inside = (o_w < wide)[:, None] & (c < channels)[None, :]
    at = place(row, o_h, o_w, c, high, wide, channels)
    p00, p01, p10, p11 = four(g, code, row, o_h, o_w, c, high, wide, channels, WORK)
    down = 2 * wide * channels
    kind = out.dtype.element_ty
    v = tl.load(u + at, mask=inside, other=0).to(WORK)
    tl.store(out + at, (s * p00 + a * v + b).to(kind), mask=inside)
    v = tl.load(u + at + channels, mask=inside, other=0).to(WORK)
    tl.store(out + at + channels, (s * p01 + a * v + b).to(kind), mask=inside)
    v = tl.load(u + at + down, mask=inside, other=0).to(WORK)
    tl.store(out + at + down, (s * p10 + a * v + b).to(kind), mask=inside)
    v = tl.load(u + at + down + channels, mask=inside, other=0).to(WORK)
    tl.store(out + at + down + channels, (s * p11 + a * v + b).to(kind), mask=inside)


@torch.library.triton_op("unskip_bench::norm_pool", mutates_args={})
def norm_pool(u: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pooled ReLU of the norm, codes, mean and variance."""
    u = u.contiguous(memory_format=torch.channels_last)
    work = torch.float64 if u.dtype == torch.float64 else torch.float32
    var, mean = torch.var_mean(u.to(work), (0, 2, 3), correction=0)
    scale = weight * torch.rsqrt(var + eps)
    shift = bias - mean * scale
    batch, channels, high, wide = u.shape[0], u.shape[1], u.shape[2] // 2, u.shape[3] // 2
    y = torch.empty((batch, high, wide, channels), dtype=u.dtype, device=u.device).permute(0, 3, 1, 2)
    code = torch.empty((batch, high, wide, channels), dtype=torch.int8, device=u.device).permute(0, 3, 1, 2)
    grid, along, across = tiles(high, wide, channels, batch)
    torch.library.wrap_triton(fused_forward)[grid](
        u, scale, shift, y, code, high, wide, channels=channels, WIDE=along, C=across
    )
    return y, code, mean, var


@torch.library.triton_op("unskip_bench::norm_pool_gradient", mutates_args={})
def norm_pool_gradient(
    g: Tensor, code: Tensor, u: Tensor, weight: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    g = g.contiguous(memory_format=torch.channels_last)
    batch, channels, high, wide = g.shape
    grid, along, across = tiles(high, wide, channels, batch)
    kind = torch.float64 if g.dtype == torch.float64 else torch.float32
    work = tl.float64 if g.dtype == torch.float64 else tl.float32
    rows = next(r for r in (8, 7, 4, 2, 1) if batch * high % r == 0)
    sums = torch.empty((batch * high // rows, 2, channels), dtype=kind, device=g.device)
    torch.library.wrap_triton(fused_sums)[(batch * high // rows, grid[2])](
        g, code, u, mean, sums, high, wide, ROWS=rows, channels=channels, WIDE=along, C=across, WORK=work
    )
    first, second = sums.sum(0).unbind(0)
    count = 4 * batch * high * wide
    inverse = torch.rsqrt(var + eps)
    scale = weight * inverse
    a = -scale * inverse * inverse * second / count
    b = -scale * first / count - a * mean
    out = torch.empty((batch, 2 * high, 2 * wide, channels), dtype=g.dtype, device=g.device).permute(0, 3, 1, 2)
    torch.library.wrap_triton(fused_gradient)[grid](
        g, code, u, scale, a, b, out, high, wide, channels=channels, WIDE=along, C=across, WORK=work
    )
    return out, second * inverse, first


def _keep(ctx, inputs, output) -> None:
    u, weight, _, ctx.eps = inputs
    _, code, mean, var = output
    ctx.save_for_backward(code, u, weight, mean, var)


def _backward(ctx, g: Tensor, *_: object):
    code, u, weight, mean, var = ctx.saved_tensors
    return *norm_pool_gradient(g, code, u, weight, mean, var, ctx.eps), None


norm_pool.register_autograd(_backward, setup_context=_keep)


class Fused(Stem):
    """Norm, ReLU and pooling in one pass; what is kept is u and the codes."""

    def forward(self, x: Tensor) -> Tensor:
        norm = self.bn1
        y, _, mean, var = norm_pool(self.conv(x), norm.weight, norm.bias, norm.eps)
        with torch.no_grad():
            count = 4 * y.numel() / y.shape[1]
            norm.running_mean.lerp_(mean.detach(), norm.momentum)
            norm.running_var.lerp_(var.detach() * (count / (count - 1)), norm.momentum)
            norm.num_batches_tracked.add_(1)
        return y


class Squares16Fused(Squares16, Fused):
    pass


VARIANTS = {
    "timm": Stem,
    "squares 16": Squares16,
    "squares 16 + Triton": Squares16Kernel,
    "squares 16 + all in one": Squares16Fused,
    "pool, stacked": Parity,
    "pool, gather": Gather,
    "pool, Triton": Kernel,
    "squares 12": Squares12,
    "quads": Quads,
    "squares 16 + stacked": Squares16Parity,
}


def equality(ordinary: nn.Module, other: nn.Module, x: Tensor) -> dict[str, float]:
    """Largest differences of output, gradients and statistics, over the largest value of each. Ties may be broken."""
    found = []
    for network in (ordinary, other):
        network = copy.deepcopy(network).to(x.dtype).train()
        y = network(x)
        generator = torch.Generator(x.device).manual_seed(1)
        y.backward(torch.randn(y.shape, generator=generator, device=x.device, dtype=x.dtype))
        numbers = {"output": y.detach()}
        numbers |= {name: p.grad for name, p in network.named_parameters()}
        found.append(numbers | dict(network.named_buffers()))
    first, second = found
    return {k: ((second[k] - v).abs().max() / v.abs().max().clamp(min=1e-30)).item() for k, v in first.items()}


class Timed:
    """Forward and backward of one variant, compiled, as one CUDA graph."""

    def __init__(self, network: nn.Module, x: Tensor, *, compiled: bool) -> None:
        self.network, self.x = network, x
        self.call: Callable = torch.compile(network, dynamic=False, fullgraph=True) if compiled else network
        self.rounds: list[float] = []
        with torch.autocast(x.device.type, torch.bfloat16):
            generator = torch.Generator(x.device).manual_seed(1)
            y = self.call(x)
            gradient = torch.randn(y.shape, generator=generator, device=x.device, dtype=y.dtype)
            self.gradient = gradient.contiguous(memory_format=torch.channels_last)
        for _ in range(3):
            self.step()
        self.found = [y.detach().clone()] + [p.grad.clone() for p in network.parameters()]  # for a comparison
        self.graph = None
        self.memory = 0
        if x.is_cuda:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            self.memory = torch.cuda.max_memory_allocated() - before
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.step()
            torch.cuda.current_stream().wait_stream(side)
            self.network.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()

    def step(self) -> None:
        self.network.zero_grad(set_to_none=True)
        with torch.autocast(self.x.device.type, torch.bfloat16):
            y = self.call(self.x)
        y.backward(self.gradient)

    def round(self, steps: int) -> None:
        once = self.step if self.graph is None else self.graph.replay
        if self.x.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            once()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        self.rounds.append(1e3 * (time.perf_counter() - began) / steps)

    def kernels(self) -> list[tuple[str, float]]:
        """Names and milliseconds, the slowest first."""
        if not self.x.is_cuda:
            return []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                self.step()
            torch.cuda.synchronize()
        total: collections.Counter = collections.Counter()
        for event in profile.key_averages():
            total[event.key[:110]] += event.self_device_time_total / 3e3
        return total.most_common(14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    network = timm.create_model("resnet34").to(args.device).to(memory_format=torch.channels_last).train()
    nn.init.uniform_(network.bn1.weight, 0.5, 1.5)
    nn.init.normal_(network.bn1.bias, 0, 0.3)
    side = torch.randn(args.batch, 3, args.size, args.size, device=args.device)
    x = side.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    small = side[:4].double().contiguous(memory_format=torch.channels_last)
    rows: dict[str, dict] = {}
    ready: dict[str, Timed] = {}

    def write() -> None:
        about = {"torch": torch.__version__, "batch": args.batch, "size": args.size, "device": args.device}
        (args.out / "stem.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")

    for name in args.only:
        row = rows[name] = {}
        try:
            variant = VARIANTS[name](copy.deepcopy(network))
            row["equal, float64"] = equality(Stem(network), variant, small)
            torch._dynamo.reset()
            ready[name] = Timed(variant, x, compiled=not args.eager)
            row["memory GiB"] = ready[name].memory / 2**30
            pairs = zip(ready[args.only[0]].found, ready[name].found, strict=True)
            row["compiled, bf16"] = max(((b - a).norm() / a.norm()).item() for a, b in pairs)
        except Exception as error:  # one that fails must not take the others with it
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        print(f"{time.perf_counter() - began:5.0f} s  {name}", flush=True)
        write()
    for i in range(7):
        for timed in list(ready.values())[:: 1 if i % 2 == 0 else -1]:
            timed.round(20 if x.is_cuda else 1)
    for name, timed in ready.items():
        rows[name]["rounds ms"] = timed.rounds
        rows[name]["ms"] = sorted(timed.rounds)[3]
        try:
            rows[name]["kernels ms"] = timed.kernels()
        except Exception:
            traceback.print_exc()
        write()
    for name, row in rows.items():
        worst = max(row.get("equal, float64", {"": float("nan")}).values())
        print(
            f"{name:26} {row.get('ms', 0):7.3f} ms  {row.get('memory GiB', 0):6.3f} GiB  float64 off by {worst:.1e}, "
            f"bf16 by {row.get('compiled, bf16', float('nan')):.1e}  {row.get('error', '')[:150]}"
        )
        for kernel, ms in row.get("kernels ms", ())[:9]:
            print(f"      {ms:6.3f} {kernel[:100]}")


if __name__ == "__main__":
    main()
