"""Methods: ways to make a residual block skip-free. One file each, BlockSpec -> nn.Module."""

from unskip.methods.plain import Plain, PlainBlock
from unskip.methods.pnnh import PNNH, PNNHBlock, PNNHPaper
from unskip.methods.registry import Method, method_names, method_options, register_method, resolve_method
from unskip.methods.residual_half import ResidualHalf
from unskip.methods.spec import BlockSpec, Layer, Unsupported
from unskip.methods.stack import stack, stacked

__all__ = [
    "PNNH",
    "BlockSpec",
    "Layer",
    "Method",
    "PNNHBlock",
    "PNNHPaper",
    "Plain",
    "PlainBlock",
    "ResidualHalf",
    "Unsupported",
    "method_names",
    "method_options",
    "register_method",
    "resolve_method",
    "stack",
    "stacked",
]
