"""Finds the blocks whose input is proven to hold nothing negative, which an exact method must know.

Two things make the proof. A symbolic trace of the model shows that it takes no decision by values, sizes or arguments,
so one forward pass stands for all. And that pass, on the meta device, follows every write to memory, also through a
view: storage holds nothing negative from the moment when a ReLU or the like has filled it until something else writes
to it. Without a proof a block counts as reading both signs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unskip._core.errors import reason
from unskip._core.layers import altered, inherits, known_class
from unskip._core.modules import preserved
from unskip.surgery.tracing import InputTracer, other_arguments

Arguments = dict[str, Any]


def _always(arguments: Arguments) -> bool:
    return True


# Operators that write nothing negative, and those that do so where they read nothing negative.
RECTIFYING: dict[str, Callable[[Arguments], bool]] = {
    **dict.fromkeys(("relu", "relu6", "sigmoid", "hardsigmoid", "abs"), _always),
    "softplus": lambda a: a["beta"] > 0 and a["threshold"] >= 0,
    "hardtanh": lambda a: 0 <= a["min_val"] <= a["max_val"],
    "clamp": lambda a: a["min"] is not None and a["min"] >= 0 and (a["max"] is None or a["max"] >= 0),
    "clamp_min": lambda a: a["min"] >= 0,
}
PASSING: dict[str, Callable[[Arguments], bool]] = {
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices", "adaptive_max_pool2d", "mean", "amax"), _always),
    **dict.fromkeys(("adaptive_avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d"), _always),
    **dict.fromkeys(("upsample_bilinear2d", "clone", "to", "_to_copy", "cat"), _always),
    "avg_pool2d": lambda a: a["divisor_override"] is None or a["divisor_override"] > 0,
    "constant_pad_nd": lambda a: a["value"] >= 0,
}
LAYERS = ("torch.nn.modules", "timm.layers", "unskip.")  # packages whose modules decide nothing by their input
MODES = (torch.no_grad, torch.enable_grad, torch.inference_mode)  # a forward may ask which it runs in


class _Tracer(InputTracer):
    """Follows the code of a model symbolically; some modules, and layers of PyTorch, timm and unskip, stay whole."""

    def __init__(self, whole: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.whole = set(whole)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = known_class(m)
        layer = known not in (nn.Module, nn.Sequential) and known.__module__.startswith(LAYERS)
        return m in self.whole or (layer and inherits(type(m), known))


def decides(module: nn.Module, whole: Iterable[nn.Module] = (), *, defaults: bool = False) -> str:
    """How a module's forward depends on more than the numbers it reads: an argument, a branch; '' if it doesn't.

    Args:
        module: a model, or a block.
        whole: parts whose code is not looked at.
        defaults: whether arguments other than the input are taken at their defaults.
    """
    others = other_arguments(module)
    if others and not defaults:
        return f"its forward takes more than its input ({', '.join(other.name for other in others)})"
    try:
        with preserved(module):  # whose forward may keep what is symbolic
            _Tracer(whole).trace(module, {p.name: p.default for p in others if p.default is not p.empty})
    except Exception as error:  # any forward may fail in any way on a symbolic input
        return f"its forward can't be followed for every input ({reason(error)})"
    return ""


def meta_input(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """A batch of two inputs of this shape on the meta device, in the model's dtype."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return torch.empty(2, *shape, dtype=dtype, device="meta")


def nonnegative_inputs(model: nn.Module, blocks: dict[str, nn.Module], shape: tuple[int, ...]) -> set[str]:
    """The paths of the blocks that read nothing negative in any of their calls.

    Args:
        model: on the meta device, in eval mode.
        blocks: its blocks by path.
        shape: of one input that the model takes.
    """
    if any(map(altered, model.modules())) or decides(model, blocks.values()):
        return set()
    calls: dict[nn.Module, list[bool]] = {block: [] for block in blocks.values()}
    signs = _Signs()

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[block].append(len(args) == 1 and not kwargs and signs.holds(args[0]))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in calls]
    try:
        for mode in MODES:
            with mode(), signs:
                model(meta_input(model, shape))
    except Exception:  # what can't run on the meta device is not proven
        return set()
    finally:
        for handle in handles:
            handle.remove()
    return {path for path, block in blocks.items() if calls[block] and all(calls[block])}


class _Signs(TorchDispatchMode):
    """Knows which storages hold nothing negative while a model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.nonnegative: dict[int, bool] = {}
        self.kept: list[Any] = []  # so that no other storage gets the address of one that is gone

    def holds(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and self.nonnegative.get(_storage(tensor), False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = {a.name: a.default_value for a in func._schema.arguments}
        arguments |= dict(zip(arguments, args, strict=False)) | (kwargs or {})
        written = [arguments[a.name] for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        read = _tensors(arguments)
        name = func.overloadpacket.__name__.removesuffix("_")
        nonnegative = name in RECTIFYING and RECTIFYING[name](arguments)
        if name in PASSING and PASSING[name](arguments):
            nonnegative = all(map(self.holds, read))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(written):
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            self.nonnegative[_storage(tensor)] = nonnegative and (whole or self.holds(tensor))
        known = set(map(_storage, read))
        for tensor in _tensors(result):
            if _storage(tensor) not in known:  # else a view, or what was written
                self.nonnegative[_storage(tensor)] = nonnegative
        self.kept.append(result)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
