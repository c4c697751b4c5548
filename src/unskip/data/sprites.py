"""Sprites: a data set as a few large pictures of equal square tiles, row by row, an image each.

A set of small images travels as a handful of JPEG or PNG files this way, and is read in seconds. Tiny-ImageNet at 32 px
is 30 MB, for instance.
"""

import math
from pathlib import Path

import numpy as np
from PIL import Image

from unskip._core.errors import reason
from unskip._core.limits import check_file, check_memory
from unskip.data.config import DataConfig
from unskip.data.readers import read_npz
from unskip.data.sets import DataSet, Split, from_splits, make_split, register_dataset

CONVERTED = ("P", "PA", "CMYK", "YCbCr", "LAB", "HSV")  # modes whose numbers are not the colours of RGB
COPIES = 3  # of the pixels while they are cut
LAYOUT = (
    "must hold labels.npz with y_train and y_val, and pictures train*.jpg and val*.jpg (or .png) of square tiles, row "
    "by row, one for each label."
)


@register_dataset("sprites", layout=LAYOUT, found_at=lambda root: (root / "labels.npz").is_file())
def sprites(config: DataConfig, root: Path) -> DataSet:
    """Pictures of square tiles, whose side follows from the number of labels."""
    labels = read_npz(root / "labels.npz", "must hold y_train and y_val.", "y_train", "y_val")
    train, test = (read_split(root, part, numbers) for part, numbers in zip(("train", "val"), labels, strict=True))
    return from_splits(config, train, test, classes=int(train.labels.max()) + 1)


def read_split(root: Path, part: str, labels: np.ndarray) -> Split:
    """The images of the pictures whose names begin with `part`, one tile for each label."""
    files = sorted(path for path in root.glob(f"{part}*") if path.suffix.lower() in (".jpg", ".png"))
    pictures: list[np.ndarray] = []
    for path in files:
        pictures.append(_picture(path, sum(picture.nbytes for picture in pictures)))
    if len({picture.shape[2:] for picture in pictures}) > 1:
        raise ValueError(f"data: the {part} pictures of {root} differ in their channels; save all of them in one mode.")
    pixels = sum(picture.shape[0] * picture.shape[1] for picture in pictures)
    common = math.gcd(*(length for picture in pictures for length in picture.shape[:2]))
    # The largest side that leaves a tile for each label; the last row may have tiles to spare.
    side = next((s for s in range(common, 0, -1) if common % s == 0 and pixels // s**2 >= labels.size), 0)
    if side < 2 or pixels // side**2 - labels.size >= max(picture.shape[1] for picture in pictures) // side:
        sizes = ", ".join(f"{picture.shape[1]} x {picture.shape[0]}" for picture in pictures) or "none"
        raise ValueError(
            f"data: {root} has {labels.size} {part} labels, and its pictures ({sizes} px) can't be cut into as many "
            "equal square tiles."
        )
    tiles = np.concatenate([_tiles(picture, side) for picture in pictures])
    return make_split(f"{root}: {part}", tiles[: labels.size], labels)


def _picture(path: Path, others: int) -> np.ndarray:
    """(H, W) or (H, W, C), read where it fits into the memory beside pictures of so many bytes."""
    check_file(path, "data")
    try:
        with Image.open(path) as image:
            own = image.width * image.height * (3 if image.mode in CONVERTED else len(image.getbands()))
            size = f"{image.width} x {image.height} px,{' with those before it,' if others else ''}"
            check_memory(COPIES * (others + own), f"{path}, {size}")
            return np.asarray(image.convert("RGB") if image.mode in CONVERTED else image)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"data: {path} can't be read: {reason(error)}. Replace it.") from error


def _tiles(picture: np.ndarray, side: int) -> np.ndarray:
    """(rows * side, columns * side, ...) as (rows * columns, side, side, ...)."""
    rows, columns = picture.shape[0] // side, picture.shape[1] // side
    cut = picture.reshape(rows, side, columns, side, *picture.shape[2:]).swapaxes(1, 2)
    return cut.reshape(rows * columns, side, side, *picture.shape[2:])
