"""Training with less memory: the output of norm and activation is computed again in the backward pass.

    u = W_1 ⊛ x,  a = σ(norm(u)),  W_2 ⊛ a      kept: x and u; a comes from u, number by number

The backward pass of the norm needs u anyway, so that a can be had for one pass over it. Under torch.compile the region
is marked, and the compiler decides; in eager `torch.utils.checkpoint` computes norm and activation again. It stops
there: the convolution, which only keeps its input, does not run twice.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unskip.kernels.depthwise import JoinedSequential, joined
from unskip.kernels.dispatch import differentiates_backwards

# Norms that can be computed again without a trace: without statistics over processes.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
STATELESS = (nn.GroupNorm, nn.LayerNorm)


class LeanSequential(JoinedSequential):
    """nn.Sequential that keeps only the outputs of convolutions in convolution, norm, activation, convolution.

    In evaluation, where there is nothing to save, for norms and dropout that can't be computed again exactly, and under
    the transforms of torch.func, which forbid such hooks, it is an ordinary nn.Sequential.
    """

    def advance(self, layers: list[nn.Module], x: Tensor) -> tuple[Tensor, int]:
        found = joined(layers, x)
        if found is not None:
            return found
        if self.training and len(layers) > 2 and self.lean(layers[2]) and repeatable(*layers[:2]):
            return checkpointed(layers[:3], x), 3
        return layers[0](x), 1

    def lean(self, layer: nn.Module) -> bool:
        """Whether the input of this layer is computed again in the backward pass."""
        return isinstance(layer, (nn.Conv2d, nn.Linear))  # not `|`, which the compiler of PyTorch 2.6 refuses


class LeanInverted(LeanSequential):
    """The same for the input of depthwise convolutions alone: the widest activation of an inverted bottleneck."""

    def lean(self, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Conv2d) and layer.groups > 1


def repeatable(norm: nn.Module, act: nn.Module) -> bool:
    """Whether a norm, in training mode, and an activation return the same when they are computed again."""
    if isinstance(act, (nn.modules.dropout._DropoutNd, nn.RReLU)):
        return False
    known = type(norm) in STATELESS or (type(norm) in BATCH_NORMS and norm.training)
    return known and torch.is_grad_enabled() and differentiates_backwards()


def checkpointed(layers: list[nn.Module], u: Tensor) -> Tensor:
    """conv(act(norm(u))) for `layers` = [norm, act, conv], keeping u alone."""
    *between, conv = layers
    if torch.compiler.is_compiling():
        return conv(checkpoint(run, between, u, use_reentrant=False))
    second = Recomputation()

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = recompute(layer, x) if second.started else layer(x)
        return x

    contexts = (nullcontext(), second)  # of the forward pass, and of each time that it is computed again
    y: Tensor = checkpoint(forward, u, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts)
    return y


class Recomputation(nullcontext[None]):
    """A context that notes when it is entered, in the backward pass: layers are computed again from then on."""

    started = False

    def __enter__(self) -> None:
        self.started = True


def run(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def recompute(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's output once more, without its hooks and without a second update of running statistics."""
    if not isinstance(layer, BATCH_NORMS):
        return layer.forward(x)
    mean, var = (layer.running_mean, layer.running_var) if layer.track_running_stats else (None, None)
    mean, var = None if mean is None else mean.clone(), None if var is None else var.clone()
    return F.batch_norm(x, mean, var, layer.weight, layer.bias, training=True, eps=layer.eps)
