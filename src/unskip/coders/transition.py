"""Coders of transitions, the blocks that change width or stride.

    coder(x) = W_dec ⊛ S σ(pool(M x))       M: C_in -> C_B, S: C_B -> C_B of the new width, each where it is needed

The code is a 2 x 2 average of the input (of stride-sized windows), its channels mixed by M. W_dec is the decoder of the
coder of the new width: behind ReLU, a closed form of that width passes on what is written here without loss, a fitted
one as well as whatever it reads. As a convolution the pooling is zero-padded taps of a 3 x 3 kernel, exact at odd sizes
too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._core.layers import fast_form
from unskip.coders.closed_form import Derived, group_average
from unskip.coders.coder import Coder, SharedCoder, frozen_layer, project
from unskip.coders.matrices import averaging
from unskip.coders.spec import CoderSpec

torch.fx.wrap("average")  # one node of a symbolic trace (torch.fx), which knows no sizes


class TransitionCoder(nn.Module):
    """Pools space, carries the input channels, and writes what the coder of the new width reads."""

    mix: Tensor | None  # M, (C_B, C_in); None where every channel is carried as it is
    spread: Tensor | None  # S, (C_B of the new width, C_B); None where they are equal

    def __init__(self, spec: CoderSpec, target: Coder | SharedCoder, act: nn.Module, stride: int) -> None:
        super().__init__()
        self.spec = spec  # of the new width's coder, `target`
        self.target = target
        self.act = act
        self.stride = stride
        self.register_buffer("mix", None)
        self.register_buffer("spread", None)

    def matrices(self) -> dict[str, Tensor]:
        """M and S as `mix` and `spread`, where they are needed."""
        raise NotImplementedError

    def mixed(self, x: Tensor) -> Tensor:
        return x if self.mix is None else self.project(x, self.mix)

    def forward(self, x: Tensor) -> Tensor:
        code = self.mixed(x)
        # As in the block itself, space is pooled by the first convolution of a vanilla block, by the second of a
        # bottleneck: before the only activation, or between the two.
        if self.spec.depth == 2:
            code = self.act(code)
        code = self.act(average(code, self.stride) if self.stride > 1 else code)
        return self.target.decode(code if self.spread is None else self.project(code, self.spread))

    def project(self, x: Tensor, matrix: Tensor) -> Tensor:
        return project(x, matrix if self.spec.linear else matrix[..., None, None])

    def to_ordinary(self) -> nn.Sequential:
        """Mixing and pooling, activation and decoder as layers; in a bottleneck pooling is a layer of its own."""
        mix, spread = (self.matrices().get(name) for name in ("mix", "spread"))
        dec = (self.target.coder if isinstance(self.target, SharedCoder) else self.target).matrices()["dec"]
        dec = dec if spread is None else torch.einsum("ob...,bc->oc...", dec, spread)
        mix = torch.eye(dec.shape[1], dtype=dec.dtype, device=dec.device) if mix is None else mix
        last = frozen_layer(dec)
        if self.spec.linear:
            return nn.Sequential(frozen_layer(mix), *[self.act] * self.spec.depth, last)
        taps = pooling_taps(self.stride).to(dec)
        if self.spec.depth == 1:
            return nn.Sequential(frozen_layer(mix[..., None, None] * taps, stride=self.stride), self.act, last)
        pool = frozen_layer(taps.repeat(len(mix), 1, 1, 1), stride=self.stride, groups=len(mix))
        return nn.Sequential(frozen_layer(mix[..., None, None]), self.act, pool, self.act, last)

    def extra_repr(self) -> str:
        return f"{self.spec.pretext}, stride={self.stride}"


class FittedTransition(TransitionCoder):
    """M is the target's encoder of the channels that take the place of each input channel. It is stored."""

    def __init__(self, spec: CoderSpec, target: Coder | SharedCoder, act: nn.Module, stride: int, mix: Tensor) -> None:
        super().__init__(spec, target, act, stride)
        self.register_buffer("mix", mix)

    def matrices(self) -> dict[str, Tensor]:
        assert self.mix is not None
        return {"mix": self.mix}


class ClosedFormTransition(Derived, TransitionCoder):
    """M averages neighbouring channels, S writes each average to neighbouring channels. Nothing is stored.

    Args:
        groups: directions that are carried.
        dense: compute with the matrices, as the definition does.
        factory: device and dtype.
    """

    def __init__(
        self,
        spec: CoderSpec,
        target: Coder | SharedCoder,
        act: nn.Module,
        stride: int,
        *,
        in_channels: int,
        groups: int,
        dense: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__(spec, target, act, stride)
        self.in_channels, self.groups = in_channels, groups
        summed = not dense and not spec.paired and in_channels % groups == 0
        self.derive(*(("spread",) if summed else ("mix", "spread")), **factory)

    def exact(self) -> dict[str, Tensor]:
        signs = 2 if self.spec.paired else 1
        target_groups = self.spec.code // signs
        found = {}
        if self.groups < self.in_channels or self.spec.paired:
            mix = averaging(self.groups, self.in_channels)
            found["mix"] = torch.cat([mix, -mix]) if self.spec.paired else mix
        if self.groups < target_groups:
            found["spread"] = torch.block_diag(*[averaging(self.groups, target_groups).T] * signs)
        return found

    def mixed(self, x: Tensor) -> Tensor:
        if self.mix is not None or self.groups == self.in_channels:
            return super().mixed(x)
        return group_average(x, self.groups, self.in_channels // self.groups, -1 if self.spec.linear else 1)

    def to_fast(self) -> "ClosedFormTransition | None":
        """Itself without matrices; None where it needs one: for both signs, and where groups differ in size."""
        target = fast_form(self.target)
        if target is None or self.spread is not None or self.spec.paired or self.in_channels % self.groups:
            return None
        assert isinstance(target, Coder)
        like: dict[str, Any] = {name: getattr(self, name) for name in ("in_channels", "groups", "device", "dtype")}
        return ClosedFormTransition(self.spec, target, self.act, self.stride, **like)


def average(code: Tensor, stride: int) -> Tensor:
    """Means over windows; those over the edge are filled with zeros."""
    # ceil_mode with a divisor does the same, but ONNX has no divisor.
    short = [-side % stride for side in code.shape[-2:]]
    return F.avg_pool2d(F.pad(code, (0, short[1], 0, short[0])) if any(short) else code, stride)


def pooling_taps(stride: int) -> Tensor:
    """Means of stride x stride windows as a kernel: the taps from the centre on."""
    taps = torch.zeros(2 * stride - 1, 2 * stride - 1, dtype=torch.float64, device="cpu")
    taps[stride - 1 :, stride - 1 :] = 1 / stride**2
    return taps
