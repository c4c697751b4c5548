"""Data sets, and batches of them on the device."""

from unskip.data.sets import DataSet, Split

__all__ = ["DataSet", "Split"]
