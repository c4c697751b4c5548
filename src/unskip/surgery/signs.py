"""Finds the blocks whose input is proven to be nonnegative, which an exact method must know.

The proof is a symbolic trace of the model in which each block is one node: a block that reads the output of a ReLU, or
of a block that ends in one, directly or through pooling, reads nothing negative. A block for which the trace proves
nothing counts as reading both signs.
"""

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import fx, nn
from torch.nn import functional as F

from unskip.methods.rm import rectifies

# Of numbers that are not negative, these give numbers that are not negative.
PASSING = (
    nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
    nn.Dropout, nn.Dropout2d, nn.Upsample,
)  # fmt: skip
OVERSHOOTS = "bicubic"  # the one way to enlarge images that gives numbers beyond those it reads
RELU = {F.relu, F.relu_, F.relu6, torch.relu, torch.relu_, torch.sigmoid, F.softplus}
RELU_METHODS = {"relu", "relu_", "sigmoid", "abs"}


class _BlocksWhole(fx.Tracer):
    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.whole = {id(block) for block in blocks.values()}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self.whole or isinstance(m, BatchNormAct2d) or super().is_leaf_module(m, module_qualified_name)


def nonnegative_inputs(model: nn.Module, blocks: Mapping[str, nn.Module], out_acts: Mapping[int, Any]) -> set[int]:
    """The ids of the blocks that read nothing negative in any of their calls.

    Args:
        model: the model.
        blocks: its blocks by path.
        out_acts: the activation at the end of a block, by the block's id.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return set()  # a hook may change any tensor
    parameters = inspect.signature(model.forward).parameters.values()
    given = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    try:
        graph = _BlocksWhole(blocks).trace(model, concrete_args=given)
    except Exception:  # any forward may fail in any way on a symbolic input
        return set()
    modules = dict(model.named_modules(remove_duplicate=False))

    def module_of(node: fx.Node) -> nn.Module | None:
        return modules.get(str(node.target)) if node.op == "call_module" else None

    def overwritten(node: fx.Node) -> bool:
        """Whether a reader of the node's output may overwrite it in place, other than by a ReLU."""
        return any(_writes(reader, module_of(reader)) for reader in node.users)

    def holds(node: Any) -> bool:
        while isinstance(node, fx.Node) and not overwritten(node):
            module = module_of(node)
            if node.op == "call_function" and node.target in RELU:
                return True
            if node.op == "call_method" and node.target in RELU_METHODS:
                return True
            if module is None:
                return False
            if id(module) in out_acts:
                return rectifies(out_acts[id(module)])
            if rectifies(module):
                return True
            if not isinstance(module, PASSING) or len(node.args) != 1 or getattr(module, "mode", "") == OVERSHOOTS:
                return False
            node = node.args[0]
        return False

    calls: dict[int, list[bool]] = {}
    for node in graph.nodes:
        module = module_of(node)
        if module is not None and id(module) in out_acts:
            calls.setdefault(id(module), []).append(len(node.args) == 1 and not node.kwargs and holds(node.args[0]))
    return {block for block, proofs in calls.items() if all(proofs)}


def _writes(node: fx.Node, module: nn.Module | None) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and name not in RELU_METHODS
    if node.op == "call_function":
        # `x -= 1` is traced as `x = x - 1`, so arithmetic may be in place.
        arithmetic = getattr(node.target, "__module__", "") == operator.add.__module__
        named = getattr(node.target, "__name__", "").endswith("_") or "out" in node.kwargs or node.kwargs.get("inplace")
        return arithmetic or bool(named and node.target not in RELU)
    return bool(getattr(module, "inplace", False)) and not rectifies(module)
