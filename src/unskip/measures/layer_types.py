"""The kind of a module, the tensors in its inputs and outputs, and which of their axes hold samples and units."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

ACTIVATIONS = tuple(  # PyTorch's element-wise activation functions
    value
    for value in vars(nn.modules.activation).values()
    if isinstance(value, type)
    and issubclass(value, nn.Module)
    and value not in (nn.Module, nn.MultiheadAttention)
    and "Soft" not in value.__name__.replace("Softplus", "").replace("Softsign", "")  # softmax mixes its inputs
)
BY_CLASS: dict[type | tuple[type, ...], str] = {
    nn.modules.conv._ConvNd: "conv",
    (nn.Linear, nn.Bilinear): "linear",
    (nn.RNNBase, nn.RNNCellBase): "recurrent",
    nn.MultiheadAttention: "attention",
    (nn.Embedding, nn.EmbeddingBag): "embedding",
    (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm): "norm",
    (nn.Dropout, nn.Identity, nn.Flatten, nn.Unflatten): "pass",
    ACTIVATIONS: "activation",
}
BY_NAME = {  # kind: parts of the class names of modules without children that are not PyTorch's own
    "attention": ("attention",),
    "norm": ("norm",),
    "pass": ("drop", "stochasticdepth", "identity"),
    "pool": ("pool",),
    "activation": ("relu", "gelu", "silu", "swish", "mish", "tanh", "sigmoid", "elu", "softplus", "activation"),
}
PARAMETRIZATIONS = "parametrizations"  # where torch.nn.utils.parametrize keeps the original tensors of a weight


def has_parts(module: nn.Module) -> bool:
    """Whether a module has submodules, not counting parametrizations (weight norm, spectral norm)."""
    return any(name != PARAMETRIZATIONS for name, _ in module.named_children())


def kind_of(module: nn.Module) -> str:
    """The kind of a layer: by class where PyTorch has one, else by the name of the class."""
    known = next((kind for classes, kind in BY_CLASS.items() if isinstance(module, classes)), None)
    if known is not None and (known != "activation" or not has_parts(module)):
        return known
    if has_parts(module):
        return "block"
    name = type(module).__name__.lower()
    return next((kind for kind, parts in BY_NAME.items() if any(part in name for part in parts)), "other")


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, mappings and objects with tensor attributes, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, nn.Module | torch.Size | str | bytes) or not hasattr(value, "__dict__"):
        return []
    return [item for item in vars(value).values() if isinstance(item, Tensor)]


def floating_in(value: Any) -> Tensor | None:
    """The first floating-point tensor in a nested structure."""
    return next((tensor for tensor in tensors_in(value) if tensor.is_floating_point()), None)


def unit_axis(module: nn.Module, kind: str, output: Tensor, before: int) -> int:
    """The axis of an output that holds the units (channels, features): 1 or -1.

    It is 1 for convolutions, pooling and BatchNorm, and -1 for linear layers, attention, recurrent layers, embeddings
    and LayerNorm. All others (activations, blocks) keep `before`, the axis of the layer before them.
    """
    if output.ndim <= 2:
        return -1
    channels_first = nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LocalResponseNorm
    if kind in ("conv", "pool") or isinstance(module, channels_first):
        return 1
    if kind in ("linear", "attention", "recurrent", "embedding"):
        return -1
    if isinstance(module, nn.LayerNorm) and "2d" not in type(module).__name__.lower():
        return -1
    return before


def sample_axis(module: nn.Module, shape: tuple[int, ...], samples: int) -> int | None:
    """The axis of an input or output that holds the samples, None if the shape does not tell.

    Recurrent layers have time first unless `batch_first` is set. Windows or frames may be folded into the first axis.
    """
    if isinstance(module, nn.RNNBase) and not module.batch_first and len(shape) == 3:
        return 1
    if not shape:
        return None
    if shape[0] != samples and len(shape) >= 3 and shape[1] == samples:
        return 1
    return 0 if shape[0] % samples == 0 else None
