"""Surgery: readers that take residual networks apart, and plainify, which puts them together without skips."""

from unskip.surgery.cost import Cost, Size, memory_plan
from unskip.surgery.memory import MemoryPlan, MemoryPlans
from unskip.surgery.plainify import Surgery, UnsupportedBlockError, cost, memory_variants, plainify, takes
from unskip.surgery.reading import Reader, find_blocks, known_families, register_reader

__all__ = [
    "Cost",
    "MemoryPlan",
    "MemoryPlans",
    "Reader",
    "Size",
    "Surgery",
    "UnsupportedBlockError",
    "cost",
    "find_blocks",
    "known_families",
    "memory_plan",
    "memory_variants",
    "plainify",
    "register_reader",
    "takes",
]  # fmt: skip
