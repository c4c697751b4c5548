"""Training with less memory: what a norm and an activation give is computed again for the backward pass.

    u = W_1 ⊛ x,  a = σ(norm(u)),  W_2 ⊛ a      kept: x and u; a comes from u, number by number

The backward pass of the norm needs u anyway, so that a can be had for one pass over it. Under torch.compile the region
is marked, and the compiler decides; in eager the tensors that autograd would keep are replaced by a way to make them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unskip.methods.depthwise import JoinedSequential, joined
from unskip.methods.modes import differentiates_backwards

# Norms that can be computed again without a trace: without statistics over processes.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
STATELESS = (nn.GroupNorm, nn.LayerNorm)


class LeanSequential(JoinedSequential):
    """Layers one after another; of convolution, norm, activation, convolution only what convolutions give is kept.

    In evaluation, where there is nothing to save, for norms and dropout that can't be computed again exactly, and under
    the transforms of torch.func, which forbid such hooks, it is an ordinary nn.Sequential.
    """

    def advance(self, layers: list[nn.Module], x: Tensor) -> tuple[Tensor, int]:
        found = joined(layers, x)
        if found is not None:
            return found
        if self.training and len(layers) > 2 and self.lean(layers[2]) and repeatable(layers[:2]):
            return normed(layers[:2], layers[2], x), 3
        return layers[0](x), 1

    def lean(self, layer: nn.Module) -> bool:
        """Whether what this layer reads is computed again."""
        return isinstance(layer, nn.Conv2d | nn.Linear)


class LeanInverted(LeanSequential):
    """The same for what a depthwise convolution reads alone: the widest activation of an inverted bottleneck."""

    def lean(self, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Conv2d) and layer.groups > 1


def run(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def repeatable(layers: list[nn.Module]) -> bool:
    """A norm, of this batch, and one activation, both without chance."""
    norm, act = layers
    if isinstance(act, nn.modules.dropout._DropoutNd):
        return False
    known = type(norm) in STATELESS or (type(norm) in BATCH_NORMS and norm.training)
    return known and torch.is_grad_enabled() and differentiates_backwards()


def normed(between: list[nn.Module], conv: nn.Module, u: Tensor) -> Tensor:
    """conv(act(norm(u))), keeping u."""
    norm, act = between
    if torch.compiler.is_compiling():
        return conv(checkpoint(run, between, u, use_reentrant=False))
    v = norm(u)
    recipe = _Recipe(norm, act, u.detach())
    # Numbers, not the tensors: autograd holds these functions, and with them whatever they refer to.
    address, like = v.data_ptr(), (v.shape, v.dtype)

    def by_act(tensor: Tensor) -> Any:
        # An activation keeps what it reads or what it gives; in place these are one, and either has the same gradient.
        if (tensor.shape, tensor.dtype) != like:
            return tensor
        return recipe.normed if tensor.data_ptr() == address else recipe.activated

    with saved_tensors_hooks(by_act, made):
        a = act(v)
    read = a.data_ptr()

    def by_conv(tensor: Tensor) -> Any:
        # By its shape too, for on the meta device all addresses are 0.
        same = tensor.data_ptr() == read and (tensor.shape, tensor.dtype) == like
        return recipe.keep if same else tensor

    with saved_tensors_hooks(by_conv, made):
        return conv(a)


def made(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


class _Recipe:
    """How to make again what was not kept. Modules are run by `forward`, past the hooks of whoever is watching."""

    def __init__(self, norm: nn.Module, act: nn.Module, u: Tensor) -> None:
        self.norm, self.act, self.u = norm, act, u
        self.ready: Tensor | None = None  # what the convolution has asked for a moment ago, for the activation

    @torch.no_grad()
    def normed(self) -> Tensor:
        norm = self.norm
        if isinstance(norm, BATCH_NORMS):
            return F.batch_norm(self.u, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
        return norm.forward(self.u)

    @torch.no_grad()
    def activated(self) -> Tensor:
        ready, self.ready = self.ready, None
        return self.act.forward(self.normed()) if ready is None else ready

    def keep(self) -> Tensor:
        self.ready = self.activated()
        return self.ready
