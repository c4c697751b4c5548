"""The first updates of an optimizer: whether they make the tokens of a text alike before anything else is learnt.

The entries of AdamW's first updates are all about ±η, so that an update's largest singular value is of the order of
η √(d_in d_out). Without skips that multiplies into the product of all layers, and the same direction is added in each
of them: all tokens turn into it (`unskip.theory.common_growth`). Here the updates are made, on a copy.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unskip._core.modules import preserved, unwrap
from unskip.measures.losses import loss_of
from unskip.measures.series import Measured
from unskip.measures.tokens import token_spread

MakeOptimizer = Callable[[nn.Module], Optimizer]
UPDATES = 16  # that are made to see whether a network starts
COLLAPSED = 0.05  # spread of tokens below which a network did not start (benchmarks/records/2026-11-19_gpt-start_cpu)


def last_tokens(measured: Measured) -> str | None:
    """The last layer but one that all paths pass through and that has tokens; None if there is none."""
    if "token_spread" not in measured.series:
        return None
    known = measured.series["token_spread"].by_layer()
    hidden = [layer.name for layer in measured.layers[:-1] if layer.trunk and layer.name in known]
    return hidden[-1] if hidden else None


def first_updates(
    model: nn.Module,
    optimizer: MakeOptimizer,
    batches: Sequence[tuple[Any, Tensor]],
    *,
    layer: str,
    updates: int = UPDATES,
    clip: float = 0.0,
    set_rate: Callable[[Optimizer, int], None] | None = None,
) -> tuple[float, ...]:
    """The spread of tokens (`token_spread`) behind a layer before the first update and after each of the updates.

    Args:
        model: it stays as it is; a copy is trained.
        optimizer: makes the optimizer of that copy.
        batches: inputs and targets, one for each update; they begin again where there are fewer.
        layer: path of the module whose output is looked at, see `last_tokens`.
        updates: how many.
        clip: the largest norm of the gradient; 0 is off.
        set_rate: called with the optimizer and the number of an update before it, for a warm-up.
    """
    seen: list[float] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(token_spread(output.detach().flatten(1, -2)))

    with preserved(model), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        trained = copy.deepcopy(unwrap(model)).train()
        trained.get_submodule(layer).register_forward_hook(look)
        made = optimizer(trained)
        for number, (x, y) in zip(range(updates + 1), cycle(batches), strict=False):
            loss, _ = loss_of(trained(x), y, None, len(y), 0)
            if number == updates or not torch.isfinite(loss):
                break
            if set_rate is not None:
                set_rate(made, number)
            made.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(trained.parameters(), clip)
            made.step()
    return tuple(seen)


def slower(optimizer: MakeOptimizer, factor: float) -> MakeOptimizer:
    """The same optimizer with all of its learning rates multiplied by a factor."""

    def make(model: nn.Module) -> Optimizer:
        made = optimizer(model)
        for group in made.param_groups:
            group |= {name: factor * group[name] for name in ("lr", "adamw_lr") if name in group}
        return made

    return make
