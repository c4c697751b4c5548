"""The registry of readers: functions from a residual block of some class to its BlockSpec."""

import dis
import importlib
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from unskip._core import plugins
from unskip._core.layers import inherits
from unskip.methods.spec import BlockSpec

Read = Callable[[nn.Module, str], BlockSpec]
Write = Callable[[nn.Module, nn.Module], nn.Module]


@dataclass(frozen=True)
class Reader:
    """How a class of blocks is taken apart, and how a skip-free block is put in its place."""

    read: Read
    write: Write


_READERS: dict[type[nn.Module], Reader] = {}


def _replace(block: nn.Module, skip_free: nn.Module) -> nn.Module:
    return skip_free


def register_reader(*classes: type[nn.Module], write: Write = _replace) -> Callable[[Read], Read]:
    """Decorator: makes `read(block, path)`, which returns a BlockSpec, the reader of blocks of these classes.

    `write(block, skip_free)` returns the module that replaces the block: the skip-free module itself, unless the block
    does more than its residual branch (attention). It may change and return the block.
    """

    def register(read: Read) -> Read:
        for cls in classes:
            _READERS[cls] = Reader(read, write)
        return read

    return register


# Readers of packages that need not be installed, imported at the first block of theirs
OPTIONAL = {"transformers": "unskip.surgery.huggingface"}


def reader_of(module: nn.Module) -> Reader | None:
    """The reader of a module's class, or of a parent class that it behaves as; None where there is none."""
    plugins.load("unskip.readers")
    home = OPTIONAL.get(type(module).__module__.split(".")[0])
    if home is not None:
        importlib.import_module(home)
    for cls in type(module).__mro__:
        if cls in _READERS:
            return _READERS[cls] if inherits(type(module), cls) else None
    return None


def known_families() -> list[str]:
    """The classes of blocks that a reader knows, each behind the name of its package."""
    plugins.load("unskip.readers")
    return sorted({f"{cls.__module__.split('.')[0]} {cls.__name__}" for cls in _READERS})


def find_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Reader | None]]:
    """Yields path, block and reader of all residual blocks in order; the reader is None where no reader knows a block.

    A block of an unknown class is only yielded if it looks residual and the model has several of its class, or if it
    derives from a class that a reader knows. Modules inside of blocks are not searched.
    """
    classes = Counter(type(module) for module in model.modules())

    def search(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, Reader | None]]:
        reader = reader_of(module)
        if reader is not None:
            yield path, module, reader
        elif not getattr(module, "skip_free", False):
            # Not named_children(), which leaves out a block that is used twice.
            children = [(name, child) for name, child in module._modules.items() if child is not None]
            inside = [found for name, child in children for found in search(child, f"{path}.{name}".lstrip("."))]
            known = any(found is not None for _, _, found in inside)
            derived = isinstance(module, tuple(_READERS))
            if not known and (derived or (path and classes[type(module)] > 1 and looks_residual(module))):
                yield path, module, None
            else:
                yield from inside

    yield from search(model, "")


def looks_residual(module: nn.Module) -> bool:
    """Whether a module holds a convolution or linear layer and its `forward` adds something.

    This is a guess, used only to name the blocks for which a reader is missing.
    """
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    if not isinstance(forward, types.FunctionType) or forward.__module__.startswith("torch.nn.modules"):
        return False
    adds = any(op.opname == "BINARY_OP" and op.argrepr in ("+", "+=") for op in dis.get_instructions(forward))
    return adds and any(isinstance(child, nn.Conv2d | nn.Linear) for child in module.modules())
