"""The limit on memory: no file, recipe or name that is read may take more, and none is taken before it is checked.

The limit is `MAX_GIB`, or half of the machine's memory where that is less. The environment variable `UNSKIP_MAX_GIB`
sets another one, for the command line and for Python alike.
"""

import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

MAX_GIB = 16.0
VARIABLE = "UNSKIP_MAX_GIB"
OBJECT = 2**14  # bytes that a tensor and its layer take beside its numbers


def check_memory(size: int, what: str) -> None:
    """Refuses something that would take more bytes than the limit; `what` begins the sentence."""
    text = os.environ.get(VARIABLE, "")
    try:
        limit = float(text) if text else min(MAX_GIB, psutil.virtual_memory().total / 2**31)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text!r} must be a number of GiB, for instance 64.") from error
    if not size <= limit * 2**30:
        needed = f"{size / 2**30:,.3g}" if size < 2**60 else "over a billion"
        raise ValueError(
            f"{what} would take {needed} GiB of memory, and at most {limit:.3g} are allowed; if that is right, raise "
            f"the limit with the environment variable {VARIABLE}."
        )


def check_file(path: Path, where: str, *, expansion: int = 1) -> None:
    """Refuses what is no regular file (a folder, a pipe, a device), and a file that would take too much memory.

    Args:
        path: the file.
        where: begins the sentence.
        expansion: bytes of memory that a byte of the file becomes.
    """
    try:
        if not path.is_file():
            raise ValueError(f"{where}: {path} can't be read: it is no file.")
        check_memory(path.stat().st_size * expansion, f"{where}: {path}")
    except OSError as error:
        raise ValueError(f"{where}: {path} can't be read: {error.strerror or error}.") from error


class MemoryGuard(TorchDispatchMode):
    """Refuses an operation whose result would take the tensors that are alive above the limit, before it is run."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.taken = what, 0  # bytes
        self.alive: dict[int, weakref.ref[Any]] = {}  # storages

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        returns = func._schema.returns
        if any(r.alias_info is None for r in returns):
            check_memory(self.taken + _predicted_bytes(func, args, kwargs), self.what)
        elif returns and isinstance(returns[0].type, torch.ListType):  # a tensor in parts: each is an object
            check_memory(self.taken + OBJECT * max(args[0].shape, default=1), self.what)
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes() + OBJECT
        if key not in self.alive:
            self.taken += size

            def free(_: Any) -> None:
                self.taken -= size
                del self.alive[key]

            self.alive[key] = weakref.ref(storage, free)


def _predicted_bytes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of an operation's result, from running it on the meta device; 0 where it has no such form."""
    here = {name: value for name, value in (("device", "meta"), ("generator", None)) if name in kwargs}
    try:
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        result = func(*args, **{**kwargs, **here})
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # it depends on numbers, or will fail for real
        return 0
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
