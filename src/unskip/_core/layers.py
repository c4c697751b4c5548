"""The protocol of special layers: a layer that is an ordinary one in other parameters, or computed another way.

`unskip.fold` and `unskip.methods.stacked` know no class of layer but PyTorch's own. They ask each layer for its
ordinary one, so that a layer of another package folds too.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

PACKAGES = ("torch", "torchvision", "timm", "unskip")  # whose layers do what their class says
# What a subclass may redefine without changing what it computes.
COSMETIC = ("__init__", "__repr__", "__setstate__", "__getstate__", "extra_repr", "reset_parameters")


@runtime_checkable
class SpecialLayer(Protocol):
    """An nn.Module that knows an ordinary module with the same function.

    A layer that is faster than its ordinary one may have a second method, `to_fast() -> nn.Module | None`: the module
    that `fold(model, "fast")` keeps, itself or another; None if the ordinary one is as fast.
    """

    def to_ordinary(self) -> nn.Module:
        """The module of ordinary layers (convolution, linear layer, activation, pooling) with the same function.

        In eval mode, where the two may differ in training. Raises `unskip.methods.Unsupported` with a reason if there
        is none.
        """
        ...


def ordinary(layer: nn.Module) -> nn.Module:
    """The ordinary module of a special layer, in the same mode; any other module as it is."""
    return layer.to_ordinary().train(layer.training) if isinstance(layer, SpecialLayer) else layer


def fast_form(layer: nn.Module) -> nn.Module | None:
    """What `fold(model, "fast")` keeps of a special layer, in the same mode; None if that is its ordinary module."""
    to_fast: Callable[[], nn.Module | None] | None = getattr(layer, "to_fast", None)
    fast = None if to_fast is None else to_fast()
    return None if fast is None else fast.train(layer.training)


class Fast:
    """A special layer that is itself what `fold(model, "fast")` keeps."""

    def to_fast(self) -> Any:
        return self


def has_ordinary_weight(layer: nn.Module) -> bool:
    """Whether a layer computes as nn.Conv2d or nn.Linear does with its own weight, so that this can be rewritten."""
    if not isinstance(layer, nn.Conv2d | nn.Linear):
        return False
    known = ordinary(layer)
    return type(known) in (nn.Conv2d, nn.Linear) and known.weight is layer.weight


def altered(module: nn.Module) -> str:
    """What may change a module's output beside its class: a hook, or a method set on the instance; '' for nothing."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "has a forward hook"
    own = [name for name in vars(module) if callable(getattr(type(module), name, None))]
    return f"has a method, {own[0]!r}, that was set on the instance" if own else ""


def inherits(cls: type, known: type) -> bool:
    """Whether a class does what `known`, itself or a parent, does: nothing between the two redefines a method."""
    return not any(
        isinstance(value, property) or (callable(value) and hasattr(known, name))
        for parent in cls.__mro__[: cls.__mro__.index(known)]
        for name, value in vars(parent).items()
        if name not in COSMETIC
    )


def inherits_from(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """isinstance(module, classes), where the module's class must inherit unchanged what that class does."""
    known = next((cls for cls in type(module).__mro__ if cls in classes), None)
    return known is not None and inherits(type(module), known)


def behaves_as(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """isinstance(module, classes), for what a module does: its class must inherit that unchanged, and nothing alter it.

    Whatever concludes from a module's class what it computes asks this.
    """
    return inherits_from(module, *classes) and not altered(module)


def known_class(module: nn.Module) -> type:
    """The module's class or its nearest parent that is of PyTorch, torchvision, timm or unskip."""
    return next(cls for cls in type(module).__mro__ if cls.__module__.split(".")[0] in PACKAGES)


def redefines(module: nn.Module) -> type | None:
    """The known class whose methods the module's own class redefines; None if there is none.

    Of a class that derives from nn.Module alone nobody concludes anything.
    """
    known = known_class(module)
    return None if known is nn.Module or inherits(type(module), known) else known


def layer_with(weight: Tensor, bias: Tensor | None = None, **settings: Any) -> nn.Conv2d | nn.Linear:
    """An ordinary layer with this weight and bias: linear for a matrix, else a convolution with these settings."""
    outputs, inputs, *kernel = weight.shape
    new: Any
    if kernel:
        inputs *= settings.get("groups", 1)
        kind: Any = nn.Conv1d if len(kernel) == 1 else nn.Conv2d
        new = kind(inputs, outputs, tuple(kernel), bias=bias is not None, device="meta", **settings)
    else:
        new = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    new.weight = nn.Parameter(weight.detach().clone().contiguous())
    new.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    made: nn.Conv2d | nn.Linear = new
    return made


def conv_settings(conv: nn.Conv1d | nn.Conv2d) -> dict[str, Any]:
    """How a convolution moves over its input, as arguments for another."""
    return {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
