"""Batches of inputs: images and the like in floating point, or tokens as whole numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor


def is_batch(x: object) -> bool:
    """Whether something is a tensor of floating-point numbers or of tokens (B, T)."""
    return isinstance(x, Tensor) and (x.is_floating_point() or is_tokens(x))


def is_tokens(x: Tensor) -> bool:
    return x.dtype in (torch.int32, torch.int64) and x.ndim == 2


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The batch in a floating-point type; tokens as they are."""
    return x.to(dtype) if x.is_floating_point() else x


def random_like(x: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard normal numbers in the batch's type, or tokens drawn from those of the batch."""
    if x.is_floating_point():
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(x.dtype)
    return x.flatten()[torch.randint(x.numel(), tuple(shape), generator=generator)]
