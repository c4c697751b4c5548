"""Readers: what turns a block of somebody's residual network into a BlockSpec. One function per block class."""

import dis
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

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
    """Decorator: `read(block, path)` gives the BlockSpec of any block of these classes.

    `write(block, skip_free)` returns what then stands in the block's place, the skip-free module itself unless the
    block does more than that (attention). It may change and return the block that it is given.
    """

    def register(read: Read) -> Read:
        for cls in classes:
            _READERS[cls] = Reader(read, write)
        return read

    return register


def reader_of(module: nn.Module) -> Reader | None:
    """The reader of a module's class, or of a parent class whose `forward` it still uses."""
    for cls in type(module).__mro__:
        if cls in _READERS:
            return _READERS[cls] if type(module).forward is cls.forward else None
    return None


def known_families() -> list[str]:
    return sorted({f"{cls.__module__.split('.')[0]} {cls.__name__}" for cls in _READERS})


def find_blocks(network: nn.Module) -> Iterator[tuple[str, nn.Module, Reader | None]]:
    """All blocks that a reader knows, in order, and, with None for a reader, those that look residual to no avail.

    Neither is looked into any further. What looks residual counts only if the network has several of its class, or if
    it derives from a class that a reader knows.
    """
    classes = Counter(type(module) for module in network.modules())

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

    yield from search(network, "")


def looks_residual(module: nn.Module) -> bool:
    """A guess at a class that nobody has described: it holds a convolution or linear layer, and adds something.

    It only serves to say which block stopped us, so it may be wrong about a block, but not about a network.
    """
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    if not isinstance(forward, types.FunctionType) or forward.__module__.startswith("torch.nn.modules"):
        return False
    adds = any(op.opname in ("BINARY_OP", "BINARY_ADD", "INPLACE_ADD") and op.argrepr in ("+", "+=", "")
               for op in dis.get_instructions(forward))  # fmt: skip
    return adds and any(isinstance(child, nn.Conv2d | nn.Linear) for child in module.modules())
