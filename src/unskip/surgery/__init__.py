"""Surgery: readers that take residual networks apart, and plainify, which puts them together without skips."""

from unskip.surgery.cost import Cost, Size
from unskip.surgery.plainify import Surgery, UnsupportedBlockError, cost, plainify, takes
from unskip.surgery.reading import Reader, find_blocks, known_families, register_reader

__all__ = [
    "Cost",
    "Reader",
    "Size",
    "Surgery",
    "UnsupportedBlockError",
    "cost",
    "find_blocks",
    "known_families",
    "plainify",
    "register_reader",
    "takes",
]  # fmt: skip
