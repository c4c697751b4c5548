"""Coders: the frozen internal path of PNNH (Zhang et al. 2024, arXiv:2402.08645, section 4.1, Eq. 4-10).

    coder(x) = W_dec ⊛ σ(W_enc ⊛ x)                      C -> C_B -> C, vanilla block and MLP (Eq. 6)
    coder(x) = W_dec ⊛ σ(I ⊛ σ(W_enc ⊛ x))              bottleneck and inverted bottleneck (Eq. 7, 8)

The weights are buffers: no gradient, no weight decay. One coder serves all blocks of its width. The first of them
registers it; the others hold a `CoderRef`, so that it stands once in `state_dict` and goes wherever they go.

A coder in closed form computes sums of neighbouring channels instead of two convolutions
(`unskip.coders.closed_form`). The dense weights are kept for `state_dict` and folding; loading a state dict re-detects
the closed form.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from unskip.coders.closed_form import Closed, ClosedFormTransition, closed_of, group_scale, mixed, pooled

# σ(σ(x)) = σ(x): a second activation in a row changes nothing and need not be computed.
IDEMPOTENT = (nn.ReLU, nn.ReLU6, nn.Identity)


class Coder(nn.Module):
    """A frozen map C -> C_B -> C.

    Weights other than those it was built with come through `load_state_dict`; after any other change call `refresh`.
    """

    enc: Tensor
    dec: Tensor

    def __init__(self, enc: Tensor, dec: Tensor, act: nn.Module, depth: int = 1, *, fast: bool = False) -> None:
        super().__init__()
        self.register_buffer("enc", enc)  # (C_B, C, k, k), or (C_B, C) for a linear one
        self.register_buffer("dec", dec)  # (C, C_B, k, k)
        self.act = act
        self.depth = 1 if isinstance(act, IDEMPOTENT) else depth
        self.fast = fast  # whether a closed form is computed as one
        self.closed: Closed | None = None
        self.refresh()

    def refresh(self) -> None:
        """Looks whether the weights are a closed form. On the meta device there are none to look at."""
        if not self.enc.is_meta:
            self.closed = closed_of(self.enc, self.dec, self.act, self.depth) if self.fast else None

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Coder":
        dtype = self.enc.dtype
        super()._apply(fn, recurse)
        if self.enc.dtype != dtype:
            self.refresh()  # the weights may have been rounded
        return self

    def encode(self, x: Tensor) -> Tensor:
        code = project(x, self.enc)
        for _ in range(self.depth):
            code = self.act(code)
        return code

    def decode(self, code: Tensor) -> Tensor:
        return project(code, self.dec) if self.closed is None else self.closed.decode(code)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)) if self.closed is None else self.closed(x)

    def extra_repr(self) -> str:
        return f"{self.dec.shape[0]} -> {self.dec.shape[1]} -> {self.dec.shape[0]}, kernel={kernel_of(self.enc)}"


class CoderRef(nn.Module):
    """A coder that another block has registered: runs it, moves with it, adds nothing to `state_dict`."""

    def __init__(self, coder: Coder) -> None:
        super().__init__()
        self._shared = (coder,)  # a tuple, because assigning a module would register it a second time

    @property
    def coder(self) -> Coder:
        return self._shared[0]

    def near(self, x: Tensor) -> Coder:
        """The coder; in a replica one with its weights where x is."""
        if not is_replica(self) or self.coder.closed is not None:
            return self.coder
        coder = self.coder._replicate_for_data_parallel()
        coder.enc, coder.dec = (weight.to(x.device) for weight in (coder.enc, coder.dec))
        return coder

    def decode(self, code: Tensor) -> Tensor:
        return self.near(code).decode(code)

    def forward(self, x: Tensor) -> Tensor:
        return self.near(x)(x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CoderRef":
        # .to(), .double() and to_empty() of any part of a network reach the coder that it uses; twice does no harm.
        self.coder._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"shared: {self.coder.extra_repr()}"


class TransitionCoder(nn.Module):
    """The internal path of a transition: pools space, carries the input channels, writes what the next coder reads.

    The code is a 2 x 2 average of the input (of stride-sized windows), its channels mixed where that is needed. It is
    decoded with the decoder of the coder of the new width: behind ReLU, a closed form of that width passes on what is
    written here without loss, a fitted one as well as whatever it reads. As a convolution the pooling is zero-padded
    taps of a 3 x 3 kernel, exact at odd sizes too.
    """

    mix: Tensor | None
    spread: Tensor | None

    def __init__(
        self,
        target: Coder | CoderRef,
        act: nn.Module,
        *,
        stride: int,
        depth: int,
        mix: Tensor | None,
        spread: Tensor | None,
        fast: bool = False,
    ) -> None:
        super().__init__()
        self.target = target
        self.act = act
        self.stride = stride
        self.depth = depth
        self.register_buffer("mix", mix)  # (C_B, C_in), None where every channel is carried as it is
        self.register_buffer("spread", spread)  # (C_B of the target, C_B), None where they are equal
        self.fast = fast  # whether a mix that sums neighbouring channels is computed as one
        self.mix_scale: float | None = None  # of such a mix
        self.refresh()

    def refresh(self) -> None:
        """Looks whether the mix sums neighbouring channels."""
        if self.mix is not None and not self.mix.is_meta:
            self.mix_scale = group_scale(self.mix) if self.fast else None

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TransitionCoder":
        dtype = None if self.mix is None else self.mix.dtype
        super()._apply(fn, recurse)
        if self.mix is not None and self.mix.dtype != dtype:
            self.refresh()  # it may have been rounded
        return self

    def forward(self, x: Tensor) -> Tensor:
        code = x if self.mix is None else self.mixed(x, self.mix)
        code = pooled(code, self.act, stride=self.stride, depth=self.depth)
        if self.spread is not None:
            code = self.project(code, self.spread)
        return self.target.decode(code)

    def cheap(self) -> ClosedFormTransition | None:
        """Itself without matrices; None where it needs one: beside a fitted coder, and where groups differ in size."""
        target = self.target.coder if isinstance(self.target, CoderRef) else self.target
        closed = closed_of(target.enc, target.dec, target.act, target.depth)
        scale = None if self.mix is None else group_scale(self.mix)
        if closed is None or self.spread is not None or (self.mix is not None and scale is None):
            return None
        mix = None if self.mix is None or scale is None else (self.mix.shape[0], scale)
        return ClosedFormTransition(closed, self.act, stride=self.stride, depth=self.depth, mix=mix)

    def mixed(self, x: Tensor, mix: Tensor) -> Tensor:
        if self.mix_scale is None:
            return self.project(x, mix)
        return mixed(x, mix.shape[0], self.mix_scale, -1 if self.linear else 1)

    @property
    def linear(self) -> bool:
        return (self.target.coder if isinstance(self.target, CoderRef) else self.target).dec.ndim == 2

    def project(self, x: Tensor, matrix: Tensor) -> Tensor:
        return project(x, matrix if self.linear else matrix[..., None, None])

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


def is_replica(module: nn.Module) -> bool:
    """Whether nn.DataParallel has made it: of registered tensors alone, so what it refers to is on the first device."""
    return getattr(module, "_is_replica", False)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x through a frozen weight: linear on the last axis for two axes, else a 'same' convolution."""
    return F.linear(x, weight) if weight.ndim == 2 else F.conv2d(x, weight, padding=kernel_of(weight) // 2)


def kernel_of(weight: Tensor) -> int:
    return 1 if weight.ndim == 2 else weight.shape[-1]
