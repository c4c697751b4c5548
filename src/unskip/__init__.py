"""unskip: very deep networks without skip connections. Build them, train them, see why they train, ship them."""

import os
import sys

from unskip._core.version import __version__  # noqa: F401 - public

TYPE_CHECKING = False  # typing's, without the time that it takes to import
__all__ = [
    "convert", "cost", "create_model", "diagnose", "export", "fold", "list_models", "load", "memory_plan", "nn",
    "param_groups", "plainify", "quantize", "verify",
]  # fmt: skip


def _is_the_command() -> bool:
    """Whether Python was started as `unskip ...` or `python -m unskip ...`, not with somebody's own program."""
    program = sys.orig_argv[-len(sys.argv) :][:1]  # a script's path, or what follows -m
    return [os.path.splitext(os.path.basename(word))[0] for word in program] == ["unskip"]


# `import unskip` imports all of it, and torch, since timm knows our names and torch our operators from then on. That
# takes seconds. The command must say what an option means, or that there is none, without them: it comes through this
# file too, imports what it needs when it knows what to do, and the names are there as soon as anybody asks for one.
if not _is_the_command():
    from unskip import nn
    from unskip.doctor import diagnose
    from unskip.io.load import load
    from unskip.models import create_model, list_models
    from unskip.ship import convert, export, fold, quantize, verify
    from unskip.surgery import cost, memory_plan, plainify
    from unskip.train import param_groups
elif not TYPE_CHECKING:  # whoever checks types sees the names above and no others
    _HOME = {
        "diagnose": "doctor",
        "load": "io.load",
        **dict.fromkeys(("create_model", "list_models"), "models"),
        **dict.fromkeys(("convert", "export", "fold", "quantize", "verify"), "ship"),
        "param_groups": "train",
        **dict.fromkeys(("cost", "memory_plan", "plainify"), "surgery"),
    }

    def __getattr__(name: str) -> object:
        """A public name or a room, for a module of the user's that the command imports; the first brings all."""
        import importlib

        if not name.startswith("__"):  # Python's own questions
            for public, room in _HOME.items():
                globals()[public] = getattr(importlib.import_module(f"unskip.{room}"), public)
            importlib.import_module("unskip.nn")
        if name not in globals():
            raise AttributeError(f"module 'unskip' has no attribute {name!r}")
        return globals()[name]
