"""Closed-form coders: sums of neighbouring channels, or the first channels, without a matrix.

    group_average   z_g = e Σ_{c in g} x_c,       y_c = e σ(z_g) for every channel c of group g; e = 1/√n, n in a group
    identity        z = the first C_B channels,   y = σ(z) and zeros for the others

A paired coder carries x+ and x-: y_c = e (σ(z_g) - σ(-z_g)). The matrices of the definition are computed from the
formula where they are needed: for groups of different sizes, for `block="plain"`, and for folding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.coders.coder import Coder
from unskip.coders.matrices import closed_form, odd_part_is_identity
from unskip.coders.spec import CoderSpec

MAX_SLICES = 4  # members of a group that are summed slice by slice, which a compiler fuses with what reads the sum

# What looks at sizes or memory layout is one node of a symbolic trace (torch.fx), which knows neither.
torch.fx.wrap("group_sum")
torch.fx.wrap("repeated")


class Derived(nn.Module):
    """A module whose matrices follow from a formula: computed in float64, rounded, never in the state dict."""

    dtype: torch.dtype
    device: torch.device

    def exact(self) -> dict[str, Tensor]:
        """The matrices by name, in float64 on the CPU."""
        raise NotImplementedError

    def matrices(self) -> dict[str, Tensor]:
        """The matrices by name, in the dtype and on the device of the network."""
        return {name: matrix.to(self.device, self.dtype) for name, matrix in self.exact().items()}

    def derive(self, *names: str, **factory: Any) -> None:
        """Keeps the matrices of these names as buffers, to compute with them; `factory` has device and dtype."""
        where = torch.empty(0, **factory)
        self.dtype, self.device = where.dtype, where.device
        for name, matrix in self.matrices().items():
            self.register_buffer(name, matrix if name in names else None, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Derived":
        super()._apply(fn, recurse)
        where = fn(torch.empty(0, device=self.device, dtype=self.dtype))
        self.dtype, self.device = where.dtype, where.device
        kept = dict(self.named_buffers(recurse=False))
        for name, matrix in self.matrices().items() if kept else ():  # from float64 again; to_empty() left no numbers
            if name in kept:
                setattr(self, name, matrix)
        return self


class ClosedFormCoder(Derived, Coder):
    """A coder with a formula instead of weights. The state dict holds the name of the formula, and no number.

    Args:
        spec: its `pretext` is the name of the closed form.
        act: the block's activation.
        dense: compute with the matrices, as the definition does.
        factory: device and dtype.
    """

    def __init__(self, spec: CoderSpec, act: nn.Module, *, dense: bool = False, **factory: Any) -> None:
        super().__init__(act, spec.depth)
        self.spec = spec
        self.whole = spec.pretext != "identity"  # it carries something of every channel
        self.groups = spec.code // (2 if spec.paired else 1)  # directions that it carries
        self.size = spec.channels // self.groups if self.whole else 1  # n, channels of a group
        self.even = not self.whole or spec.channels % self.groups == 0
        self.dim = -1 if spec.linear else 1  # of the channels
        self.through = spec.paired and odd_part_is_identity(self.act, self.depth)  # σ(z) - σ(-z) = z
        self.derive(*(("enc", "dec") if dense or not self.even else ()), **factory)

    def exact(self) -> dict[str, Tensor]:
        return dict(zip(("enc", "dec"), closed_form(self.spec), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        if self.enc is not None:
            return super().forward(x)
        code = group_sum(x, self.groups, self.dim) if self.whole else x.narrow(self.dim, 0, self.groups)
        if isinstance(self.act, nn.ReLU) and not self.spec.paired:
            return self.spread(scaled(self.act(code), 1 / self.size))  # e σ(e z) = e² σ(z)
        code = scaled(code, self.size**-0.5)
        if not self.through:
            code = self.activate(code) - self.activate(-code) if self.spec.paired else self.activate(code)
        return self.spread(scaled(code, self.size**-0.5))

    def decode(self, code: Tensor) -> Tensor:
        if self.dec is not None:
            return super().decode(code)
        if self.spec.paired:
            plus, minus = code.split(self.groups, self.dim)
            code = plus - minus
        return self.spread(scaled(code, self.size**-0.5))

    def spread(self, code: Tensor) -> Tensor:
        """A code to all channels of its group; for the identity zeros to the channels that are not carried."""
        if self.whole:
            return repeated(code, self.size, self.dim)
        behind = (0, 0, 0, 0) if self.dim == 1 else ()
        return F.pad(code, (*behind, 0, self.spec.channels - self.groups))

    def to_fast(self) -> "ClosedFormCoder | None":
        """Itself without matrices; None for groups of different sizes."""
        if self.enc is None:
            return self
        return ClosedFormCoder(self.spec, self.act, device=self.device, dtype=self.dtype) if self.even else None

    def form(self) -> str:
        paired = ", paired" if self.spec.paired else ""
        return f"{self.spec.pretext}, {self.spec.channels} -> {self.spec.code} -> {self.spec.channels}{paired}"

    def get_extra_state(self) -> Tensor:
        """The form, as text in a tensor."""
        return torch.tensor(list(self.form().encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing to do: `Coder` has checked the form."""

    def extra_repr(self) -> str:
        return self.form()


def scaled(code: Tensor, scale: float) -> Tensor:
    return code if scale == 1 else scale * code


def group_average(x: Tensor, groups: int, size: int, dim: int) -> Tensor:
    """e Σ x_c over groups of neighbouring channels, all of one size."""
    return scaled(group_sum(x, groups, dim), size**-0.5)


def group_sum(x: Tensor, groups: int, dim: int) -> Tensor:
    """Sums of neighbouring channels, in the memory layout of x and in its precision.

    Without a dtype, autocast on a GPU would bring x to float32 for the sum, and with it all that is added to the code.
    """
    each = x.shape[dim] // groups
    if dim == 1 and each <= MAX_SLICES:
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
