"""Parameter groups for an optimizer: what decays and what does not."""

from typing import Any

from timm.optim import param_groups_weight_decay
from torch import nn


def param_groups(network: nn.Module, weight_decay: float, *, decay_all: bool = False) -> list[dict[str, Any]]:
    """Groups for torch.optim: norms, biases and whatever the network names in `no_weight_decay()` don't decay.

    Coders are buffers and in no group. `decay_all=True` is what the CIFAR recipes of the papers do: one group in which
    every trained parameter decays.
    """
    if isinstance(weight_decay, bool) or not isinstance(weight_decay, int | float):
        raise ValueError(f"param_groups: weight_decay={weight_decay!r} must be a number.")
    if weight_decay < 0:
        raise ValueError(f"param_groups: weight_decay={weight_decay} must not be negative; 0 switches it off.")
    if decay_all:
        return [{"params": [p for p in network.parameters() if p.requires_grad], "weight_decay": weight_decay}]
    named: set[str] = getattr(network, "no_weight_decay", set)()
    return param_groups_weight_decay(network, weight_decay, no_weight_decay_list=tuple(named))
