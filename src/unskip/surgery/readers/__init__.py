"""Readers of timm's and torchvision's residual blocks and of `residual_half`. A new one is one new file here."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
