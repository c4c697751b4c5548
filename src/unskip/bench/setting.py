"""What a comparison is made of: the setting that all networks share, and the cases that are timed."""

import os
import re
from dataclasses import dataclass
from typing import Literal, get_args

import psutil
import torch

Mode = Literal["train", "infer"]
Precision = Literal["fp32", "bf16"]
Layers = Literal["same", "fast", "own"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNITS = {"": 1, "b": 1, **{f"{unit}ib": 1024 ** (i + 1) for i, unit in enumerate("kmgt")}}
UNITS |= {f"{unit}b": 1000 ** (i + 1) for i, unit in enumerate("kmgt")}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How networks are timed; the same for all of them."""

    device: str = "auto"  # auto: the GPU if there is one
    batch: int = 0  # images; 0: 256 on a GPU, 8 on a CPU
    size: int = 0  # side of the images in px; 0: the networks' own, which must agree
    layers: Layers = (
        "same"  # fast: all networks have fast layers (unskip.kernels); same: on a GPU also without them, for
    )
    # those that this changes; own: each as it was built
    precision: Precision = "fp32"  # bf16: autocast while training, weights in bf16 for inference
    channels_last: bool = True  # memory layout of images and weights
    train: bool = True  # time training: forward, backward, SGD with momentum
    infer: bool = True  # time inference
    eager: bool = True  # without torch.compile
    compiled: bool = True  # with torch.compile, one graph a network
    fold: bool = True  # inference of folded networks, of others with their norms fused
    graph: bool = True  # a step is one CUDA graph, on a GPU
    rounds: int = 7  # in each of which every network has its turn
    seconds: float = 0.5  # of one turn
    threads: int = 0  # of PyTorch on a CPU; 0: as they are
    compile_workers: int = 0  # processes that compile at once beforehand; 0: each in its turn
    fit: int = 0  # bytes, for the largest batch that trains within them; 0: not searched for

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", self.device):
            raise ValueError(f"bench: device={self.device!r} must be 'auto', 'cpu' or 'cuda'.")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"bench: device={self.device!r} was asked for, and PyTorch sees no GPU; use 'cpu'.")
        for name, choices in (("precision", get_args(Precision)), ("layers", get_args(Layers))):
            if getattr(self, name) not in choices:
                raise ValueError(f"bench: {name}={getattr(self, name)!r} must be one of {', '.join(choices)}.")
        many = 8 * (os.cpu_count() or 1)  # more threads or processes than this only get in each other's way
        limits = {"batch": (0, 2**31), "size": (0, 2**16), "rounds": (1, 10**5), "seconds": (1e-6, 3600)}
        for name, (least, most) in (limits | {"threads": (0, many), "compile_workers": (0, many)}).items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"bench: {name}={getattr(self, name)} must be between {least} and {most:,}.")
        if not (self.train or self.infer):
            raise ValueError("bench: neither training nor inference is left to time; drop --no-train or --no-infer.")
        if not (self.eager or self.compiled):
            raise ValueError("bench: neither eager nor compiled networks are left to time; set one of the two.")
        if self.fit and not self.train:
            raise ValueError(
                "bench: --fit searches for the largest batch that trains, and training is left out; drop --fit, or ask "
                "for training too with --train."
            )
        if self.fit > self.device_bytes:
            asked, there = (f"{number / 2**30:,.1f} GiB" for number in (self.fit, self.device_bytes))
            raise ValueError(f"bench: --fit asks for {asked}, and {self.where} has {there}; give less.")

    @property
    def where(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def device_bytes(self) -> int:
        """The memory of the device."""
        if self.where.type == "cuda":
            return torch.cuda.get_device_properties(self.where).total_memory
        return psutil.virtual_memory().total

    @property
    def images(self) -> int:
        """Of one batch."""
        return self.batch or (256 if self.where.type == "cuda" else 8)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time."""

    network: str  # as it was named
    mode: Mode
    compiled: bool
    form: str = "as trained"  # or 'dense' and 'fast' (unskip.fold), 'norms fused'

    @property
    def how(self) -> str:
        return "compiled" if self.compiled else "eager"

    def __str__(self) -> str:
        return f"{self.network}, {self.mode}, {self.how}" + (f", {self.form}" if self.mode == "infer" else "")


def parse_bytes(text: str) -> int:
    """'8GiB', '500 MB' or '1e9' as a number of bytes."""
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e\d\d?)?)\s*([kmgt]?i?b|)", text.strip().lower())
    found = int(float(match[1]) * UNITS[match[2]]) if match is not None and match[2] in UNITS else 0
    if not found:
        raise ValueError(f"bench: {text!r} is no amount of memory; write it like 8GiB or 500MB.")
    return found
