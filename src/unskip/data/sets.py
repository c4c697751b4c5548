"""Data sets: the registry of those that can be read, and what all of them are checked for before the first step.

A data set is a function that reads it, under a name (`register_dataset`; ours are in `unskip.data.readers`):

    @register_dataset("mine", layout="must hold mine.npy.")
    def mine(config: DataConfig, root: Path) -> DataSet:
        x, y = ...
        return from_splits(config, make_split("mine", x[:-100], y[:-100]), make_split("mine", x[-100:], y[-100:]))
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskip._core import plugins
from unskip._core.limits import check_memory
from unskip._core.text import nearest
from unskip.data.config import DataConfig


@dataclass(frozen=True)
class Split:
    """Images and their classes. Images are one uint8 tensor (N, H, W, C), or the files that hold them.

    Of a text both hold its tokens in order; the label of a token is the next one.
    """

    images: Tensor | list[Path]
    labels: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor) -> "Split":
        images = self.images[index] if isinstance(self.images, Tensor) else [self.images[i] for i in index.tolist()]
        return Split(images, self.labels[index])


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that has been checked: `train` to learn from, `val` to choose on, `test` to report."""

    name: str
    train: Split
    val: Split | None
    test: Split
    classes: int
    channels: int
    image_size: int  # px, of the side of what the network sees
    mean: tuple[float, ...]  # per channel, of pixels in 0 to 1
    std: tuple[float, ...]
    vocabulary: tuple[str, ...] = ()  # of a text, what each class stands for; a text has `image_size` tokens in a row
    class_names: tuple[str, ...] = ()  # of images, where the data say them
    notes: tuple[str, ...] = field(default=())  # what a reader of the result should know about the data
    on_device: dict[Any, tuple[Tensor, Tensor]] = field(init=False, default_factory=dict, compare=False, repr=False)

    @property
    def input_size(self) -> tuple[int, ...]:
        """The shape of one input: (C, H, W) of an image, (T,) of a text."""
        return (self.image_size,) if self.vocabulary else (self.channels, self.image_size, self.image_size)

    @property
    def output_size(self) -> tuple[int, ...]:
        """The shape of what a network returns for one input: logits, of a text for each token."""
        return (self.image_size, self.classes) if self.vocabulary else (self.classes,)

    @property
    def in_memory(self) -> bool:
        return isinstance(self.train.images, Tensor)

    @property
    def chance_loss(self) -> float:
        """The cross-entropy of the best guess that does not look at the image, in nats."""
        share = torch.bincount(self.train.labels, minlength=self.classes).double() / len(self.train)
        return float(-(share * share.clamp_min(1e-12).log()).sum())

    @property
    def chance_error(self) -> float:
        """The error of the same guess, in percent."""
        return 100 * (1 - float(torch.bincount(self.train.labels).max()) / len(self.train))

    def fingerprint(self) -> dict[str, Any]:
        """What must be the same when a run goes on: sizes, and a checksum of the labels in order."""
        digest = hashlib.sha256()
        for split in (self.train, self.val, self.test):
            if split is not None:
                digest.update(split.labels.numpy().tobytes())
                images = split.images
                some = images[:: max(1, len(images) // 64)] if isinstance(images, Tensor) else None
                names = [path.name for path in images] if not isinstance(images, Tensor) else []
                digest.update("\n".join(names).encode() if some is None else some.contiguous().numpy().tobytes())
        sizes = [len(self.train), len(self.val or ()), len(self.test)]
        return {"name": self.name, "sizes": sizes, "classes": self.classes, "sha256": digest.hexdigest()}


DatasetReader = Callable[[DataConfig, Any], DataSet]  # of the folder or file, or of None where nothing is read


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """A data set that can be read."""

    read: DatasetReader
    layout: str  # what `root` must hold, as the end of a sentence; '' for a set that reads no files
    found_at: Callable[[Path], bool]  # whether a path looks like it


DATASETS: dict[str, DatasetEntry] = {}


def register_dataset(
    name: str, *, layout: str = "", found_at: Callable[[Path], bool] = lambda root: False
) -> Callable[[DatasetReader], DatasetReader]:
    """Decorator: makes a function that reads a data set known by a name, for `dataset` in recipes and `--dataset`.

    Args:
        name: the public id.
        layout: what the folder or file that it reads must hold, as the end of a sentence; '' if it reads none.
        found_at: whether a path holds this data set, for commands that are given a path alone.
    """

    def register(read: DatasetReader) -> DatasetReader:
        DATASETS[name] = DatasetEntry(read=read, layout=layout, found_at=found_at)
        return read

    return register


def load(config: DataConfig, root: str | Path | None = None, *, option: str = "--data") -> DataSet:
    """Reads and checks a data set. What is missing or wrong is a ValueError that says what to do.

    Args:
        config: its name, and how it is split.
        root: the folder or file that it lies in.
        option: the command's word for `root`, for messages.
    """
    plugins.load("unskip.datasets")
    name = config.dataset
    if name not in DATASETS:
        raise ValueError(f"data: dataset={name!r} is not known.{nearest(name, list(DATASETS))}")
    source = DATASETS[name]
    if not source.layout:
        if root is not None:
            others = ", ".join(other for other in DATASETS if DATASETS[other].layout)
            raise ValueError(
                f"data: dataset={name!r} is embedded and reads no files, but {option} {str(root)!r} was given. "
                f"Say what it holds with --dataset ({others})."
            )
        return source.read(config, None)
    if root is None:
        raise ValueError(f"data: dataset={name!r} needs {option} DIR, which {source.layout}")
    root = Path(root).expanduser()
    if not root.exists():
        raise ValueError(f"data: {option} {root} does not exist; it {source.layout}")
    return source.read(config, root)


def find_kind(root: Path) -> str | None:
    """The name of the data set that lies at a path, by how it is laid out; None for a folder of something else."""
    plugins.load("unskip.datasets")
    return next((name for name, source in DATASETS.items() if source.found_at(root)), None)


# ---------------------------------------------------------------- what readers use: checks and the validation split


def make_split(where: str, images: np.ndarray, labels: np.ndarray) -> Split:
    """Images and labels as tensors, after everything that can be wrong with them has been looked at."""

    def check(right: bool | np.bool_, problem: str) -> None:
        if not right:
            raise ValueError(f"data: {where} has {problem}.")

    check(images.size > 0, f"no images (shape {images.shape})")
    images = images[..., None] if images.ndim == 3 else images
    shapes = "(N, H, W), (N, H, W, C) or (N, C, H, W) is expected, with 1, 3 or 4 channels"
    check(images.ndim == 4, f"images of shape {images.shape}; {shapes}")
    if images.shape[-1] not in (1, 3, 4):
        problem = f"images of shape {images.shape}: neither the last nor the second axis has 1, 3 or 4 channels"
        check(images.shape[1] in (1, 3, 4), problem)
        images = images.transpose(0, 2, 3, 1)
    if images.dtype.kind == "f":
        low, high = images.min(), images.max()
        check(np.isfinite(low + high), "images with NaN or infinite pixels; floats must be finite and in 0 to 1")
        problem = f"{images.dtype} images from {low:g} to {high:g}; floats must be in 0 to 1. Rescale them"
        check(low >= 0 and high <= 1, f"{problem}, or store uint8")
        images = np.rint(images * 255).astype(np.uint8)
    check(images.dtype == np.uint8, f"{images.dtype} images; uint8 or floats in 0 to 1 are expected")
    check(labels.shape == (len(images),), f"{len(images)} images but labels of shape {labels.shape}")
    check(labels.dtype.kind in "iu", f"labels of type {labels.dtype}; whole numbers from 0 are expected")
    check(int(labels.max()) < 2**63, f"the label {labels.max()}; whole numbers from 0 are expected")
    return Split(torch.from_numpy(np.array(images)), torch.from_numpy(labels.astype(np.int64)))


def from_splits(config: DataConfig, train: Split, test: Split, *, classes: int, notes: tuple[str, ...] = ()) -> DataSet:
    """Checks the two splits against each other, and holds out the validation images."""
    assert isinstance(train.images, Tensor)
    assert isinstance(test.images, Tensor)
    name = config.dataset
    for part, split in (("training", train), ("test", test)):
        low, high = int(split.labels.min()), int(split.labels.max())
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            raise ValueError(f"data: {name} has {classes} classes, 0 to {classes - 1}, but a {part} label is {wrong}.")
    present = set(train.labels.unique().tolist())
    if len(present) < classes:
        some = list(islice((c for c in range(classes) if c not in present), 6))  # there may be 10^12
        words = ", ".join(map(str, some[:5])) + (", ..." if len(some) > 5 else "")
        raise ValueError(
            f"data: {name} has labels up to {classes - 1}, but no training image of class {words}. Is a label out of "
            "range?"
        )
    if classes < 2:
        raise ValueError(f"data: {name} has only one class.")
    height, width, channels = train.images.shape[1:]
    if test.images.shape[1:] != train.images.shape[1:]:
        other = tuple(test.images.shape[1:])
        raise ValueError(
            f"data: training images are {(height, width, channels)} (H, W, C) but test images are {other}."
        )
    if height != width:
        raise ValueError(f"data: images are {height} x {width} px; square ones are expected. Pad or crop them.")
    if config.image_size:
        side, count = config.image_size, len(train) + len(test)
        check_memory(count * channels * side**2, f"data: image_size={side}, {count:,} images of {side} x {side} px,")
        train, test = (_resized(split, side) for split in (train, test))
    train, val = hold_out(train, config.val_fraction)
    mean, std = _mean_std(train.images)  # type: ignore[arg-type]
    return DataSet(
        name=name, train=train, val=val, test=test, classes=classes, channels=channels,
        image_size=config.image_size or height, mean=mean, std=std, notes=notes,
    )  # fmt: skip


def hold_out(split: Split, fraction: float) -> tuple[Split, Split | None]:
    """Holds out this share of each class, the same images for every seed; one of each stays to be learnt from."""
    if not fraction:
        return split, None
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(split), generator=generator)
    labels = split.labels[order]
    held = torch.zeros(len(split), dtype=torch.bool)
    for c in labels.unique().tolist():
        of_class = order[labels == c]
        held[of_class[: min(len(of_class) - 1, max(1, round(fraction * len(of_class))))]] = True
    if not held.any():
        raise ValueError(
            f"data: val_fraction={fraction} holds out no image, since every class has one alone; set val_fraction=0."
        )
    return split.take(torch.nonzero(~held)[:, 0]), split.take(torch.nonzero(held)[:, 0])


def _mean_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per channel, from a histogram: exact, and no copy of the images."""
    means, stds = [], []
    value = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(images.shape[-1]):
        share = torch.bincount(images[..., channel].reshape(-1).int(), minlength=256).double()
        share /= share.sum()
        mean = (share * value).sum()
        means.append(float(mean))
        stds.append(max(float((share * (value - mean) ** 2).sum().sqrt()), 1e-3))
    return tuple(means), tuple(stds)


def _resized(split: Split, size: int) -> Split:
    """All images at another size, with antialiasing."""
    assert isinstance(split.images, Tensor)
    if split.images.shape[1] == size:
        return split
    parts = []
    for part in split.images.split(1024):
        x = part.permute(0, 3, 1, 2).float()
        x = torch.nn.functional.interpolate(x, size=(size, size), mode="bilinear", antialias=True)
        parts.append(x.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous())
    return Split(torch.cat(parts), split.labels)
