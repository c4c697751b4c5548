"""Training with less memory: what a norm and an activation give is computed again for the backward pass.

    u = W_1 ⊛ x,  a = σ(norm(u)),  W_2 ⊛ a      kept: x and u; a comes from u, number by number

The backward pass of the norm needs u anyway, so that a can be had for one pass over it. Under torch.compile the region
is marked, and the compiler decides; in eager the tensors that autograd would keep are replaced by a way to make them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unskip.kernels.depthwise import JoinedSequential, joined
from unskip.kernels.dispatch import differentiates_backwards

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
        return isinstance(layer, (nn.Conv2d, nn.Linear))  # not `|`, which the compiler of PyTorch 2.6 refuses


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
    if isinstance(act, (nn.modules.dropout._DropoutNd, nn.RReLU)):
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
    read = place(v)
    by_act: list[_Kept] = []

    def wait(tensor: Tensor) -> Any:
        by_act.append(_Kept(tensor))
        return by_act[-1]

    with saved_tensors_hooks(wait, made):
        a = act(v)
    written = place(a)
    # An activation keeps what it reads, what it gives, or something between, which stays: in place many keep a copy of
    # what they have read.
    for kept in by_act:
        kept.replace({read: recipe.normed, written: recipe.activated})
    by_act.clear()

    def by_conv(tensor: Tensor) -> Any:
        kept = _Kept(tensor)
        kept.replace({written: recipe.keep})
        return kept

    with saved_tensors_hooks(by_conv, made):
        return conv(a)


Place = tuple[int, torch.Size, torch.dtype]


def place(tensor: Tensor) -> Place:
    """Which tensor it is. By its shape too, for on the meta device all addresses are 0."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype


class _Kept:
    """A tensor for the backward pass, or a way to make it."""

    def __init__(self, tensor: Tensor) -> None:
        self.what: Tensor | Callable[[], Tensor] = tensor

    def replace(self, ways: dict[Place, Callable[[], Tensor]]) -> None:
        """Lets the tensor go, if there is a way to make it."""
        assert isinstance(self.what, Tensor)
        self.what = ways.get(place(self.what), self.what)


def made(kept: _Kept) -> Tensor:
    return kept.what if isinstance(kept.what, Tensor) else kept.what()


class _Recipe:
    """How to make again what was not kept. Modules are run by `forward`, past the hooks of whoever is watching.

    They run in the precision of the forward pass: a backward pass is outside of its autocast.
    """

    def __init__(self, norm: nn.Module, act: nn.Module, u: Tensor) -> None:
        self.norm, self.act, self.u = norm, act, u
        self.ready: Tensor | None = None  # what the convolution has asked for a moment ago, for the activation
        kind = u.device.type
        mixed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        self.mixed = torch.get_autocast_dtype(kind) if mixed else None

    def as_before(self) -> AbstractContextManager[object]:
        if self.mixed is None:
            return nullcontext()
        return torch.autocast(self.u.device.type, self.mixed, cache_enabled=False)

    @torch.no_grad()
    def normed(self) -> Tensor:
        norm = self.norm
        if isinstance(norm, BATCH_NORMS):
            return F.batch_norm(self.u, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
        with self.as_before():
            return norm.forward(self.u)

    @torch.no_grad()
    def activated(self) -> Tensor:
        ready, self.ready = self.ready, None
        if ready is not None:
            return ready
        with self.as_before():
            return self.act.forward(self.normed())

    def keep(self) -> Tensor:
        self.ready = self.activated()
        return self.ready
