"""Fitted coders on disk, each under a key that holds everything it depends on."""

import dataclasses
import hashlib
import json
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from unskip._core.files import make_folder, write_atomically
from unskip.coders import fit as fitting
from unskip.coders.fit import Fit
from unskip.coders.spec import CoderSpec

WAY_OUT = "It will be fitted again next time. Set TORCH_HOME to a folder that can be written to."


def cache_dir() -> Path:
    """`unskip/coders` in PyTorch's own cache folder (TORCH_HOME, XDG_CACHE_HOME, or ~/.cache/torch)."""
    return Path(torch.hub.get_dir()) / "unskip" / "coders"


def key(spec: CoderSpec) -> str:
    """All that a fitted coder depends on, as text."""
    of_fit = {"adam": ["STEPS", "ROUNDS", "STEP_SIZE", "MIN_GAIN"], "sgd": ["SGD_STEPS", "SGD_SCALE", "SGD_RATE"]}
    names = ["VERSION", "POSITIONS", "SIDE", *of_fit[spec.fit]]
    settings = {name.lower(): getattr(fitting, name) for name in names}
    return json.dumps({"spec": dataclasses.asdict(spec), "fit": settings}, sort_keys=True)


def path_of(spec: CoderSpec) -> Path:
    digest = hashlib.sha256(key(spec).encode()).hexdigest()[:16]
    return cache_dir() / f"{spec.pretext}-{spec.channels}-{spec.code}-{digest}.safetensors"


def load(spec: CoderSpec) -> Fit | None:
    """The cached fit, or None. An entry that is damaged or of another coder counts as missing, with a warning."""
    path = path_of(spec)
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            # Copies: the file is mapped into memory, and may change or shrink while the network lives.
            enc, dec = file.get_tensor("enc").clone(), file.get_tensor("dec").clone()
        if about.get("key") != key(spec):
            raise ValueError("it was written for another coder")
        if (tuple(enc.shape), tuple(dec.shape)) != (spec.enc_shape, spec.dec_shape):
            raise ValueError(f"its weights have the shapes {tuple(enc.shape)} and {tuple(dec.shape)}")
        if about.get("checksum") != _checksum(enc, dec):
            raise ValueError("its weights don't have the checksum they were written with")
        return Fit(enc, dec, float(about["mse"]), float(about["start_mse"]), int(about["rounds"]))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        warnings.warn(
            f"The cached coder {path} can't be used ({error}); it is fitted again and replaced.", stacklevel=2
        )
        return None


def store(spec: CoderSpec, fitted: Fit) -> None:
    """Writes the entry whole or not at all. A cache that can't be written is a warning: the network is there."""
    path = path_of(spec)
    about = {
        "key": key(spec),
        "checksum": _checksum(fitted.enc, fitted.dec),
        "mse": repr(fitted.mse),
        "start_mse": repr(fitted.start_mse),
        "rounds": str(fitted.rounds),
    }
    data = save({"enc": fitted.enc.contiguous(), "dec": fitted.dec.contiguous()}, metadata=about)
    where: dict[str, str] = {"command": "The fitted coder could not be cached", "way_out": WAY_OUT}
    try:
        make_folder(path.parent, **where)
        write_atomically(path, lambda file: file.write(data), **where)
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)


def _checksum(enc: Tensor, dec: Tensor) -> str:
    return hashlib.sha256(b"".join(weight.contiguous().numpy().tobytes() for weight in (enc, dec))).hexdigest()
