"""The data sets that come with the package, one reader each.

| name | what `root` (`--data`) holds |
|---|---|
| digits | nothing: scikit-learn's digits are embedded |
| cifar10, cifar100 | `cifar-10-batches-py/` or `cifar-100-python/`, as torchvision lays them out |
| fashion_mnist | `FashionMNIST/raw/` or the four idx files themselves, gzipped or not |
| imagefolder | `train/<class>/*.jpg`, optionally `val/<class>/*.jpg` and `test/<class>/*.jpg`; or `<class>/*.jpg` |
| npz | one `.npz` file with x_train, y_train, x_test, y_test |
"""

import contextlib
import gzip
import hashlib
import io
import math
import operator
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision import datasets

from unskip._core.errors import reason
from unskip._core.limits import check_file, check_memory
from unskip.data.config import DataConfig
from unskip.data.feed import open_file
from unskip.data.sets import DATASETS, DataSet, Split, from_splits, hold_out, make_split, register_dataset

BAD_ARCHIVE = (zipfile.BadZipFile, zlib.error)
TEST_SHARE = 0.2  # of an image folder without test images
IMAGE_FILES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


def _missing(path: Path | str, root: Path, config: DataConfig) -> str:
    return f"data: {path} is missing; {root} {DATASETS[config.dataset].layout}"


@register_dataset("digits")
def digits(config: DataConfig, root: None) -> DataSet:
    """scikit-learn's 1,797 digits of 8 x 8; every fifth image of each class is the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # 17 grey levels, all kept apart
    labels = bunch.target.astype(np.int64)
    rank = np.zeros(len(labels), np.int64)  # of an image among those of its class
    for c in range(10):
        rank[labels == c] = np.arange((labels == c).sum())
    test = rank % 5 == 4
    train, held = (make_split("digits", images[part], labels[part]) for part in (~test, test))
    return from_splits(config, train, held, classes=10)


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


class _NumpyOnly(pickle._Unpickler):
    """Reads what CIFAR's pickles hold and refuses everything else, since a pickle can run any code.

    None of these calls takes more memory than the file has bytes. The unpickler in C would, for a large memo index.
    """

    CALLS: ClassVar[dict[str, Any]] = {
        "numpy.ndarray": "ndarray",  # what _reconstruct is given; it is never called
        "numpy.dtype": np.dtype,
        "_codecs.encode": lambda text, encoding: text.encode("latin1"),
        "_reconstruct": lambda *_: np.empty(0, np.uint8),  # the array's own state follows
        "_frombuffer": lambda buffer, dtype, shape, order: np.frombuffer(buffer, dtype).reshape(shape, order=order),
    }
    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        internal = module in (
            f"numpy.{core}.{part}" for core in ("core", "_core") for part in ("multiarray", "numeric")
        )
        call = self.CALLS.get(name if internal else f"{module}.{name}")
        if call is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return call


def _holds(kind: Any) -> Callable[[Path], bool]:
    """Whether a path is torchvision's folder of a data set, or holds it."""
    return lambda root: root.name == kind.base_folder or (root / kind.base_folder).is_dir()


@register_dataset(
    "cifar10",
    layout="must hold the folder cifar-10-batches-py with data_batch_1 to data_batch_5 and test_batch, as in "
    "cifar-10-python.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html, unpacked.",
    found_at=_holds(datasets.CIFAR10),
)
def cifar10(config: DataConfig, root: Path) -> DataSet:
    return _cifar(config, root, datasets.CIFAR10, "labels", each=10_000, classes=10)


@register_dataset(
    "cifar100",
    layout="must hold the folder cifar-100-python with train and test, as in cifar-100-python.tar.gz of "
    "https://www.cs.toronto.edu/~kriz/cifar.html, unpacked.",
    found_at=_holds(datasets.CIFAR100),
)
def cifar100(config: DataConfig, root: Path) -> DataSet:
    return _cifar(config, root, datasets.CIFAR100, "fine_labels", each=50_000, classes=100)


def _cifar(config: DataConfig, root: Path, kind: Any, key: str, *, each: int, classes: int) -> DataSet:
    """CIFAR as torchvision's class `kind` knows it, with `each` images in a training file and labels under `key`."""
    folder = root if root.name == kind.base_folder else root / kind.base_folder
    changed: list[str] = []

    def read(files: list[list[str]], each: int) -> Split:
        images, labels = [], []
        for file, md5 in files:
            path = folder / file
            if not path.exists():
                raise ValueError(_missing(path, root, config))
            check_file(path, "data")
            try:
                raw = path.read_bytes()
                entry = _NumpyOnly(io.BytesIO(raw), encoding="latin1").load()
                x, y = entry["data"], entry[key]
                if not isinstance(x, np.ndarray):
                    raise ValueError("its images are no array")
                # A list of lists of lists can refer to one list many times, and would become a large array.
                y = y if isinstance(y, np.ndarray) else np.array([operator.index(label) for label in y])
            except Exception as error:
                raise ValueError(
                    f"data: {path} can't be read as a CIFAR batch: {type(error).__name__}: {error}. It is truncated or "
                    "something else; unpack the archive again."
                ) from error
            if x.dtype != np.uint8 or x.shape != (each, 3072) or y.dtype.kind not in "iu" or y.ndim != 1:
                raise ValueError(
                    f"data: {path} holds images of shape {x.shape} and type {x.dtype}, and labels of shape {y.shape} "
                    f"and type {y.dtype}; {config.dataset} has ({each}, 3072) of uint8, and whole numbers. Unpack the "
                    "archive again."
                )
            if _md5(raw) != md5 and not _same_records(file, x, y):
                changed.append(file)
            images.append(x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels.append(y)
        return make_split(str(folder), np.concatenate(images), np.concatenate(labels))

    train, test = read(kind.train_list, each), read(kind.test_list, 10_000)
    note = f"{', '.join(changed)} differ from the published files, so errors can't be compared with published ones"
    return from_splits(config, train, test, classes=classes, notes=(note,) if changed else ())


@register_dataset(
    "fashion_mnist",
    layout="must hold, in FashionMNIST/raw or directly, train-images-idx3-ubyte, train-labels-idx1-ubyte, "
    "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each plain or as .gz, from "
    "https://github.com/zalandoresearch/fashion-mnist.",
    found_at=lambda root: any(
        any(root.glob(f"{f}train-images-idx3-ubyte*")) for f in ("", "raw/", "FashionMNIST/raw/")
    ),
)
def fashion_mnist(config: DataConfig, root: Path) -> DataSet:
    folder = next((f for f in (root / "FashionMNIST" / "raw", root / "raw") if f.is_dir()), root)

    def read(kind: str, dims: int) -> np.ndarray:
        path = next((p for p in (folder / kind, folder / f"{kind}.gz") if p.exists()), None)
        if path is None:
            raise ValueError(_missing(f"{folder / kind} (or .gz)", root, config))
        check_file(path, "data")
        try:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                head = file.read(4 + 4 * dims)
                magic, *shape = struct.unpack(f">{1 + dims}I", head) if len(head) == 4 + 4 * dims else (0, 0)
                if magic != 0x800 + dims:
                    file.read(2**20)  # says so if it is cut off
                    raise ValueError(f"data: {path} is no idx file of {dims} dimensions (uint8). Download it again.")
                size = math.prod(shape)
                check_memory(size, f"data: {path}, which announces {tuple(shape)},")
                raw = file.read(size + 1)  # one more shows that there is more
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"data: {path} is no whole gzip file: {error}. Download it again.") from error
        if len(raw) != size:
            raise ValueError(
                f"data: {path} is truncated: it announces {tuple(shape)} and has {len(raw)} bytes. Download it again."
            )
        return np.frombuffer(raw, np.uint8).reshape(shape)

    def split(kind: str) -> Split:
        return make_split(str(folder), read(f"{kind}-images-idx3-ubyte", 3), read(f"{kind}-labels-idx1-ubyte", 1))

    return from_splits(config, split("train"), split("t10k"), classes=10)


NPZ = (
    "must be a .npz file with x_train, y_train, x_test and y_test: images as uint8 or as floats in 0 to 1, shaped "
    "(N, H, W), (N, H, W, C) or (N, C, H, W), and classes as whole numbers from 0."
)


@register_dataset("npz", layout=NPZ, found_at=lambda root: root.is_file() and root.suffix != ".txt")
def npz(config: DataConfig, root: Path) -> DataSet:
    path = root
    if path.is_dir():
        found = sorted(path.glob("*.npz"))
        if len(found) != 1:
            there = ", ".join(p.name for p in found) or "none"
            raise ValueError(f"data: {path} is a folder with {len(found)} .npz files ({there}); name the file itself.")
        path = found[0]
    x_train, y_train, x_test, y_test = read_npz(path, NPZ, "x_train", "y_train", "x_test", "y_test")
    train, test = make_split(f"{path}: train", x_train, y_train), make_split(f"{path}: test", x_test, y_test)
    return from_splits(config, train, test, classes=int(train.labels.max()) + 1)


def read_npz(path: Path, layout: str, *names: str) -> list[np.ndarray]:
    """The arrays of these names in a .npz file; `layout` is what it must hold, as the end of a sentence."""
    check_file(path, "data")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"data: {path} is no .npz file. It {layout}")
    try:
        with zipfile.ZipFile(path) as archive:
            inside = [name.removesuffix(".npy") for name in archive.namelist()]
            missing = [name for name in names if name not in inside]
            if missing:
                raise ValueError(f"it has no {', '.join(missing)}, but {', '.join(inside) or 'nothing'}")
            check_memory(sum(archive.getinfo(f"{name}.npy").file_size for name in names), "what it holds")
            return [_array(archive, name) for name in names]
    except (OSError, EOFError, ValueError, TypeError, RuntimeError, MemoryError, *BAD_ARCHIVE) as error:
        raise ValueError(f"data: {path} can't be read: {reason(error)}. It {layout}") from error


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array of an .npz file, if the archive has as many bytes of it as its shape says."""
    size = archive.getinfo(f"{name}.npy").file_size
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if not dtype.hasobject and math.prod(shape) * dtype.itemsize + file.tell() != size:
            raise ValueError(f"{name} announces the shape {shape}, which is not what the file has")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)


@register_dataset(
    "imagefolder",
    layout="must hold a folder of images for each class, or such folders in train/ and, where there are any, in val/ "
    "and test/; what is missing of these is held out from the training images.",
    found_at=lambda root: (root / "train").is_dir() or len(_class_folders(root)) > 1,
)
def imagefolder(config: DataConfig, root: Path) -> DataSet:
    inside = root / "train" if (root / "train").is_dir() else root
    classes = sorted(p.name for p in inside.iterdir() if p.is_dir()) if inside != root else _class_folders(root)
    if len(classes) < 2:
        raise ValueError(
            f"data: {inside} has {len(classes)} class folders; it needs at least two. {root} "
            f"{DATASETS['imagefolder'].layout}"
        )

    def read(folder: Path) -> Split:
        files: list[Path] = []
        labels: list[int] = []
        found = [folder / name for name in classes] if folder == inside else folder.iterdir()
        for of_class in sorted(p for p in found if p.is_dir()):
            if of_class.name not in classes:
                raise ValueError(f"data: {of_class} is a class that {inside} does not have.")
            here = _images_in(of_class)
            if not here and folder == inside:
                raise ValueError(f"data: {of_class} has no image ({', '.join(IMAGE_FILES)}).")
            files += here
            labels += [classes.index(of_class.name)] * len(here)
        if not files:
            raise ValueError(f"data: {folder} has no image in any class folder.")
        if config.check_files:
            _check_files(files, config.workers)
        return Split(files, torch.tensor(labels))

    train = read(inside)
    val, test = (read(root / part) if (root / part).is_dir() and inside != root else None for part in ("val", "test"))
    notes: tuple[str, ...] = ()
    if test is None:
        test, val = val, None
    if test is None:
        train, test = hold_out(train, TEST_SHARE)
        assert test is not None
        notes = (f"{len(test)} of the images, {TEST_SHARE:.0%} of each class, were held out to test on",)
    if val is None:
        train, val = hold_out(train, config.val_fraction)
    size = config.image_size or 224
    return DataSet(
        name=config.dataset, train=train, val=val, test=test, classes=len(classes), channels=3, image_size=size,
        mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD, class_names=tuple(classes), notes=notes,
    )  # fmt: skip


def _class_folders(root: Path) -> list[str]:
    """The folders in `root` with images right in them."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(OSError):  # no folder, or one that may not be read
            if any(file.suffix.lower() in IMAGE_FILES for file in folder.iterdir()):
                found.append(folder.name)
    return sorted(found)


def _images_in(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_FILES)


def _check_files(files: list[Path], workers: int) -> None:
    """Decodes each file once, JPEGs at an eighth of their size, so that a broken one is known before training."""

    def broken(path: Path) -> str | None:
        try:
            with open_file(path) as image:
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
