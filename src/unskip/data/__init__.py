"""Data sets, and batches of them on the device."""

from unskip.data import readers, sprites, text  # noqa: F401 - register the data sets of the package
from unskip.data.config import DataConfig
from unskip.data.sets import DataSet, Split, register_dataset

__all__ = ["DataConfig", "DataSet", "Split", "register_dataset"]
