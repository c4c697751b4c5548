"""Networks of the CIFAR-10 gap experiments: ResNet (He et al. 2016, option A) and PNNH (papers/pnnh.md, section 4).

PNNH block    y = relu(learner(x) + coder(x))
              learner(x) = W_2 * relu(norm(W_1 * x))    trained, hidden width h
              coder(x)   = M x,  M = W_dec W_enc        frozen, rank C_B; x, W_enc >= 0, so its own relu does nothing
              coder(x)   = W_dec * relu(W_enc * x)      path "fitted": any weights, frozen; C_B = C/2

A fitted coder is held in the learner's convolutions, W_enc below W_1 and W_dec beside W_2; `kept` says which of their
weights are trained.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

try:
    from fused import PATHS, FusedBlock
except ImportError:  # no Triton: everything runs block by block
    PATHS, FusedBlock = {}, None


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    kind: str = "pnnh"  # pnnh | resnet (both norms, option A shortcuts)
    blocks: int = 18  # per stage; the depth is 6 * blocks + 2
    widths: tuple[int, ...] = (16, 32, 64)  # C of each stage
    hidden: tuple[int, ...] = (8, 16, 32)  # h of each stage; resnet: ignored, h = C
    # pair | half | dense | turns | quarter | fitted (all C_B <= C/2), identity (C_B = C: residual_half), none (plain)
    path: str = "pair"
    coder: str | None = None  # path "fitted": its name in coders.safetensors
    transition: str = (
        "coded"  # coded | misaligned (decoder does not match the next coder) | whole (no coder, full-width learner)
    )
    scale: float = 0.3  # factor on He's standard deviation for W_2
    norm2: float | None = None  # initial gain of a norm after W_2; None: no norm
    bias2: bool = False  # bias after W_2
    gain: bool = False  # trained per-channel gain on the learner's output, starting at 1
    head_norm: bool = False  # norm after the last block, before pooling
    carry: bool = False  # path "half": W_1 and W_2 start with the identity on the channels the coder drops
    kernel2: int = 3  # kernel size of W_2
    reads: str = (
        "all"  # all | code (path "pair": the learner reads the C/2 averages and never sees what the coder drops)
    )
    tied: bool = False  # W_2 = W_1^T diag(g), g trained, in all blocks but the transitions
    # path "half": what is not carried is read and written through the centre of the kernel only, at He's scale
    centred: bool = False
    zero_last: bool = False  # resnet: the gain of each block's last norm starts at 0


# ---------------------------------------------------------------- element-wise pieces, eager or compiled


def norm_relu(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5).relu()


def norm_add_relu(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, path: Tensor) -> Tensor:
    return (F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5) + path).relu()


def add_relu(x: Tensor, path: Tensor) -> Tensor:
    return (x + path).relu()


def add_pair_relu(x: Tensor, source: Tensor) -> Tensor:
    """relu(x + pair average of source): both channels of a pair (2i, 2i + 1) receive the pair's mean."""
    mean = source.unflatten(1, (-1, 2)).mean(2, keepdim=True)
    return (x.unflatten(1, (-1, 2)) + mean).relu().flatten(1, 2)


@cache
def compiled(function):
    torch._dynamo.config.cache_size_limit = 64  # one entry per shape; the default of 8 falls back to eager
    return torch.compile(function, dynamic=False)


class Pieces:
    """Chooses between the eager and the compiled form; evaluation is always eager."""

    def __init__(self, compile_pieces: bool):
        self.compile_pieces = compile_pieces

    def __call__(self, function, *tensors: Tensor) -> Tensor:
        fast = self.compile_pieces and torch.is_grad_enabled()
        return (compiled(function) if fast else function)(*tensors)


class Norm(nn.Module):
    """BatchNorm without the step counter (one kernel less per layer and step)."""

    def __init__(self, channels: int, gain: float = 1.0, bias: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels,), gain))
        self.bias = nn.Parameter(torch.full((channels,), bias))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.weight, self.bias, self.mean, self.var

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, self.weight, self.bias, self.training, 0.1, 1e-5)


def conv(cin: int, cout: int, kernel: int, stride: int, generator: torch.Generator, scale: float = 1.0) -> nn.Conv2d:
    layer = nn.Conv2d(cin, cout, kernel, stride, kernel // 2, bias=False)
    with torch.no_grad():
        layer.weight.normal_(0, scale * (2 / (cin * kernel**2)) ** 0.5, generator=generator)  # He normal, fan in
    return layer


def centre_only(layer: nn.Conv2d, inputs: bool, outputs: bool, scale: float) -> None:
    """The second half of a convolution's inputs and outputs keep only their centre tap; `layer.kept` says which
    weights are left (the others are 0, get no gradient, and do not count). He's scale for the fan-in that is left."""
    o, i, k, _ = layer.weight.shape
    kept = torch.ones_like(layer.weight, dtype=torch.bool)
    off = torch.ones(k, k, dtype=torch.bool)
    off[k // 2, k // 2] = False
    if inputs:
        kept[:, i // 2 :] &= ~off
    if outputs:
        kept[o // 2 :] &= ~off
    with torch.no_grad():
        unit = layer.weight / layer.weight.std()
        fan = kept.sum((1, 2, 3), keepdim=True)
        layer.weight.copy_(unit * kept * (2 / fan) ** 0.5)
        layer.weight[: o // 2 if outputs else o] *= scale
    layer.kept = kept


# ---------------------------------------------------------------- coders


def pair_matrix(channels: int, group: int = 2, shift: int = 0) -> Tensor:
    """Average over groups of neighbours; W_enc = W_dec^T = 1/sqrt(group) on a group."""
    m = torch.block_diag(*[torch.full((group, group), 1 / group) for _ in range(channels // group)])
    return m.roll((shift, shift), (0, 1))


def dense_encoder(channels: int) -> Tensor:
    """Dense non-negative W_enc (C/2, C), columns that sum to 1; with its pseudo-inverse a projection at the floor."""
    enc = torch.rand(channels // 2, channels, generator=torch.Generator().manual_seed(channels)).double() ** 4
    return enc / enc.sum(0)


def coder_matrix(path: str, channels: int, index: int) -> Tensor:
    """M (C, C) of the coder of the block with this index in its stage (from stage 2 on, index 0 is a transition)."""
    if path == "half":
        return torch.diag((torch.arange(channels) < channels // 2).float())
    if path == "turns":
        return pair_matrix(channels, shift=(index + 1) % 2)
    if path == "quarter":
        return pair_matrix(channels, group=4)
    if path == "dense":
        enc = dense_encoder(channels)
        return (torch.linalg.pinv(enc) @ enc).float()
    return pair_matrix(channels)


@cache
def fitted_coders() -> dict[str, Tensor]:
    return load_file(Path(__file__).with_name("coders.safetensors"))  # by coders.py


def fitted_coder(name: str | None, channels: int) -> tuple[Tensor, Tensor]:
    """W_enc (C/2, C, 3, 3) and W_dec (C, C/2, 3, 3)."""
    coders = fitted_coders()
    return tuple(coders[f"{name}.{channels}.{part}"].float() for part in ("enc", "dec"))


def fitted_transition(enc: Tensor, cin: int) -> Tensor:
    """(C_B, cin) map of the pooled input: each channel is spread over those that take its place, and read as the next
    coder reads, whose decoder then writes."""
    each = enc.shape[1] // cin
    spread = torch.eye(cin, dtype=enc.dtype).repeat_interleave(each, 0) / each**0.5
    return enc[:, :, 1, 1] @ spread


def add_coder(conv1: nn.Conv2d, conv2: nn.Conv2d, enc: Tensor, dec: Tensor) -> None:
    """Puts a frozen coder into the two convolutions of a learner."""
    for layer, coder, axis in ((conv1, enc, 0), (conv2, dec, 1)):
        trained = torch.ones_like(layer.weight, dtype=torch.bool)
        layer.kept = torch.cat([trained, torch.zeros_like(coder, dtype=torch.bool)], axis)
        layer.weight = nn.Parameter(torch.cat([layer.weight.detach(), coder.to(layer.weight.dtype)], axis))
    conv1.out_channels, conv2.in_channels = len(conv1.weight), len(conv1.weight)


def transition_matrix(config: NetworkConfig, cin: int, cout: int) -> Tensor:
    """(cout, cin) map of the pooled input. Coded: what a transition writes is what the next coder reads."""
    if config.path == "identity":  # as option A: the input, then zeros
        return torch.eye(cout, cin)
    group = 4 if config.path == "quarter" else 2
    code = cout // group
    averaged = 1 if cin <= code else 2  # a code narrower than the input carries averages of pairs
    enc = torch.eye(cin).unflatten(0, (-1, averaged)).sum(1) / averaged**0.5  # (cin / averaged, cin)
    enc = F.pad(enc, (0, 0, 0, code - len(enc)))  # (code, cin)
    if config.path == "half":
        return torch.cat([enc, torch.zeros_like(enc)])
    if config.path == "dense":
        return (torch.linalg.pinv(dense_encoder(cout)) @ enc.double()).float()
    if config.transition == "misaligned":
        return enc.repeat(group, 1) / group**0.5
    return enc.repeat_interleave(group, 0) / group**0.5


# ---------------------------------------------------------------- blocks


class ResidualBlock(nn.Module):
    """y = relu(norm(W_2 * relu(norm(W_1 * x))) + shortcut(x)), shortcut of option A: subsample and pad with zeros."""

    def __init__(
        self, cin: int, cout: int, stride: int, config: NetworkConfig, pieces: Pieces, generator: torch.Generator
    ):
        super().__init__()
        self.pieces, self.stride, self.more = pieces, stride, cout - cin
        self.path, self.fused, self.can_fuse, self.lasting, self.code = "identity", None, stride == 1, None, 0
        self.conv1, self.norm1 = conv(cin, cout, 3, stride, generator), Norm(cout)
        self.conv2, self.norm2 = conv(cout, cout, 3, 1, generator), Norm(cout, gain=0.0 if config.zero_last else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.fused is not None:
            return FusedBlock.apply(x, self.fused)
        shortcut = x
        if self.stride != 1:
            shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more // 2))
        if not self.training:
            h = self.norm1(self.conv1(x)).relu()
            return (self.norm2(self.conv2(h)) + shortcut).relu()
        h = self.pieces(norm_relu, self.conv1(x), *self.norm1.tensors)
        return self.pieces(norm_add_relu, self.conv2(h), *self.norm2.tensors, shortcut)


class PnnhBlock(nn.Module):
    """y = relu(learner(x) + coder(x)); with stride 2 the coder pools 2x2 first and changes the width."""

    def __init__(
        self,
        cin: int,
        cout: int,
        hidden: int,
        stride: int,
        index: int,
        config: NetworkConfig,
        pieces: Pieces,
        generator: torch.Generator,
    ):
        super().__init__()
        self.pieces, self.stride, self.path = pieces, stride, config.path
        self.can_fuse = (
            stride == 1
            and config.path in (*PATHS, "fitted")
            and config.reads == "all"
            and config.kernel2 in (1, 3)
            and not (config.gain or config.bias2)
        )
        self.fused = None  # views into the flat weights, set by the engine
        self.lasting = cin // 2 if config.centred else None  # channels that use all taps; None: all
        self.code = 0  # hidden channels of a fitted coder
        if config.path == "turns" and index % 2 == 1:
            self.path = "pair"  # the two pairings take turns; "turns" is the shifted one
        self.whole = stride != 1 and config.transition == "whole"
        if self.whole:
            hidden = cout
        self.reads_code = config.reads == "code" and not self.whole
        self.conv1 = conv(
            cin // 2 if self.reads_code else cin, hidden, 3, stride, generator, scale=0.3 if config.carry else 1.0
        )
        self.norm1 = Norm(hidden, bias=1.0 if config.carry else 0.0)
        self.tied = config.tied and stride == 1
        if self.tied:  # the scale that W_2 has otherwise, at the start
            self.gain2 = nn.Parameter(torch.full((hidden,), config.scale * (cout / hidden) ** 0.5))
        else:
            self.conv2 = conv(hidden, cout, config.kernel2, 1, generator, 1.0 if self.whole else config.scale)
        if config.centred:
            centre_only(self.conv1, inputs=True, outputs=False, scale=1.0)
            centre_only(self.conv2, inputs=False, outputs=True, scale=config.scale)
        self.norm2 = (
            Norm(cout, gain=config.norm2 if config.norm2 is not None else 1.0)
            if self.whole or config.norm2 is not None
            else None
        )
        self.bias2 = nn.Parameter(torch.zeros(cout)) if config.bias2 else None
        self.gain = nn.Parameter(torch.ones(cout)) if config.gain else None
        if config.carry and stride == 1:
            half = cout // 2
            with torch.no_grad():
                for i in range(min(half, hidden)):
                    self.conv1.weight[i, half + i, 1, 1] += 1
                    self.conv2.weight[half + i, i, config.kernel2 // 2, config.kernel2 // 2] += 1
        matrix = decoder = None
        if self.whole or config.path == "none":
            pass
        elif config.path == "fitted":
            enc, dec = fitted_coder(config.coder, cout)
            if stride == 1:
                add_coder(self.conv1, self.conv2, enc, dec)
                self.code, self.path = len(enc), "none"
            else:
                matrix, decoder = fitted_transition(enc, cin), dec
        elif stride != 1:
            matrix = transition_matrix(config, cin, cout)
        elif config.path not in ("pair", "identity"):
            matrix = coder_matrix(config.path, cout, index)
        self.register_buffer("matrix", None if matrix is None else matrix[:, :, None, None].bfloat16())
        self.register_buffer("decoder", None if decoder is None else decoder.bfloat16())

    def learner(self, x: Tensor) -> Tensor:
        h = self.conv1(x.unflatten(1, (-1, 2)).mean(2) if self.reads_code else x)
        h, code = h.split([len(self.norm1.weight), self.code], 1)
        h = self.pieces(norm_relu, h, *self.norm1.tensors) if self.training else self.norm1(h).relu()
        if self.code:
            h = torch.cat([h, code.relu()], 1)
        if self.tied:
            h = h * self.gain2.to(h.dtype)[:, None, None]
            out = F.conv_transpose2d(h, self.conv1.weight, padding=1)
        else:
            out = self.conv2(h)
        if self.norm2 is not None:
            out = self.norm2(out)
        if self.gain is not None:
            out = out * self.gain.to(out.dtype)[:, None, None]
        if self.bias2 is not None:
            out = out + self.bias2.to(out.dtype)[:, None, None]
        return out

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.fused is not None:
            return FusedBlock.apply(x, self.fused)
        out = self.learner(x)
        if self.whole or self.path == "none":
            return out.relu()
        if self.stride != 1:
            code = F.conv2d(F.avg_pool2d(x, 2), self.matrix.to(x.dtype))
            if self.decoder is not None:
                code = F.conv2d(code.relu(), self.decoder.to(x.dtype), padding=1)
            return self.pieces(add_relu, out, code)
        if self.path == "pair":
            return self.pieces(add_pair_relu, out, x)
        path = x if self.path == "identity" else F.conv2d(x, self.matrix.to(x.dtype))
        return self.pieces(add_relu, out, path)


class Network(nn.Module):
    def __init__(self, config: NetworkConfig, seed: int, compile_pieces: bool = False, classes: int = 10):
        super().__init__()
        g, pieces = torch.Generator().manual_seed(seed), Pieces(compile_pieces)
        self.pieces = pieces
        self.stem, self.stem_norm = conv(3, config.widths[0], 3, 1, g), Norm(config.widths[0])
        blocks, cin, size = [], config.widths[0], 32
        for stage, (width, hidden) in enumerate(zip(config.widths, config.hidden, strict=True)):
            for i in range(config.blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                size //= stride
                if config.kind == "resnet":
                    blocks.append(ResidualBlock(cin, width, stride, config, pieces, g))
                else:
                    blocks.append(PnnhBlock(cin, width, hidden, stride, i, config, pieces, g))
                blocks[-1].size, blocks[-1].last = (
                    size,
                    i == config.blocks - 1,
                )  # of its output, in pixels; of its stage
                cin = width
        self.blocks = nn.ModuleList(blocks)
        self.head_norm = Norm(cin) if config.head_norm else None
        self.head = nn.Linear(cin, classes)
        with torch.no_grad():
            self.head.weight.normal_(0, cin**-0.5, generator=g)
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, 32, 32) -> (B, classes), float32
        x = self.stem(x)
        x = self.pieces(norm_relu, x, *self.stem_norm.tensors) if self.training else self.stem_norm(x).relu()
        for block in self.blocks:
            x = block(x)
        if self.head_norm is not None:
            x = self.head_norm(x)
        return self.head(x.mean((2, 3), dtype=torch.float32))


def trained_parameters(network: nn.Module) -> int:
    fixed = sum((~m.kept).sum().item() for m in network.modules() if hasattr(m, "kept"))
    return sum(p.numel() for p in network.parameters()) - fixed
