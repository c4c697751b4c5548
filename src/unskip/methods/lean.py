"""Training with less memory: what a norm and an activation give is computed again for the backward pass.

    u = W_1 ⊛ x,  a = σ(norm(u)),  W_2 ⊛ a      kept: x and u; a comes from u, number by number

The norm's backward pass needs u anyway, so that a costs as much memory as u for one pass over it.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unskip.methods.spec import NORMS


def run_lean(layers: nn.Sequential, x: Tensor) -> Tensor:
    """The layers one after another; norm and activation, wherever a convolution reads them, are computed twice."""
    between: list[nn.Module] = []  # what stands between two convolutions
    for layer in layers:
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            between.append(layer)
            continue
        if between:
            x = again(nn.Sequential(*between), x)
            between = []
        x = layer(x)
    for layer in between:
        x = layer(x)
    return x


def again(between: nn.Sequential, x: Tensor) -> Tensor:
    chance = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p for module in between)
    if chance or not isinstance(between[0], NORMS) or not torch.compiler.is_compiling():
        return between(x)
    return checkpoint(between, x, use_reentrant=False)
