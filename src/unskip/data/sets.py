"""Data sets: what is read from where, checked before the first step, and split into training, validation and test.

| name | what `data_dir` holds |
|---|---|
| digits | nothing: scikit-learn's digits are embedded |
| cifar10, cifar100 | `cifar-10-batches-py/` or `cifar-100-python/`, as torchvision lays them out |
| fashion_mnist | `FashionMNIST/raw/` or the four idx files themselves, gzipped or not |
| imagefolder | `train/<class>/*.jpg` and `val/<class>/*.jpg`, optionally `test/<class>/*.jpg` |
| npz | one `.npz` file with x_train, y_train, x_test, y_test |
"""

import gzip
import hashlib
import io
import pickle
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision import datasets

from unskip.train.recipe import Dataset, Recipe

IMAGE_FILES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


@dataclass(frozen=True)
class Split:
    """Images and their classes. Images are one uint8 tensor (N, H, W, C), or the files that hold them."""

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
    notes: tuple[str, ...] = field(default=())  # what a reader of the result should know about the data

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


def load(recipe: Recipe, data_dir: str | Path | None = None, *, option: str = "--data") -> DataSet:
    """Reads and checks the data set of a recipe. What is missing or wrong is a ValueError that says what to do.

    `option` is the command's word for `data_dir`, for messages.
    """
    name = recipe.dataset
    if name == "digits":
        if data_dir is not None:
            raise ValueError(
                f"data: dataset='digits' is embedded and reads no files, but data_dir={str(data_dir)!r} was given. "
                "Say what it holds with --dataset (cifar10, cifar100, fashion_mnist, imagefolder, npz)."
            )
        return _finish(recipe, *_digits(), classes=10)
    if data_dir is None:
        raise ValueError(f"data: dataset={name!r} needs data_dir ({option} DIR), which {_WANTED[name]}")
    root = Path(data_dir).expanduser()
    if not root.exists():
        raise ValueError(f"data: {option} {root} does not exist; it {_WANTED[name]}")
    if name == "imagefolder":
        return _imagefolder(recipe, root, option)
    if name == "npz":
        train, test, classes = _npz(root)
        return _finish(recipe, train, test, classes=classes)
    if name == "fashion_mnist":
        return _finish(recipe, *_fashion_mnist(root, option), classes=10)
    classes = 10 if name == "cifar10" else 100
    train, test, notes = _cifar(root, name, option)
    return _finish(recipe, train, test, classes=classes, notes=notes)


def find_kind(root: Path) -> Dataset | None:
    """The name of the data set that lies at a path, by how it is laid out; None for a folder of something else."""
    if root.is_file():
        return "npz"
    names = {root.name, *(p.name for p in root.iterdir())}
    if "cifar-10-batches-py" in names:
        return "cifar10"
    if "cifar-100-python" in names:
        return "cifar100"
    for folder in (root, root / "raw", root / "FashionMNIST" / "raw"):
        if any(folder.glob("train-images-idx3-ubyte*")):
            return "fashion_mnist"
    return "imagefolder" if (root / "train").is_dir() and (root / "val").is_dir() else None


_WANTED = {
    "cifar10": "must hold the folder cifar-10-batches-py with data_batch_1 to data_batch_5 and test_batch, "
    "as in cifar-10-python.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html, unpacked.",
    "cifar100": "must hold the folder cifar-100-python with train and test, as in cifar-100-python.tar.gz of "
    "https://www.cs.toronto.edu/~kriz/cifar.html, unpacked.",
    "fashion_mnist": "must hold, in FashionMNIST/raw or directly, train-images-idx3-ubyte, train-labels-idx1-ubyte, "
    "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each plain or as .gz, from "
    "https://github.com/zalandoresearch/fashion-mnist.",
    "imagefolder": "must hold train/<class>/<images> and val/<class>/<images>, and may hold test/<class>/<images>; "
    "without test, val is the test set and validation images are held out from train.",
    "npz": "must be a .npz file with x_train, y_train, x_test and y_test: images as uint8 or as floats in 0 to 1, "
    "shaped (N, H, W), (N, H, W, C) or (N, C, H, W), and classes as whole numbers from 0.",
}


# ---------------------------------------------------------------- one function per source


def _digits() -> tuple[Split, Split]:
    """scikit-learn's 1,797 digits of 8 x 8; every fifth image of each class is the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # 17 grey levels, all kept apart
    labels = bunch.target.astype(np.int64)
    rank = np.zeros(len(labels), np.int64)  # of an image among those of its class
    for c in range(10):
        rank[labels == c] = np.arange((labels == c).sum())
    test = rank % 5 == 4
    return _arrays("digits", images[~test], labels[~test]), _arrays("digits", images[test], labels[test])


# MD5 of CIFAR-10's published .bin files, whose records are a byte of label and 3,072 of pixels.
RECORDS = {
    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


def _md5(raw: bytes) -> str:
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def _same_records(file: str, x: np.ndarray, y: np.ndarray) -> bool:
    """Whether pixels (N, 3072) and labels are those of a published CIFAR-10 file, however they were pickled."""
    if file not in RECORDS or y.shape != x.shape[:1]:
        return False
    return _md5(np.column_stack((y.astype(np.uint8), x)).tobytes()) == RECORDS[file]


class _NumpyOnly(pickle.Unpickler):
    """Reads what CIFAR's pickles hold and refuses everything else, since a pickle can run any code."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "encode", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")


def _cifar(root: Path, name: str, option: str) -> tuple[Split, Split, tuple[str, ...]]:
    kind: Any = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    folder = root if root.name == kind.base_folder else root / kind.base_folder
    key = "labels" if name == "cifar10" else "fine_labels"
    changed: list[str] = []

    def read(files: list[list[str]], each: int) -> Split:
        images, labels = [], []
        for file, md5 in files:
            path = folder / file
            if not path.is_file():
                raise ValueError(f"data: {path} is missing; {option} {root} {_WANTED[name]}")
            raw = _bytes(path)
            try:
                entry = _NumpyOnly(io.BytesIO(raw), encoding="latin1").load()
                x, y = np.asarray(entry["data"]), np.asarray(entry[key])
            except Exception as error:
                raise ValueError(
                    f"data: {path} can't be read as a CIFAR batch: {type(error).__name__}: {error}. It is truncated or "
                    "something else; unpack the archive again."
                ) from error
            if x.dtype != np.uint8 or x.shape != (each, 3072):
                raise ValueError(
                    f"data: {path} holds images of shape {x.shape} and type {x.dtype}; {name} has ({each}, 3072) of "
                    "uint8. Unpack the archive again."
                )
            if _md5(raw) != md5 and not _same_records(file, x, y):
                changed.append(file)
            images.append(x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(y)
        return _arrays(str(folder), np.concatenate(images), np.concatenate(labels))

    each = 10_000 if name == "cifar10" else 50_000
    train, test = read(kind.train_list, each), read(kind.test_list, 10_000)
    note = f"{', '.join(changed)} differ from the published files, so errors can't be compared with published ones"
    return train, test, (note,) if changed else ()


def _fashion_mnist(root: Path, option: str) -> tuple[Split, Split]:
    folder = next((f for f in (root / "FashionMNIST" / "raw", root / "raw") if f.is_dir()), root)

    def read(kind: str, dims: int) -> np.ndarray:
        path = next((p for p in (folder / kind, folder / f"{kind}.gz") if p.is_file()), None)
        if path is None:
            raise ValueError(f"data: {folder / kind} (or .gz) is missing; {option} {root} {_WANTED['fashion_mnist']}")
        raw = _bytes(path)
        try:
            raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
        except (OSError, EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"data: {path} is no whole gzip file: {error}. Download it again.") from error
        head = 4 + 4 * dims
        magic, *shape = struct.unpack(f">{1 + dims}I", raw[:head]) if len(raw) >= head else (0, 0)
        if magic != 0x800 + dims:
            raise ValueError(f"data: {path} is no idx file of {dims} dimensions (uint8). Download it again.")
        if len(raw) - head != int(np.prod(shape)):
            raise ValueError(
                f"data: {path} is truncated: it announces {tuple(shape)} and has {len(raw) - head} bytes. Download it "
                "again."
            )
        return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)

    def split(kind: str) -> Split:
        return _arrays(str(folder), read(f"{kind}-images-idx3-ubyte", 3), read(f"{kind}-labels-idx1-ubyte", 1))

    return split("train"), split("t10k")


def _npz(path: Path) -> tuple[Split, Split, int]:
    if path.is_dir():
        found = sorted(path.glob("*.npz"))
        if len(found) != 1:
            there = ", ".join(p.name for p in found) or "none"
            raise ValueError(f"data: {path} is a folder with {len(found)} .npz files ({there}); name the file itself.")
        path = found[0]
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file.files]
            if missing:
                raise ValueError(
                    f"data: {path} has no {', '.join(missing)}; it has {', '.join(file.files) or 'nothing'}. "
                    f"It {_WANTED['npz']}"
                )
            x_train, y_train, x_test, y_test = (file[name] for name in names)
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"data: {path} is no whole .npz file: {error}. It {_WANTED['npz']}") from error
    except (TypeError, ValueError) as error:  # of a single array (.npy), and of anything else
        if str(error).startswith("data:"):
            raise
        if not zipfile.is_zipfile(path):  # numpy takes it for a pickle and tells how to run it
            raise ValueError(f"data: {path} is no .npz file. It {_WANTED['npz']}") from error
        raise ValueError(f"data: {path} can't be read: {error}. It {_WANTED['npz']}") from error
    train, test = _arrays(f"{path}: train", x_train, y_train), _arrays(f"{path}: test", x_test, y_test)
    return train, test, int(train.labels.max()) + 1


def _imagefolder(recipe: Recipe, root: Path, option: str) -> DataSet:
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise ValueError(f"data: {root / part} is missing; {option} {root} {_WANTED['imagefolder']}")
    classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())
    if len(classes) < 2:
        raise ValueError(f"data: {root / 'train'} has {len(classes)} class folders; it needs at least two.")

    def read(part: str) -> Split:
        files: list[Path] = []
        labels: list[int] = []
        for folder in sorted(p for p in (root / part).iterdir() if p.is_dir()):
            if folder.name not in classes:
                raise ValueError(f"data: {folder} is a class that {root / 'train'} does not have.")
            here = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_FILES)
            if not here and part == "train":
                raise ValueError(f"data: {folder} has no image ({', '.join(IMAGE_FILES)}).")
            files += here
            labels += [classes.index(folder.name)] * len(here)
        if not files:
            raise ValueError(f"data: {root / part} has no image in any class folder.")
        if recipe.check_files:
            _check_files(files, recipe.workers)
        return Split(files, torch.tensor(labels))

    train, last = read("train"), read("val")
    val: Split | None = last
    test = read("test") if (root / "test").is_dir() else last
    if test is last:
        train, val = _hold_out(train, recipe.val_fraction)
    size = recipe.image_size or 224
    return DataSet(
        name=recipe.dataset, train=train, val=val, test=test, classes=len(classes), channels=3, image_size=size,
        mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD,
    )  # fmt: skip


def _check_files(files: list[Path], workers: int) -> None:
    """Decodes each file once, JPEGs at an eighth of their size, so that a broken one is known before training."""

    def broken(path: Path) -> str | None:
        try:
            with Image.open(path) as image:
                image.draft("RGB", (image.width // 8, image.height // 8))
                image.load()
        except Exception as error:
            return f"{path} ({error})"
        return None

    with ThreadPoolExecutor(max(1, workers)) as pool:  # Pillow decodes without the interpreter's lock
        bad = [line for line in pool.map(broken, files) if line]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"data: {len(bad)} of {len(files)} images can't be read: {'; '.join(bad[:5])}{more}. Replace or "
            "remove them."
        )


# ---------------------------------------------------------------- checks and the validation split


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"data: {path} can't be read: {error.strerror}.") from error


def _arrays(where: str, images: np.ndarray, labels: np.ndarray) -> Split:
    """Images and labels as tensors, after everything that can be wrong with them has been looked at."""
    if len(images) == 0 or images.size == 0:
        raise ValueError(f"data: {where} has no images (shape {images.shape}).")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4:
        raise ValueError(
            f"data: {where} has images of shape {images.shape}; (N, H, W), (N, H, W, C) or (N, C, H, W) is expected."
        )
    if images.shape[-1] not in (1, 3, 4):
        if images.shape[1] not in (1, 3, 4):
            raise ValueError(
                f"data: {where} has images of shape {images.shape}: neither the last nor the second axis has 1, 3 or 4 "
                "channels."
            )
        images = images.transpose(0, 2, 3, 1)
    if images.dtype.kind == "f":
        if not np.isfinite(images).all():
            raise ValueError(
                f"data: {where} has images with NaN or infinite pixels; floats must be finite and in 0 to 1."
            )
        low, high = images.min(), images.max()
        if low < 0 or high > 1:
            raise ValueError(
                f"data: {where} has {images.dtype} images from {low:g} to {high:g}; floats must be in 0 to 1. "
                "Rescale them, or store uint8."
            )
        images = np.rint(images * 255).astype(np.uint8)
    if images.dtype != np.uint8:
        raise ValueError(f"data: {where} has {images.dtype} images; uint8 or floats in 0 to 1 are expected.")
    if labels.ndim != 1 or len(labels) != len(images):
        raise ValueError(f"data: {where} has {len(images)} images but labels of shape {labels.shape}.")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"data: {where} has labels of type {labels.dtype}; whole numbers from 0 are expected.")
    return Split(torch.from_numpy(np.array(images)), torch.from_numpy(labels.astype(np.int64)))


def _finish(recipe: Recipe, train: Split, test: Split, *, classes: int, notes: tuple[str, ...] = ()) -> DataSet:
    """Checks the two splits against each other, and holds out the validation images."""
    for part, split in (("training", train), ("test", test)):
        low, high = int(split.labels.min()), int(split.labels.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"data: {recipe.dataset} has {classes} classes, 0 to {classes - 1}, but a {part} label is "
                f"{low if low < 0 else high}."
            )
    missing = sorted(set(range(classes)) - set(train.labels.unique().tolist()))
    if missing:
        some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise ValueError(
            f"data: {recipe.dataset} has labels up to {classes - 1}, but no training image of class {some}. Is a label "
            "out of range?"
        )
    if classes < 2:
        raise ValueError(f"data: {recipe.dataset} has only one class.")
    assert isinstance(train.images, Tensor)
    assert isinstance(test.images, Tensor)
    if train.images.shape[1:] != test.images.shape[1:]:
        shapes = [tuple(split.images.shape[1:]) for split in (train, test)]  # type: ignore[union-attr]
        raise ValueError(f"data: training images are {shapes[0]} (H, W, C) but test images are {shapes[1]}.")
    height, width, channels = train.images.shape[1:]
    if height != width:
        raise ValueError(f"data: images are {height} x {width} px; square ones are expected. Pad or crop them.")
    if recipe.image_size:
        train, test = (_resized(split, recipe.image_size) for split in (train, test))
    train, val = _hold_out(train, recipe.val_fraction)
    mean, std = _mean_std(train.images)  # type: ignore[arg-type]
    return DataSet(
        name=recipe.dataset, train=train, val=val, test=test, classes=classes, channels=channels,
        image_size=recipe.image_size or height, mean=mean, std=std, notes=notes,
    )  # fmt: skip


def _hold_out(split: Split, fraction: float) -> tuple[Split, Split | None]:
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
