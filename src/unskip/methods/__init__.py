"""Methods: ways to make a residual block skip-free. One file each, BlockSpec -> nn.Module.

A new method is one new file in this folder: importing the package imports every file, and `register_method` in it makes
the method known to `plainify`, recipes, the command line and the documentation.
"""

import importlib
import pkgutil

from unskip._core.layers import SpecialLayer
from unskip.methods.iso import SReLU
from unskip.methods.looks_linear import CReLU
from unskip.methods.plain import Plain, PlainBlock
from unskip.methods.pnnh import PNNH, PNNHBlock
from unskip.methods.registry import (
    Method,
    describe_method,
    method_names,
    method_options,
    register_method,
    resolve_method,
)
from unskip.methods.rm import RM, CappedReLU, RMBlock, out_of_range
from unskip.methods.spec import BlockSpec, Unsupported
from unskip.methods.stack import replaced, stacked

__all__ = [
    "PNNH",
    "RM",
    "BlockSpec",
    "CReLU",
    "CappedReLU",
    "Method",
    "PNNHBlock",
    "Plain",
    "PlainBlock",
    "RMBlock",
    "SReLU",
    "SpecialLayer",
    "Unsupported",
    "describe_method",
    "method_names",
    "method_options",
    "out_of_range",
    "register_method",
    "replaced",
    "resolve_method",
    "stacked",
]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
