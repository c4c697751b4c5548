"""A data set that reads no files: stripes down or across."""

import numpy as np

from unskip.data import DataConfig, DataSet, register_dataset
from unskip.data.sets import from_splits, make_split


@register_dataset("stripes")
def stripes(config: DataConfig, root: None) -> DataSet:
    """Two classes of 8 x 8 px."""
    across = np.zeros((8, 8), np.uint8)
    across[::2] = 255
    images, labels = np.stack([across, across.T] * 128), np.arange(256) % 2
    return from_splits(
        config, make_split("stripes", images, labels), make_split("stripes", images[:64], labels[:64]), classes=2
    )
