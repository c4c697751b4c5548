"""Sprites: a data set as a few large pictures of equal square tiles, row by row, an image each.

A set of small images travels as a handful of JPEG or PNG files this way, and is read in seconds. Tiny-ImageNet at 32 px
is 30 MB, for instance.
"""

import math
from pathlib import Path

import numpy as np
from PIL import Image

from unskip.data.config import DataConfig
from unskip.data.sets import DataSet, Split, from_splits, make_split, register_dataset

PARTS = {"train": ("train", "data_batch"), "test": ("val", "test")}  # how the names of the pictures begin


def _pictures(root: Path, part: str) -> list[Path]:
    files = (path for path in root.iterdir() if path.suffix.lower() in (".jpg", ".png"))
    return sorted(path for path in files if path.name.startswith(PARTS[part]))


@register_dataset(
    "sprites",
    layout="must hold labels.npz with y_train and y_val (or y_test), and pictures train*.jpg and val*.jpg (or "
    "test*.jpg; .png) of square tiles row by row, one tile for each label in order.",
    found_at=lambda root: (root / "labels.npz").is_file(),
)
def sprites(config: DataConfig, root: Path) -> DataSet:
    """Pictures of square tiles, whose side follows from the number of labels."""
    try:
        with np.load(root / "labels.npz", allow_pickle=False) as file:
            labels = {part: next(file[f"y_{n}"] for n in PARTS[part] if f"y_{n}" in file.files) for part in PARTS}
    except (OSError, ValueError, StopIteration) as error:
        raise ValueError(f"data: {root / 'labels.npz'} can't be read, or lacks y_train or y_val: {error}.") from error
    train, test = (_split(root, part, labels[part]) for part in PARTS)
    return from_splits(config, train, test, classes=int(max(labels["train"].max(), labels["test"].max())) + 1)


def _split(root: Path, part: str, labels: np.ndarray) -> Split:
    try:
        pictures = [np.asarray(Image.open(path)) for path in _pictures(root, part)]
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"data: a picture of {root} can't be read: {error}. Replace it.") from error
    pixels = sum(picture.shape[0] * picture.shape[1] for picture in pictures)
    common = math.gcd(*(length for picture in pictures for length in picture.shape[:2]))
    # The largest side that leaves a tile for each label; the last row may have tiles to spare.
    side = next((s for s in range(common, 0, -1) if common % s == 0 and pixels // s**2 >= len(labels)), 0)
    if side < 2 or pixels // side**2 - len(labels) >= max(picture.shape[1] for picture in pictures) // side:
        sizes = ", ".join(f"{picture.shape[1]} x {picture.shape[0]}" for picture in pictures) or "none"
        raise ValueError(
            f"data: {root} has {len(labels)} {part} labels, and its pictures ({sizes} px) can't be cut into as many "
            "equal square tiles."
        )
    tiles = np.concatenate([_tiles(picture, side) for picture in pictures])
    return make_split(f"{root}: {part}", tiles[: len(labels)], labels)


def _tiles(picture: np.ndarray, side: int) -> np.ndarray:
    """(rows * side, columns * side, ...) as (rows * columns, side, side, ...)."""
    rows, columns = picture.shape[0] // side, picture.shape[1] // side
    cut = picture.reshape(rows, side, columns, side, *picture.shape[2:]).swapaxes(1, 2)
    return cut.reshape(rows * columns, side, side, *picture.shape[2:])
