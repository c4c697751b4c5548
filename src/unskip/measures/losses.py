"""The loss whose gradient is measured: the user's, or one that fits what the network puts out."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip._core.errors import reason
from unskip.measures.layer_types import floating_in

Loss = Callable[[Any, Any], Tensor]


def main_output(output: Any) -> Tensor:
    """The tensor that a network is trained on: itself, `logits`, `out`, or the first floating-point one of a nest."""
    for key in ("logits", "out"):
        found = output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)
        if isinstance(found, Tensor) and found.is_floating_point():
            return found
    found = floating_in(output)
    if found is None or found.numel() == 0:
        raise ValueError(
            f"measure: the network returned {type(output).__name__} without a floating-point tensor in it. "
            "Give measure a network that returns a tensor, or a dict or tuple with one."
        )
    return found


def loss_of(output: Any, target: Any, loss: Loss | None, samples: int, seed: int) -> tuple[Tensor, str]:
    """The loss as a scalar, and a sentence that says which it is.

    Without `loss`: cross-entropy where the output is (B, classes) or the target holds class numbers, with random labels
    (seeded) if there is no target; mean square error for a floating-point target; else half the mean square of the
    output.
    """
    if loss is not None:
        value = loss(output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"measure: loss must return a tensor with one number, not {what}. Take its mean.")
        return value.reshape(()), "The loss is the one that was given."
    y = main_output(output)
    if isinstance(target, Tensor) and target.is_floating_point() and target.shape == y.shape:
        return F.mse_loss(y, target), "The loss is the mean square error."
    if isinstance(target, Tensor):
        try:
            if not target.is_floating_point() and y.ndim >= 2:
                return F.cross_entropy(y, target.long()), "The loss is cross-entropy on the given targets."
            why = "it is neither class numbers nor a tensor of the output's shape"
        except (RuntimeError, ValueError, IndexError) as error:
            why = reason(error)
        raise ValueError(
            f"measure: target of shape {tuple(target.shape)} and type {target.dtype} does not fit the output of shape "
            f"{tuple(y.shape)}: {why}. Give class numbers (B,), a tensor like the output, or a loss."
        )
    if target is not None:
        raise ValueError(
            f"measure: target must be a tensor where no loss is given, not {type(target).__name__}. Give loss, a "
            "function of output and target."
        )
    if y.ndim == 2 and y.shape[0] == samples and y.shape[1] > 1:
        labels = torch.randint(y.shape[1], (samples,), generator=torch.Generator().manual_seed(seed)).to(y.device)
        return F.cross_entropy(y, labels), "No targets were given: the loss is cross-entropy on random labels."
    return 0.5 * y.square().mean(), (
        f"The output of shape {tuple(y.shape)} is not (batch, classes): the loss is half its mean square."
    )
