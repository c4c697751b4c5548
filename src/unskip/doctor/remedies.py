"""What helps against a failure, and whether a method of `plainify` takes the model.

The order is that of benchmarks/records/2026-11-18_remedies_cpu: failing networks trained with one change each.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Literal

import timm
import torch
from torch import nn

from unskip.measures import Measured
from unskip.methods import method_names
from unskip.models import ENTRIES
from unskip.surgery import takes

Mechanism = Literal["dissipating", "singularity", "exploding gradient", "vanishing gradient", "saturation"]


def always(method: str) -> bool:
    """True: for a model that is not at hand, every method is proposed."""
    return True


def remedies(
    mechanism: Mechanism, measured: Measured, rebuilds: Callable[[str], bool], *, only_sgd: bool = False
) -> tuple[str, ...]:
    """What helps against a mechanism in this model, the most likely first."""
    kinds = {layer.kind for layer in measured.layers}
    norm = [] if "norm" in kinds else ["Add a BatchNorm or LayerNorm before each activation."]
    skips = ["Add a skip connection around every two layers."]
    rebuilt = [
        f"Rebuild it from its residual form with unskip.plainify(model, method={method!r})."
        for method in (("seq", "pnnh") if mechanism == "exploding gradient" else ("pnnh", "seq"))
        if method in method_names() and "conv" in kinds and rebuilds(method)
    ]
    match mechanism:
        case "saturation":
            cures = ["Initialise the weights smaller, so that the activations are not saturated.", *norm]
        case "dissipating":
            cures = [*rebuilt, *skips, *norm]
        case "singularity":
            cures = [*norm, *rebuilt, *skips]
        case "exploding gradient":
            cures = [*norm, *rebuilt, *skips]
        case "vanishing gradient":
            adaptive = ["Train it with AdamW, whose steps do not shrink with the gradient."] if only_sgd else []
            cures = [*adaptive, *norm, *skips]
    return tuple(cures)


def tried_on(model: nn.Module) -> Callable[[str], bool]:
    """Whether a method rebuilds this model's residual form: tried on the meta device, on a copy without weights."""

    @cache
    def rebuilds(method: str) -> bool:
        residual = residual_form(model)
        return residual is None or takes(residual, method)

    return rebuilds


def residual_form(model: nn.Module) -> nn.Module | None:
    """The model itself, or of one that `plainify` made skip-free what its name builds; None if it has no name."""
    if getattr(model, "surgery", None) is None:
        return model
    name = str((getattr(model, "pretrained_cfg", None) or {}).get("architecture", ""))
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ENTRIES[name].builder() if name in ENTRIES else timm.create_model(name)
    except Exception:  # the name may come from elsewhere
        return None
