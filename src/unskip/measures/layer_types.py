"""What a module is, where its units are, and tensors as (samples, entries) or (observations, units)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

ACTIVATIONS = tuple(  # PyTorch's element-wise non-linearities
    value
    for value in vars(nn.modules.activation).values()
    if isinstance(value, type)
    and issubclass(value, nn.Module)
    and value not in (nn.Module, nn.MultiheadAttention)
    and "Soft" not in value.__name__.replace("Softplus", "").replace("Softsign", "")  # softmax mixes its inputs
)
# Modules without children that are not PyTorch's own, by what the name of their class says.
BY_NAME = {
    "attention": ("attention",),
    "norm": ("norm",),
    "pass": ("drop", "stochasticdepth", "identity"),
    "pool": ("pool",),
    "activation": ("relu", "gelu", "silu", "swish", "mish", "tanh", "sigmoid", "elu", "softplus", "activation"),
}


PARAMETRIZATIONS = "parametrizations"  # where torch.nn.utils.parametrize keeps what a weight is made from


def has_parts(module: nn.Module) -> bool:
    """Whether a module is made of others. What a weight is made from (weight norm, spectral norm) is no part."""
    return any(name != PARAMETRIZATIONS for name, _ in module.named_children())


def kind_of(module: nn.Module) -> str:
    """The kind of a layer: by class where PyTorch has one, else by the name of the class."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return "conv"
    if isinstance(module, nn.Linear | nn.Bilinear):
        return "linear"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm):
        return "norm"
    if isinstance(module, nn.Dropout | nn.Identity | nn.Flatten | nn.Unflatten):
        return "pass"
    if has_parts(module):
        return "block"
    if isinstance(module, ACTIVATIONS):
        return "activation"
    name = type(module).__name__.lower()
    return next((kind for kind, parts in BY_NAME.items() if any(part in name for part in parts)), "other")


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest of tuples, lists, mappings and objects with tensor attributes, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, nn.Module | torch.Size | str | bytes) or not hasattr(value, "__dict__"):
        return []
    return [item for item in vars(value).values() if isinstance(item, Tensor)]


def floating_in(value: Any) -> Tensor | None:
    """The first tensor with real floating-point numbers in a nest."""
    return next((tensor for tensor in tensors_in(value) if tensor.is_floating_point()), None)


def unit_axis(module: nn.Module, kind: str, output: Tensor, before: int) -> int:
    """Which axis of an output holds the units (channels, features): 1 or -1.

    Convolutions and their pooling and BatchNorm have them at 1; linear layers, attention, recurrent nets, embeddings
    and LayerNorm at the end; what has no opinion (activations, blocks) keeps the axis of the layer before it.
    """
    if output.ndim <= 2:
        return -1
    if kind in ("conv", "pool") or isinstance(
        module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LocalResponseNorm
    ):
        return 1
    if kind in ("linear", "attention", "recurrent", "embedding"):
        return -1
    if isinstance(module, nn.LayerNorm) and "2d" not in type(module).__name__.lower():
        return -1
    return before


def by_sample(x: Tensor, samples: int, axis: int = 0) -> Tensor | None:
    """x as (B, entries); None where its shape does not say which entry belongs to which sample.

    Windows and frames that were folded into the first axis (B·W, ...) are unfolded.
    """
    x = x.detach()
    if x.ndim == 0 or x.numel() == 0:
        return None
    if axis:
        x = x.movedim(axis, 0)
    return x.reshape(samples, -1) if x.shape[0] % samples == 0 else None


def by_unit(x: Tensor, axis: int, most: int) -> Tensor:
    """x as (observations, units): every sample and position is one observation of all units.

    At most `most` observations, spread evenly over all of them.
    """
    x = x.detach()
    if x.ndim <= 1:
        x = x.reshape(-1, 1)
    x = x.flatten(2) if axis == 1 and x.ndim > 2 else x.flatten(0, -2)[..., None]  # (A, units, P)
    first, last = x.shape[0], x.shape[2]
    chosen = torch.linspace(0, first * last - 1, min(most, first * last), dtype=torch.float64, device=x.device).long()
    return x[chosen // last, :, chosen % last]
