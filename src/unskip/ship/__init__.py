"""Shipping: exact rewriting of trained networks, and the proof that the function stayed the same."""

from unskip.ship.export import Exported, export
from unskip.ship.fold import Folding, fold
from unskip.ship.verify import Check, Error, LayerCheck, verify

__all__ = ["Check", "Error", "Exported", "Folding", "LayerCheck", "export", "fold", "verify"]
