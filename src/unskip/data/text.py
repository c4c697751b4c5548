"""Texts: a file of characters or bytes, in which a network learns to predict the next one.

The text stays in order: its beginning is learnt from, its last twentieth is the test, and what stands before that
(`val_fraction` of the whole) validates. With val_fraction = 0.05 the first nine tenths are for training, as is usual
with tiny Shakespeare.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from unskip._core.limits import check_file
from unskip.data.config import DataConfig
from unskip.data.sets import DataSet, Split, register_dataset

TEST_SHARE = 0.05
EXPANSION = {"characters": 16, "bytes": 10}  # bytes of memory that a byte of the file takes while it is read
LAYOUT = "must be a .txt file, or a folder with one in it."


def find_text(root: Path) -> Path | None:
    """The text file that a path is or holds, where there is exactly one."""
    files = [root] if root.is_file() else sorted(root.glob("*.txt"))
    return files[0] if len(files) == 1 and files[0].suffix == ".txt" else None


@register_dataset("text", layout=LAYOUT, found_at=lambda root: root.is_file() and root.suffix == ".txt")
def text(config: DataConfig, root: Path) -> DataSet:
    """Any text file in UTF-8, or any bytes."""
    path = find_text(root)
    if path is None:
        raise ValueError(f"data: {root} {LAYOUT}")
    check_file(path, "data", expansion=EXPANSION[config.tokens])
    raw = path.read_bytes()
    numbers: np.ndarray
    if config.tokens == "bytes":
        numbers, vocabulary = np.frombuffer(raw, np.uint8), tuple(map(chr, range(256)))
    else:
        try:
            codes = np.frombuffer(raw.decode("utf-8").encode("utf-32-le"), np.uint32)
        except UnicodeDecodeError as error:
            raise ValueError(f"data: {path} is no text in UTF-8 ({error}); tokens = 'bytes' reads any file.") from error
        number_of = np.zeros(sys.maxunicode + 1, np.int64)
        number_of[codes] = 1
        vocabulary = tuple(map(chr, np.flatnonzero(number_of)))
        number_of = number_of.cumsum() - 1
        numbers = number_of[codes]
    if len(vocabulary) < 2:
        raise ValueError(f"data: {path} has {len(vocabulary)} different characters; there is nothing to predict.")
    tokens = torch.from_numpy(numbers.astype(np.int64, copy=False))
    val, test = (int(share * len(tokens)) for share in (config.val_fraction, TEST_SHARE))
    parts = [("training", len(tokens) - val - test), ("validation", val), ("test", test)]
    for part, size in parts:
        if size <= config.context and not (part == "validation" and config.val_fraction == 0):
            raise ValueError(
                f"data: {path} has {len(tokens):,} {config.tokens}, of which {size:,} are for {part}: too few for "
                f"context={config.context} and the token after it. Lower context, or take a longer text."
            )
    train, held, last = (Split(part, part) for part in tokens.split([size for _, size in parts]))
    return DataSet(
        name="text", train=train, val=held if val else None, test=last, classes=len(vocabulary), channels=1,
        image_size=config.context, mean=(0.0,), std=(1.0,), vocabulary=vocabulary,
    )  # fmt: skip
