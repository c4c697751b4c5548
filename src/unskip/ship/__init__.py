"""Shipping: exact rewriting of trained networks, and the proof that the function stayed the same."""

from unskip.ship.accuracy import Accuracy
from unskip.ship.bits import BitLoss, loss_in_bits
from unskip.ship.convert import Conversion, convert
from unskip.ship.equalize import equalize
from unskip.ship.export import export
from unskip.ship.fake_quant import FakeQuantized, fake_quantized
from unskip.ship.fold import Folding, fold
from unskip.ship.int8 import LayerNoise, Quantized, quantize
from unskip.ship.prune import Pruning, prune
from unskip.ship.writing import Exported
from unskip.surgery.verify import Check, Error, LayerCheck, verify

__all__ = [
    "Accuracy",
    "BitLoss",
    "Check",
    "Conversion",
    "Error",
    "Exported",
    "FakeQuantized",
    "Folding",
    "LayerCheck",
    "LayerNoise",
    "Pruning",
    "Quantized",
    "convert",
    "equalize",
    "export",
    "fake_quantized",
    "fold",
    "loss_in_bits",
    "prune",
    "quantize",
    "verify",
]
