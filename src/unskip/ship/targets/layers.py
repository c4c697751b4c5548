"""A network as layers and additions: the form in which tool chains of devices read it.

Identities are gone, pooling is a layer of a fixed size, and functions are layers. The path of a layer stays its name.
"""

import operator
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from unskip._core.errors import RUN_ERRORS, reason
from unskip.surgery.tracing import InputTracer

ADDITIONS = (operator.add, operator.iadd, torch.add)
Layers = list[nn.Module]


def as_layers(model: nn.Module, example: Tensor) -> fx.GraphModule:
    """The network with every function that is a layer written as one, for inputs of the example's size."""
    try:
        traced = fx.GraphModule(model, InputTracer().trace(model))
        ShapeProp(traced).propagate(example[:1])
    except RUN_ERRORS as error:
        raise ValueError(
            f"export: {type(model).__name__} can't be read layer by layer, which its target needs: {reason(error)}."
        ) from error
    for node in list(traced.graph.nodes):
        if node.op in ("placeholder", "get_attr", "output") or node.target in ADDITIONS:
            continue
        layers = _layers(node, traced)
        if layers is not None:
            _replace(node, layers, traced)
    traced.graph.eliminate_dead_code()  # sizes that nobody asks for any longer
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced.eval()


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module | Callable[..., Any] | str]]:
    """Every step by the name to show a user, and its layer, or the function that is none."""
    assert isinstance(model, fx.GraphModule)
    modules = dict(model.named_modules())
    return [
        (str(node.target) if node.op == "call_module" else node.name, modules.get(str(node.target), node.target))
        for node in model.graph.nodes
        if node.op not in ("placeholder", "output")
    ]


def _replace(node: fx.Node, layers: Layers, traced: fx.GraphModule) -> None:
    value = node.args[0]
    for layer in layers:
        kind = type(layer).__name__.lower()
        name = next(name for i in count() if not hasattr(traced, name := f"{kind}{i or ''}"))
        traced.add_submodule(name, layer)
        with traced.graph.inserting_before(node):
            value = traced.graph.call_module(name, (value,))
            value.meta = node.meta
    node.replace_all_uses_with(value)  # type: ignore[arg-type]
    traced.graph.erase_node(node)


def _layers(node: fx.Node, traced: fx.GraphModule) -> Layers | None:
    """The layers that stand for a step; none for one that does nothing, None for one that stays."""
    sources = node.all_input_nodes
    if not sources or not isinstance(sources[0], fx.Node) or "tensor_meta" not in sources[0].meta:
        return None
    before, after = (
        tuple(n.meta["tensor_meta"].shape) if hasattr(n.meta.get("tensor_meta"), "shape") else ()
        for n in (sources[0], node)
    )
    if node.op == "call_module":
        return _of_module(traced.get_submodule(str(node.target)), before, after)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in ("contiguous", "dropout", "identity"):
        return []
    if name in ("relu", "relu_"):
        return [nn.ReLU()]
    if name == "relu6":
        return [nn.ReLU6()]
    if name == "leaky_relu":
        slope = node.kwargs.get("negative_slope", node.args[1] if len(node.args) > 1 else 0.01)
        return [nn.LeakyReLU(slope)]  # type: ignore[arg-type]
    if name == "adaptive_avg_pool2d":
        return _pooling(before, after)
    if name == "mean" and len(before) == 4 and _dims(node) == {2, 3}:
        return [*(_pooling(before, (*before[:2], 1, 1)) or []), *([nn.Flatten()] if len(after) == 2 else [])]
    flat = after == (before[0], torch.Size(before[1:]).numel()) if before else False
    if name in ("flatten", "view", "reshape") and flat:
        return [nn.Flatten()] if before != after else []
    return None


def _of_module(layer: nn.Module, before: tuple[int, ...], after: tuple[int, ...]) -> Layers | None:
    if isinstance(layer, nn.Identity | nn.Dropout | nn.Dropout2d) or (
        isinstance(layer, nn.Flatten) and before == after
    ):
        return []
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return _pooling(before, after)
    if isinstance(layer, nn.ZeroPad2d):
        return [nn.ConstantPad2d(layer.padding, 0.0)]
    return None


def _pooling(before: tuple[int, ...], after: tuple[int, ...]) -> Layers | None:
    """An average over windows that all have one size."""
    if len(before) != 4 or len(after) != 4 or before[2] % after[2] or before[3] % after[3]:
        return None
    return [nn.AvgPool2d((before[2] // after[2], before[3] // after[3]))]


def _dims(node: fx.Node) -> set[int]:
    """Over which dimensions of an image a mean is taken."""
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else ())
    return {int(dim) % 4 for dim in (dims if isinstance(dims, list | tuple) else (dims,)) if isinstance(dim, int)}
