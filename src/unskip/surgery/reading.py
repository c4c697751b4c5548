"""The registry of readers: functions from a residual block of some class to its BlockSpec."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from unskip._core import plugins
from unskip._core.layers import inherits
from unskip.methods.spec import LAYERS, BlockSpec, Unsupported
from unskip.surgery.traced import Flow, adds, is_layer, read_traced

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


TRACED = Reader(read_traced, _replace)


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
    """The reader of a module's class, or of a parent class whose behaviour it inherits; None if there is none."""
    plugins.load("unskip.readers")
    home = OPTIONAL.get(type(module).__module__.split(".")[0])
    if home is not None:
        importlib.import_module(home)
    for cls in type(module).__mro__:
        if cls in _READERS:
            return _READERS[cls] if inherits(type(module), cls) else None
    return None


def known_families() -> list[str]:
    """The classes of blocks that have a reader, as 'package Class'."""
    plugins.load("unskip.readers")
    return sorted({f"{cls.__module__.split('.')[0]} {cls.__name__}" for cls in _READERS})


def find_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Reader]]:
    """Yields path, block and reader of all residual blocks in order.

    A block of a class that no reader knows is read by its code (`unskip.surgery.traced`); its reader may refuse it.
    Modules inside of blocks are not searched.
    """

    def search(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, Reader]]:
        reader = reader_of(module)
        if reader is not None:
            yield path, module, reader
        elif not getattr(module, "skip_free", False):
            # Not named_children(), which leaves out a block that is used twice.
            children = [(name, child) for name, child in module._modules.items() if child is not None]
            inside = [found for name, child in children for found in search(child, f"{path}.{name}".lstrip("."))]
            if not inside and _is_block(module, bool(path)):
                yield path, module, TRACED
            yield from inside

    yield from search(model, "")


def _is_block(module: nn.Module, path: bool) -> bool:
    """Whether the forward of a module is built around one addition, or adds something and can't be traced."""
    if is_layer(module) or not adds(module) or not any(isinstance(child, LAYERS) for child in module.modules()):
        return False
    try:
        flow = Flow(module)
    except Unsupported:
        return not isinstance(module, nn.Sequential) and path
    try:
        return bool(flow.sums()) and flow.whole() is not None
    except Unsupported:
        return True
