"""Files of torch.save, the checkpoints of `unskip train` among them, read so that no code in them can run."""

import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from unskip._core.errors import reason
from unskip._core.limits import check_file, check_memory

FORMAT = "unskip-checkpoint-1"  # of the checkpoints of `unskip train`
GREEDY = ("__builtin__ bytearray", "builtins bytearray", "_codecs encode")  # a few bytes of pickle make any number


def read_torch_file(path: Path, *, command: str, way_out: str) -> Any:
    """What torch.save wrote, if the file is whole, not too large, and holds nothing but tensors and plain values."""
    check_file(path, command)
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            check_memory(size, f"{command}: {path}, unpacked,")
            damaged = archive.testzip()  # torch.load does not look at checksums
            if damaged is not None:
                raise ValueError(f"{command}: {path} is damaged: the checksum of {damaged} is wrong. {way_out}")
            for name in archive.namelist():
                if name.endswith(".pkl"):
                    _check_pickle(archive.read(name))
        state = torch.load(path, map_location="cpu", weights_only=True)
        storages = [leaf.untyped_storage() for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
        if sum({storage._cdata: storage.nbytes() for storage in storages}.values()) > size:
            raise ValueError("its tensors announce more numbers than it has")
        return state
    except zipfile.BadZipFile as error:
        raise ValueError(f"{command}: {path} is damaged, or no checkpoint at all: {error}. {way_out}") from error
    except pickle.UnpicklingError as error:
        # Not torch's own words, which recommend to run what is in the file.
        raise ValueError(
            f"{command}: {path} is no checkpoint of unskip, or damaged: it holds more than tensors and plain values. "
            f"That would be code, and is not run. {way_out}"
        ) from error
    except Exception as error:  # a hostile file leads to errors of any kind
        if str(error).startswith(f"{command}: {path}"):
            raise
        why = "it is nested too deeply, or refers to itself" if isinstance(error, RecursionError) else reason(error)
        raise ValueError(f"{command}: {path} is no checkpoint of unskip, or damaged: {why}. {way_out}") from error


def _check_pickle(text: bytes) -> None:
    for operation, argument, _ in pickletools.genops(text):
        if operation.name == "GLOBAL" and argument in GREEDY:
            raise pickle.UnpicklingError(f"it calls {argument}")
