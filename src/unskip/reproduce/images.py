"""Real images for figures: a few test images of a data set, spread over its classes and standardised."""

from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from unskip.data.config import DataConfig
from unskip.data.sets import DataSet, load
from unskip.reproduce.registry import one_of

IN_MEMORY = one_of("digits", "cifar10", "cifar100", "fashion_mnist", "npz", "sprites")
Dataset = Annotated[str, "the data set: digits, cifar10, cifar100, fashion_mnist, npz or sprites", IN_MEMORY]
DataPath = Annotated[Path | None, "where the data set is; digits are embedded"]


def load_set(dataset: str, data: Path | None, *, size: int = 32) -> DataSet:
    """A data set of `unskip.data` that fits into memory, with images brought to `size` px."""
    IN_MEMORY.check("dataset", dataset)
    return load(DataConfig(dataset=dataset, image_size=size), data)


def sample_images(data: DataSet, count: int, *, channels: int | None = None) -> Tensor:
    """`count` test images, (count, C, H, W), each channel with the training images' mean taken off and deviation 1.

    They are spread over the set, since some sets are sorted by class. Grey images are repeated to fill `channels`.
    """
    images = data.test.images
    assert isinstance(images, Tensor)
    if count > len(images):
        raise ValueError(f"reproduce: {count} images are asked for and {data.name} has {len(images)} test images.")
    chosen = images[torch.arange(count) * len(images) // count].float() / 255
    x = ((chosen - torch.tensor(data.mean)) / torch.tensor(data.std)).permute(0, 3, 1, 2).contiguous()
    if channels is not None and x.shape[1] != channels:
        if x.shape[1] != 1:
            raise ValueError(f"reproduce: {data.name} has {x.shape[1]} channels; {channels} or 1 are needed.")
        x = x.repeat(1, channels, 1, 1)
    return x
