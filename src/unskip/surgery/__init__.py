"""Surgery: readers that take residual networks apart, and plainify, which puts them together without skips."""

from unskip.surgery.plainify import Surgery, plainify
from unskip.surgery.reading import Reader, find_blocks, known_families, register_reader

__all__ = ["Reader", "Surgery", "find_blocks", "known_families", "plainify", "register_reader"]
