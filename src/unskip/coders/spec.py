"""CoderSpec: everything that a coder's weights depend on."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CoderSpec:
    """Everything that a coder's weights depend on, but the activation itself, which `act` only names."""

    channels: int  # C, of input and output
    code: int  # C_B, of the code
    pretext: str  # the task it is fitted on, or its closed form
    act: str  # the block's own activation, as PyTorch prints it
    kernel: int = 1  # side of both kernels
    depth: int = 1  # activations in a row: 1 in vanilla blocks and MLPs, 2 in the two bottlenecks
    paired: bool = False  # carries x+ and x- side by side: [E; -E] and [D, -D]
    linear: bool = False  # weights of two axes for nn.Linear rather than four for nn.Conv2d
    fit: Literal["adam", "sgd"] = "adam"  # of a pretext task: to the floor, or as Algorithm 1 does
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.code < self.channels * (1 + self.paired):
            raise ValueError(
                f"CoderSpec: code={self.code} must be at least 1 and less than channels={self.channels}, or twice that "
                "where it carries x+ and x-; a coder carries fewer channels than it reads."
            )
        if self.paired and self.code % 2:
            raise ValueError(f"CoderSpec: a paired coder carries x+ and x-, so code={self.code} must be even.")

    @property
    def enc_shape(self) -> tuple[int, ...]:
        return (self.code, self.channels) + (() if self.linear else (self.kernel, self.kernel))

    @property
    def dec_shape(self) -> tuple[int, ...]:
        return (self.channels, self.code) + (() if self.linear else (self.kernel, self.kernel))


def embed_kernel(matrix: Tensor, like: CoderSpec) -> Tensor:
    """(O, I) as the weight of a coder: itself for a linear one, else the centre of a k x k kernel."""
    if like.linear:
        return matrix
    weight = matrix.new_zeros(*matrix.shape, like.kernel, like.kernel)
    weight[:, :, like.kernel // 2, like.kernel // 2] = matrix
    return weight
