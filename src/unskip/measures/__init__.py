"""Measures: what happens to the signal inside a network, as pure functions of what was recorded there."""

from unskip.measures.dissipation import near_far
from unskip.measures.probe import record_outputs

__all__ = ["near_far", "record_outputs"]
