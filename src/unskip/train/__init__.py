"""Training: recipe, loop, optimisers, penalties and constraints, checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unskip.train.optim import param_groups
    from unskip.train.penalties import MaxNorm, Orthogonal, ShiftedDecay, identity_shift
    from unskip.train.recipe import Recipe, load_recipe, recipe_names
    from unskip.train.runner import Result, run
    from unskip.train.trainer import TrainingDiverged, TrainingInterrupted

__all__ = [
    "MaxNorm",
    "Orthogonal",
    "Recipe",
    "Result",
    "ShiftedDecay",
    "TrainingDiverged",
    "TrainingInterrupted",
    "identity_shift",
    "load_recipe",
    "param_groups",
    "recipe_names",
    "run",
]


def __getattr__(name: str) -> Any:
    """A public name, from the file that has it: Accelerate and matplotlib take seconds to import, so they wait."""
    if name not in __all__:
        raise AttributeError(f"module 'unskip.train' has no attribute {name!r}")
    homes = {"param_groups": "optim", "TrainingDiverged": "trainer", "TrainingInterrupted": "trainer"}
    homes |= dict.fromkeys(("Recipe", "load_recipe", "recipe_names"), "recipe")
    homes |= dict.fromkeys(("MaxNorm", "Orthogonal", "ShiftedDecay", "identity_shift"), "penalties")
    return getattr(importlib.import_module(f"unskip.train.{homes.get(name, 'runner')}"), name)
