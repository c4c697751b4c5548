"""T and its inverse: simplified plain and residual networks are the same functions.

Yu and Tomasi 2019, arXiv:1905.10944, 3, 4.1.

    p = T(r) = r + rho,    r = T^-1(p) = p - rho,    rho = 1 at the ID entries of the blocks' kernels, else 0

rho is a constant, so the gradients with respect to p and to r are equal. An optimizer whose update follows from
gradients alone therefore makes the same updates to both, and its state (momentum, moments) is the same for both.
"""

import copy
from typing import overload

import torch
from torch import nn

from unskip.models.simplified import shift, simplified_blocks

# Without weight decay, what these do to a weight follows from its gradients and not from where it is.
SHIFT_INVARIANT = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Adagrad,
)  # fmt: skip


@overload
def to_plain(model: nn.Module) -> nn.Module: ...
@overload
def to_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]: ...
def to_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
    """T: the plain network that computes what a simplified ResNet computes. Stem and classifier stay as they are.

    Returns a new network and, where the network's optimizer is given, a new optimizer that holds its state, so that
    training goes on as it would have gone on: give the new network the same batches and learning rates, and decay its
    weights from the identity, `ShiftedDecay(weight_decay, identity_shift(model))` of `unskip.train`. An optimizer
    that itself decays the weights of blocks is refused, since it would pull the two networks to different places.

    Args:
        model: a simplified ResNet, or a module that holds one. It stays untouched.
        optimizer: SGD or one of the Adam family, with the network's parameters. It stays untouched.
    """
    return _cross(model, optimizer, plain=True)


@overload
def to_residual(model: nn.Module) -> nn.Module: ...
@overload
def to_residual(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]: ...
def to_residual(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
    """T^-1: the simplified ResNet that computes what a simplified plain network computes. See `to_plain`.

    `identity_shift` of the residual network is 0, so the same line of code decays both alike.
    """
    return _cross(model, optimizer, plain=False)


def _cross(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, plain: bool
) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
    caller = "to_plain" if plain else "to_residual"
    name = type(model).__name__
    blocks = list(simplified_blocks(model)) if isinstance(model, nn.Module) else []
    if not blocks:
        raise ValueError(
            f"{caller}: model={name} has no block of a simplified network. The map is exact only where a block is "
            "one convolution without a norm; build one with unskip.create_model('simplified_resnet20')."
        )
    if all(block.skip_free == plain for block in blocks):
        raise ValueError(f"{caller}: every block of {name} is {'plain' if plain else 'residual'} already.")
    if any(block.skip_free == plain for block in blocks):
        raise ValueError(f"{caller}: some blocks of {name} have a skip and some have none; give it all of one form.")
    if optimizer is not None:
        _check_optimizer(model, optimizer, caller)
    # Copied together, the new optimizer holds the parameters of the new network, each with its state.
    model, optimizer = copy.deepcopy((model, optimizer))
    shift(model, 1 if plain else -1)
    for block in simplified_blocks(model):
        block.skip = None if plain else block.make_skip()
    return model if optimizer is None else (model, optimizer)


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, caller: str) -> None:
    """Refuses an optimizer under which the two networks would part."""
    kind = type(optimizer).__name__
    if type(optimizer) not in SHIFT_INVARIANT:
        known = ", ".join(cls.__name__ for cls in SHIFT_INVARIANT)
        raise ValueError(
            f"{caller}: optimizer={kind} is none of those whose updates follow from gradients alone ({known}), so its "
            f"state has no exact image. Use one of these, or {caller}(model) alone and a new optimizer."
        )
    own = {id(p) for p in model.parameters()}
    kernels = {id(block.conv.weight) for block in simplified_blocks(model)}
    for i, group in enumerate(optimizer.param_groups):
        if any(id(p) not in own for p in group["params"]):
            raise ValueError(
                f"{caller}: optimizer.param_groups[{i}] holds parameters that are not the model's; give the "
                "optimizer that was built with model.parameters()."
            )
        decay = group.get("weight_decay", 0)
        if decay and any(id(p) in kernels for p in group["params"]):
            raise ValueError(
                f"{caller}: optimizer.param_groups[{i}] decays weights of blocks towards 0 (weight_decay={decay}), "
                "which is another place in the other form. Set its weight_decay to 0 and add unskip.train.ShiftedDecay("
                f"{decay}, unskip.train.identity_shift(model)) to the loss, before and after."
            )
