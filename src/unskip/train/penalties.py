"""Penalties and constraints: small objects that compose.

A penalty is a function of the network that is added to the loss. A constraint changes the weights in place after each
update. Lists of both are what `unskip.train.run` takes; `from_config` makes those that a recipe names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unskip._core.modules import unwrap
from unskip.models.simplified import simplified_blocks
from unskip.train.recipe import OptimizerConfig

Penalty = Callable[[nn.Module], Tensor]
Constraint = Callable[[nn.Module], None]

UNITS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # weight: (units, incoming, ...)


def unit_weights(network: nn.Module) -> list[Tensor]:
    """The trained weights of linear layers and convolutions, in order, each once."""
    found = {id(m.weight): m.weight for m in network.modules() if isinstance(m, UNITS) and m.weight.requires_grad}
    return list(found.values())


@dataclass(frozen=True)
class MaxNorm:
    """Scales each hidden unit's incoming weights down to norm `limit` where larger (Oyedotun et al. 2020, VI.C).

        w_j <- w_j * min(1, limit / ||w_j||)

    The units of the classifier are not hidden: those of `network.get_classifier()`, where it has one, stay as they are.
    """  # fmt: skip

    limit: float

    @torch.no_grad()
    def __call__(self, network: nn.Module) -> None:
        find: Any = getattr(unwrap(network), "get_classifier", None)
        head = None if find is None else find()
        shown = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
        for weight in unit_weights(network):
            if id(weight) in shown:
                continue
            norm = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.ndim - 1))
            weight.mul_((self.limit / norm.clamp_min(1e-12)).clamp_max(1.0))


@dataclass(frozen=True)
class Orthogonal:
    """Orthogonal regularisation (Hu, B.2), summed over the weights W (D x d), n = min(D, d):

        l(W) = eta * || n / trace(Sigma) * Sigma - I_n ||_F^2,   Sigma = W^T W if D >= d, else W W^T

    A convolution's W is (units, incoming channels times taps).
    """  # fmt: skip

    eta: float

    def __call__(self, network: nn.Module) -> Tensor:
        losses = [orthogonality(weight.flatten(1)) for weight in unit_weights(network)]
        return self.eta * torch.stack(losses).sum()


def orthogonality(W: Tensor) -> Tensor:
    """|| n / trace(Sigma) * Sigma - I_n ||_F^2 of one matrix: 0 for orthogonal rows or columns at any scale."""
    W = W if W.shape[0] >= W.shape[1] else W.T
    n = W.shape[1]
    Sigma = W.T @ W
    return (Sigma * (n / Sigma.trace().clamp_min(1e-12)) - torch.eye(n, dtype=W.dtype, device=W.device)).square().sum()


@dataclass(frozen=True)
class ShiftedDecay:
    """Weight decay measured from a shift (Yu and Tomasi 2019, 4.1):

        l = weight_decay / 2 * sum_i || p_i - shift_i ||^2

    The gradient is weight_decay * (p - shift): for a shift of 0 what SGD's own weight decay adds. With the identity for
    a shift, a plain network decays as the residual network that computes the same function.
    `shift` holds one tensor for each parameter that decays from it; the optimizer must not decay these too.
    """  # fmt: skip

    weight_decay: float
    shift: dict[str, Tensor] = field(repr=False)

    def __call__(self, network: nn.Module) -> Tensor:
        named = dict(unwrap(network).named_parameters())
        away = [(named[name] - shift.to(named[name])).square().sum() for name, shift in self.shift.items()]
        return self.weight_decay / 2 * torch.stack(away).sum()


def identity_shift(network: nn.Module) -> dict[str, Tensor]:
    """What a plain network decays from to decay as the residual network does that computes the same function.

    rho of Eq. (1): 1 at the ID entries (c, c, 0, 0), c < min(C, D), of each convolution but the first, else 0. The
    first convolution is the stem, which no skip goes around. Convolutions without a centre tap or in groups, and
    linear layers, decay from 0, so they are in it too. A simplified network knows its ID entries, which are 0 where a
    block has a skip.
    """
    network = unwrap(network)
    known = {id(block.conv): block for block in simplified_blocks(network)}
    shift = {}
    first = True
    for name, module in network.named_modules():
        if not isinstance(module, UNITS) or not module.weight.requires_grad:
            continue
        rho = torch.zeros_like(module.weight, requires_grad=False)
        if id(module) in known:
            rho = known[id(module)].rho() if known[id(module)].skip_free else rho
        elif isinstance(module, nn.Conv2d) and not known:
            U, V = module.kernel_size
            if not first and module.groups == 1 and U % 2 and V % 2:
                nn.init.dirac_(rho)
            first = False
        shift[f"{name}.weight"] = rho
    return shift


def start_shift(network: nn.Module) -> dict[str, Tensor]:
    """The weights of linear layers and convolutions as they are now."""
    ids = {id(weight) for weight in unit_weights(network)}
    return {name: p.detach().clone() for name, p in unwrap(network).named_parameters() if id(p) in ids}


def from_config(network: nn.Module, config: OptimizerConfig) -> tuple[list[Penalty], list[Constraint]]:
    """The penalties and constraints that a recipe names, for a network that has not been trained yet."""
    penalties: list[Penalty] = [Orthogonal(config.orthogonal)] if config.orthogonal else []
    if config.decay_from != "zero" and config.weight_decay:
        shift = identity_shift(network) if config.decay_from == "identity" else start_shift(network)
        penalties.append(ShiftedDecay(config.weight_decay, shift))
    return penalties, [MaxNorm(config.max_norm)] if config.max_norm else []


def total(penalties: Sequence[Penalty], network: nn.Module) -> Tensor | None:
    """The sum of the penalties, None where there are none."""
    values = [penalty(network) for penalty in penalties]
    return torch.stack(values).sum() if values else None
