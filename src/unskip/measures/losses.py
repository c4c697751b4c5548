"""The loss whose gradient is measured: the caller's, or a default that suits the model's output."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip._core.errors import reason
from unskip.measures.layer_types import floating_in

Loss = Callable[[Any, Any], Tensor]


def main_output(output: Any) -> Tensor:
    """The tensor that a loss reads: `logits` or `out` if present, else the first floating-point tensor."""
    for key in ("logits", "out"):
        found = output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)
        if isinstance(found, Tensor) and found.is_floating_point():
            return found
    found = floating_in(output)
    if found is None or found.numel() == 0:
        raise ValueError(
            f"measure: model returns {type(output).__name__} without a floating-point tensor. It must return a tensor, "
            "or a dict or tuple with one."
        )
    return found


def loss_of(output: Any, targets: Any, loss: Loss | None, samples: int, seed: int) -> tuple[Tensor, str]:
    """The loss as a scalar, and a note that says which loss it is.

    Without `loss`, it is cross-entropy if the output is (B, classes) or the targets are class indices, with random
    labels if there are no targets; the mean squared error for floating-point targets; else half the mean square of the
    output.
    """
    if loss is not None:
        value = loss(output, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"measure: loss must return a tensor with one number, not {what}. Return its mean.")
        return value.reshape(()), "The loss is the caller's."
    y = main_output(output)
    if targets is None:
        if y.ndim == 2 and y.shape[0] == samples and y.shape[1] > 1:
            labels = torch.randint(y.shape[1], (samples,), generator=torch.Generator().manual_seed(seed)).to(y.device)
            return F.cross_entropy(y, labels), "There are no targets: the loss is cross-entropy on random labels."
        return 0.5 * y.square().mean(), (
            f"The output of shape {tuple(y.shape)} is not (batch, classes): the loss is half its mean square."
        )
    if not isinstance(targets, Tensor):
        raise ValueError(
            f"measure: targets must be a tensor unless loss is given, not {type(targets).__name__}. Pass a tensor, or "
            "a loss that takes the output and these targets."
        )
    if targets.is_floating_point() and targets.shape == y.shape:
        return F.mse_loss(y, targets), "The loss is the mean squared error."
    why = "they are neither class indices nor a tensor of the output's shape"
    if y.ndim == 3 and targets.ndim == 2 and not targets.is_floating_point():
        y = y.transpose(1, 2)  # logits of tokens, (B, T, classes)
    if not targets.is_floating_point() and y.ndim >= 2:
        try:
            return F.cross_entropy(y, targets.long()), "The loss is cross-entropy on the given targets."
        except (RuntimeError, ValueError, IndexError) as error:
            why = reason(error)
    raise ValueError(
        f"measure: targets of shape {tuple(targets.shape)} and type {targets.dtype} don't fit the output of shape "
        f"{tuple(y.shape)}: {why}. Pass class indices (B,), a tensor like the output, or a loss."
    )
