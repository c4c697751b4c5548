"""Coders: the frozen internal path of PNNH (papers/pnnh.md, section 4.1, Eq. 4-10).

    coder(x) = W_dec ⊛ σ(W_enc ⊛ x)                      C -> C_B -> C, vanilla block and MLP (Eq. 6)
    coder(x) = W_dec ⊛ σ(I ⊛ σ(W_enc ⊛ x))              bottleneck and inverted bottleneck (Eq. 7, 8)

The weights are buffers: no gradient, no weight decay. One coder serves all blocks of its width. The first of them
registers it; the others hold a `CoderRef`, so that it stands once in `state_dict` and goes wherever they go.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

# σ(σ(x)) = σ(x): a second activation in a row changes nothing and need not be computed.
IDEMPOTENT = (nn.ReLU, nn.ReLU6, nn.Identity)


@dataclass(frozen=True, kw_only=True)
class CoderSpec:
    """Everything that a coder's weights depend on, but the activation itself, which `act` only names."""

    channels: int  # C, what it reads and writes
    code: int  # C_B, what it carries
    pretext: str  # the task it is fitted on, or its closed form
    act: str  # the block's own activation, as PyTorch prints it
    kernel: int = 1  # side of both kernels
    depth: int = 1  # activations in a row: 1 in vanilla blocks and MLPs, 2 in the two bottlenecks
    paired: bool = False  # carries x+ and x- side by side: [E; -E] and [D, -D]
    linear: bool = False  # weights of two axes for nn.Linear rather than four for nn.Conv2d
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.code < self.channels:
            raise ValueError(
                f"CoderSpec: code={self.code} must be at least 1 and less than channels={self.channels}; "
                "a coder carries fewer channels than it reads."
            )
        if self.paired and self.code % 2:
            raise ValueError(f"CoderSpec: a paired coder carries x+ and x-, so code={self.code} must be even.")

    @property
    def enc_shape(self) -> tuple[int, ...]:
        return (self.code, self.channels) + (() if self.linear else (self.kernel, self.kernel))

    @property
    def dec_shape(self) -> tuple[int, ...]:
        return (self.channels, self.code) + (() if self.linear else (self.kernel, self.kernel))


class Coder(nn.Module):
    """A frozen map C -> C_B -> C."""

    enc: Tensor
    dec: Tensor

    def __init__(self, enc: Tensor, dec: Tensor, act: nn.Module, depth: int = 1) -> None:
        super().__init__()
        self.register_buffer("enc", enc)  # (C_B, C, k, k), or (C_B, C) for a linear one
        self.register_buffer("dec", dec)  # (C, C_B, k, k)
        self.act = act
        self.depth = 1 if isinstance(act, IDEMPOTENT) else depth

    def encode(self, x: Tensor) -> Tensor:
        code = project(x, self.enc)
        for _ in range(self.depth):
            code = self.act(code)
        return code

    def decode(self, code: Tensor) -> Tensor:
        return project(code, self.dec)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

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

    def decode(self, code: Tensor) -> Tensor:
        return self.coder.decode(code)

    def forward(self, x: Tensor) -> Tensor:
        return self.coder(x)

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
    ) -> None:
        super().__init__()
        self.target = target
        self.act = act
        self.stride = stride
        self.depth = depth
        self.register_buffer("mix", mix)  # (C_B, C_in), None where every channel is carried as it is
        self.register_buffer("spread", spread)  # (C_B of the target, C_B), None where they are equal

    def forward(self, x: Tensor) -> Tensor:
        # As in the block itself, space is pooled by the first convolution of a vanilla block, by the second of a
        # bottleneck: before the only activation, or between the two.
        code = x if self.mix is None else self.project(x, self.mix)
        if self.depth == 2:
            code = self.act(code)
        code = self.act(self.pool(code))
        if self.spread is not None:
            code = self.project(code, self.spread)
        return self.target.decode(code)

    def project(self, x: Tensor, matrix: Tensor) -> Tensor:
        linear = (self.target.coder if isinstance(self.target, CoderRef) else self.target).dec.ndim == 2
        return project(x, matrix if linear else matrix[..., None, None])

    def pool(self, x: Tensor) -> Tensor:
        s = self.stride
        return x if s == 1 else F.avg_pool2d(x, s, s, ceil_mode=True, divisor_override=s * s)

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x through a frozen weight: linear on the last axis for two axes, else a 'same' convolution."""
    return F.linear(x, weight) if weight.ndim == 2 else F.conv2d(x, weight, padding=kernel_of(weight) // 2)


def kernel_of(weight: Tensor) -> int:
    return 1 if weight.ndim == 2 else weight.shape[-1]


def embed_kernel(matrix: Tensor, like: CoderSpec) -> Tensor:
    """(O, I) as the weight of a coder: itself for a linear one, else the centre of a k x k kernel."""
    if like.linear:
        return matrix
    weight = matrix.new_zeros(*matrix.shape, like.kernel, like.kernel)
    weight[:, :, like.kernel // 2, like.kernel // 2] = matrix
    return weight
