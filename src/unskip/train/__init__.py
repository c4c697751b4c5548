"""Training: recipe, data, loop, penalties and constraints, checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

from unskip.train.params import param_groups

if TYPE_CHECKING:
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

# Accelerate and matplotlib take seconds to import, so they wait until somebody trains.
_HOME = {
    **dict.fromkeys(("TrainingDiverged", "TrainingInterrupted"), "trainer"),
    **dict.fromkeys(("MaxNorm", "Orthogonal", "ShiftedDecay", "identity_shift"), "penalties"),
    **dict.fromkeys(("Recipe", "load_recipe", "recipe_names"), "recipe"),
    **dict.fromkeys(("Result", "run"), "runner"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unskip.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unskip.train.{_HOME[name]}"), name)
