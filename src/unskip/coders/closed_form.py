"""Closed-form coders as the cheap operations that they are: sums of neighbouring channels, without a matrix.

    group average   z_g = e Σ_{c in g} x_c,       y_c = d σ(z_g) for every channel c of group g; e = d = 1/√n
    identity        z = the first C_B channels,   y = d σ(z) and zeros for the others

A paired coder carries x+ and x-: y_c = d (σ(z_g) - σ(-z_g)). e and d are taken from the coder's weights, as these were
rounded when they were stored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.coders.closed import FORMS, averaging, paired
from unskip.coders.spec import CoderSpec

FEW = 4  # members of a group that are summed slice by slice, which a compiler fuses with whatever reads the sum

# What looks at sizes or memory layout is one node of a symbolic trace (torch.fx), which knows neither.
torch.fx.wrap("average")
torch.fx.wrap("group_sum")
torch.fx.wrap("repeated")


@dataclass(frozen=True, kw_only=True, eq=False)
class Closed:
    """A closed form: its numbers, and the coder that they make."""

    form: str  # of FORMS
    channels: int  # C
    groups: int  # directions that it carries: C_B, or C_B / 2 of a paired coder
    scales: tuple[float, float]  # e and d
    dim: int  # of the channels: 1 of images, -1 of an MLP
    act: nn.Module
    depth: int  # activations in a row
    paired: bool

    def __call__(self, x: Tensor) -> Tensor:
        e, d = self.scales
        whole = self.form != "identity"
        code = group_sum(x, self.groups, self.dim) if whole else x.narrow(self.dim, 0, self.groups)
        if isinstance(self.act, nn.ReLU) and not self.paired:
            return self.spread((e * d) * self.act(code))  # d σ(e z) = e d σ(z)
        code = e * code
        return self.spread(d * (self.act_on(code) - self.act_on(-code) if self.paired else self.act_on(code)))

    def decode(self, code: Tensor) -> Tensor:
        """W_dec times a code of C_B channels."""
        if self.paired:
            plus, minus = code.split(self.groups, self.dim)
            code = plus - minus
        return self.spread(self.scales[1] * code)

    def act_on(self, code: Tensor) -> Tensor:
        for _ in range(self.depth):
            code = self.act(code)
        return code

    def spread(self, code: Tensor) -> Tensor:
        """A code to all channels of its group; for the identity zeros to the channels that are not carried."""
        if self.form == "identity":
            behind = (0, 0, 0, 0) if self.dim == 1 else ()
            return F.pad(code, (*behind, 0, self.channels - self.groups))
        return repeated(code, self.channels // self.groups, self.dim)

    def __str__(self) -> str:
        return f"{self.form}, {self.channels} -> {self.groups} -> {self.channels}"


class ClosedFormCoder(nn.Module):
    """A closed-form coder without matrices, for a folded network."""

    def __init__(self, closed: Closed) -> None:
        super().__init__()
        self.closed = closed
        self.act = closed.act  # a module of its own: hooks and traces see it

    def forward(self, x: Tensor) -> Tensor:
        return self.closed(x)

    def extra_repr(self) -> str:
        return str(self.closed)


class ClosedFormTransition(nn.Module):
    """The coder of a transition without matrices, for a folded network."""

    def __init__(
        self,
        closed: Closed,  # of the new width
        act: nn.Module,
        *,
        stride: int,
        depth: int,
        mix: tuple[int, float] | None,  # groups of input channels that are summed, and their scale
    ) -> None:
        super().__init__()
        self.closed, self.act, self.stride, self.depth, self.mix = closed, act, stride, depth, mix

    def forward(self, x: Tensor) -> Tensor:
        if self.mix is not None:
            x = mixed(x, *self.mix, self.closed.dim)
        return self.closed.decode(pooled(x, self.act, stride=self.stride, depth=self.depth))

    def extra_repr(self) -> str:
        return f"stride={self.stride}, {self.closed}"


def pooled(code: Tensor, act: nn.Module, *, stride: int, depth: int) -> Tensor:
    """A code through pooling and activation.

    As in the block itself, space is pooled by the first convolution of a vanilla block, by the second of a bottleneck:
    before the only activation, or between the two.
    """
    if depth == 2:
        code = act(code)
    return act(average(code, stride) if stride > 1 else code)


def average(code: Tensor, stride: int) -> Tensor:
    """Means over windows; those over the edge are filled with zeros."""
    # ceil_mode with a divisor does the same, but ONNX has no divisor.
    short = [-side % stride for side in code.shape[-2:]]
    return F.avg_pool2d(F.pad(code, (0, short[1], 0, short[0])) if any(short) else code, stride)


def mixed(x: Tensor, groups: int, scale: float, dim: int) -> Tensor:
    """The channels of a transition's input in groups, summed and scaled."""
    return scale * group_sum(x, groups, dim)


def group_sum(x: Tensor, groups: int, dim: int) -> Tensor:
    """Sums of neighbouring channels, in the memory layout of x and in its precision.

    Without a dtype, autocast on a GPU would bring x to float32 for the sum, and with it all that is added to the code.
    """
    each = x.shape[dim] // groups
    if dim == 1 and each <= FEW:
        total = x[:, 0::each]
        for member in range(1, each):
            total = total + x[:, member::each]
        return total
    if dim == 1 and channels_last(x):
        return x.permute(0, 2, 3, 1).unflatten(-1, (groups, each)).sum(-1, dtype=x.dtype).permute(0, 3, 1, 2)
    return x.unflatten(dim, (groups, each)).sum(2 if dim == 1 else -1, dtype=x.dtype)


def repeated(x: Tensor, times: int, dim: int) -> Tensor:
    """torch.repeat_interleave, in half its time on a CPU and in the memory layout of x."""
    if dim == 1 and channels_last(x):
        return repeated(x.permute(0, 2, 3, 1), times, -1).permute(0, 3, 1, 2)
    dim = dim % x.ndim
    shape = [-1] * (x.ndim + 1)
    shape[dim + 1] = times
    return x.unsqueeze(dim + 1).expand(shape).flatten(dim, dim + 1)


def channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.stride(1) == 1 and x.stride(3) != 1


@torch.no_grad()
def closed_of(enc: Tensor, dec: Tensor, act: nn.Module, depth: int) -> Closed | None:
    """The closed form that these weights are; None where they are none, or one of groups of different sizes."""
    code, channels = enc.shape[:2]
    linear = enc.ndim == 2
    if not linear and (enc.shape[2:] != (1, 1) or dec.shape[2:] != (1, 1)):
        return None
    enc, dec = enc.flatten(1).double().cpu(), dec.flatten(1).double().cpu()
    e, d = enc.max(), dec.max()
    for form, make in FORMS.items():
        for signs in (1, 2):
            if code % signs:
                continue
            spec = CoderSpec(channels=channels, code=code, pretext=form, act="", paired=signs == 2)
            pattern = [weight.sign() for weight in (paired(make, spec) if signs == 2 else make(spec))]
            groups = code // signs
            same = torch.equal(enc, e * pattern[0]) and torch.equal(dec, d * pattern[1])
            if same and (form == "identity" or channels % groups == 0):
                return Closed(
                    form=form,
                    channels=channels,
                    groups=groups,
                    scales=(e.item(), d.item()),
                    dim=-1 if linear else 1,
                    act=act,
                    depth=depth,
                    paired=signs == 2,
                )
    return None


@torch.no_grad()
def group_scale(matrix: Tensor) -> float | None:
    """e if the matrix sums neighbouring channels in groups of one size, times e; else None."""
    groups, channels = matrix.shape
    matrix = matrix.double().cpu()
    e = matrix.max()
    same = channels % groups == 0 and torch.equal(matrix, e * averaging(groups, channels).sign())
    return e.item() if same else None
