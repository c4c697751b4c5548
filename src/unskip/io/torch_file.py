"""Files of torch.save, the checkpoints of `unskip train` among them, read so that no code in them can run."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from unskip._core.errors import reason

FORMAT = "unskip-checkpoint-1"  # of the checkpoints of `unskip train`


def read_torch_file(path: Path, *, command: str, way_out: str) -> Any:
    """What torch.save wrote, if the file is whole and holds nothing but tensors and plain values."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not look at checksums
        if damaged is not None:
            raise ValueError(f"{command}: {path} is damaged: the checksum of {damaged} is wrong. {way_out}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{command}: {path} can't be read: {error.strerror or error}. {way_out}") from error
    except zipfile.BadZipFile as error:
        raise ValueError(f"{command}: {path} is damaged, or no checkpoint at all: {error}. {way_out}") from error
    except pickle.UnpicklingError as error:
        # Not torch's own words, which recommend to run what is in the file.
        raise ValueError(
            f"{command}: {path} is no checkpoint of unskip, or damaged: it holds more than tensors and plain values. "
            f"That would be code, and is not run. {way_out}"
        ) from error
    except (RuntimeError, EOFError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{command}: {path} is no checkpoint of unskip, or damaged: {reason(error)}. {way_out}"
        ) from error
