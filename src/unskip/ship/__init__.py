"""Shipping: exact rewriting of trained networks, and the proof that the function stayed the same."""

from unskip.ship.fold import Folding, fold
from unskip.ship.verify import Check, Error, LayerCheck, verify

__all__ = ["Check", "Error", "Folding", "LayerCheck", "fold", "verify"]
