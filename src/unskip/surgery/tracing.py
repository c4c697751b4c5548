"""The flow of a network: the functions that its input runs through, their modules, and who reads whose output.

It is recorded from one forward pass, function by function, so that it includes what a `forward` does outside of its
modules (an addition, a mean). An activation in place writes a new version of the tensor that it reads.
"""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from unskip._core.modules import preserved

ADDITIONS = ("add", "add_", "iadd", "__add__", "__iadd__", "__radd__")  # functions that add two tensors


LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


def user_line(places: Iterable[tuple[str, int | None]]) -> str:
    """The first of these lines outside PyTorch and this package, as 'net.py:12'; '' if there is none."""
    own = ((file, line) for file, line in places if not file.startswith((*LIBRARIES, "<")))
    return next((f"{os.path.basename(file)}:{line}" for file, line in own), "")


def line_here() -> str:
    """The innermost running line outside PyTorch and this package, as 'net.py:12'."""
    return user_line((f.f_code.co_filename, line) for f, line in traceback.walk_stack(sys._getframe()))


def other_arguments(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments of a forward behind the first that have a name; `*args` and `**kwargs` count as left out."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in list(inspect.signature(module.forward).parameters.values())[1:] if p.kind not in variadic]


class InputTracer(fx.Tracer):
    """Follows a forward symbolically; its `*args` and `**kwargs` are empty."""

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        for i, arg in enumerate(args):
            if isinstance(arg, fx.Proxy) and str(arg.node.target).startswith("*"):
                self.graph.erase_node(arg.node)
                args[i] = {} if str(arg.node.target).startswith("**") else ()
        return function, args


@dataclass(eq=False)
class TraceStep:
    """One call of a function on something that depends on the input."""

    function: str  # as PyTorch names it: 'conv2d', 'relu', 'add'
    path: str  # of the innermost module that it runs in
    module: nn.Module
    shape: torch.Size  # of its (first) output
    sources: list["TraceStep | None"]  # that wrote its inputs, one for each tensor; None is the network's input
    readers: list["TraceStep"] = field(default_factory=list)
    line: str = ""  # of an addition: the innermost line outside PyTorch and this package, 'net.py:12'

    @property
    def where(self) -> str:
        """The path; for the network itself, the name of its class."""
        return self.path or type(self.module).__name__


@contextmanager
def running_modules(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """A list of the modules that are running, each with its path, the innermost last."""
    running: list[tuple[str, nn.Module]] = []

    def enter(path: str) -> Callable[..., None]:
        return lambda module, args: running.append((path, module))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    handles = []
    try:
        for path, module in model.named_modules():
            handles += [module.register_forward_pre_hook(enter(path)), module.register_forward_hook(leave)]
        yield running
    finally:
        for handle in handles:
            handle.remove()


def trace(model: nn.Module, example: Tensor) -> list[TraceStep]:
    """The steps of a forward pass, in order."""
    with running_modules(model) as running:
        tracer = _Tracer(running, example)
        with preserved(model), torch.no_grad(), tracer:
            model(example)
    return tracer.steps


class _Tracer(TorchFunctionMode):
    def __init__(self, running: list[tuple[str, nn.Module]], example: Tensor) -> None:
        super().__init__()
        self.running = running
        self.steps: list[TraceStep] = []
        self.writer: dict[int, TraceStep | None] = {id(example): None}
        self.alive: list[Tensor] = [example]  # so that no other tensor gets the id of one that is gone

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and id(x) in self.writer]
        written = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if read and written and self.running:
            path, module = self.running[-1]
            name = getattr(func, "__name__", str(func))
            step = TraceStep(name, path, module, written[0].shape, [self.writer[id(x)] for x in read])
            if name in ADDITIONS:
                step.line = line_here()
            for source in step.sources:
                if source is not None:
                    source.readers.append(step)
            self.steps.append(step)
            for x in written:
                self.writer[id(x)] = step
                self.alive.append(x)
        return result
