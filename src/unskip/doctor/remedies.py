"""What helps against a failure, and whether a method of `plainify` takes the model.

The order is that of benchmarks/records/2026-11-18_remedies_cpu: failing networks trained with one change each.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Literal

import timm
import torch
from torch import nn

from unskip.measures import Measured
from unskip.methods import method_names
from unskip.models import ENTRIES
from unskip.surgery import takes

SHALLOW = 21  # layers up to which a norm alone, or He's initialisation, made plain networks train

Mechanism = Literal[
    "dissipating", "singularity", "exploding gradient", "vanishing gradient", "saturation", "rank collapse"
]


Rebuilds = Callable[..., bool]  # of the name of a method and options of `plainify`


def always(method: str, **options: str) -> bool:
    """True: for a model that is not at hand, every method is proposed."""
    return True


def remedies(
    mechanism: Mechanism, measured: Measured, rebuilds: Rebuilds, *, only_sgd: bool = False
) -> tuple[str, ...]:
    """What helps against a mechanism in this model, the most reliable first.

    Of failing networks trained with one change (benchmarks/records/2026-11-18_remedies_cpu), skips with BatchNorm made
    16 of 16 train, and skips without a norm 4 of 13. A norm alone or He's initialisation helped ReLU networks of about
    20 layers, an orthogonal initialisation all tanh networks, a leaky ReLU one of 30 layers. AdamW made one of 16
    train, and brought a transformer, which SGD hardly moves, furthest. GPTs of 2 to 16 layers without skips, which all
    failed, started with shaped attention and pnnh, and with their skips (benchmarks/records/2026-11-19_gpt-start_cpu).
    """
    kinds = {layer.kind for layer in measured.layers}
    normed, shallow = "norm" in kinds, measured.depth <= SHALLOW
    skips = "Add a skip connection around every two layers"
    best = [f"{skips}." if normed else f"{skips}, and a BatchNorm before each activation."]
    if any(not layer.trunk for layer in measured.layers) and only_sgd:
        best = []  # it has branches, and the signal gets through
    norm = ["Add a BatchNorm before each activation."] if shallow and not normed else []
    preferred = ("seq", "pnnh") if mechanism == "exploding gradient" else ("pnnh", "seq")
    rebuilt = [
        f"Rebuild it from its residual form with unskip.plainify(model, method={method!r})."
        for method in preferred
        if "conv" in kinds and method in method_names() and rebuilds(method)
    ]
    match mechanism:
        case "rank collapse":
            call = "unskip.plainify(model, method='pnnh', attention='shaped')"
            shaped = [f"Rebuild it from its residual form with {call}."] if rebuilds("pnnh", attention="shaped") else []
            return (*shaped, "Keep the skip connections around attention and around the MLP.")
        case "dissipating":
            tied = "Initialise each pair of layers as a matrix and its transpose, as unskip's seqnet_mlp does."
            return (*rebuilt, *best, *([] if "conv" in kinds else [tied]))
        case "singularity":
            leaky = ["Use a leaky ReLU with slope 0.3."] if measured.depth <= 1.5 * SHALLOW and not normed else []
            return (*rebuilt, *best, *norm, *leaky)
        case "exploding gradient":
            smaller = ["Initialise the weights smaller: orthogonal before a tanh."] if not normed else []
            return (*rebuilt, *best, *norm, *smaller)
        case "saturation":
            weights = "Initialise the weights smaller, orthogonal before a tanh, so that activations are not saturated."
            return (weights, *norm, *best)
        case "vanishing gradient":
            adaptive = ["Train it with AdamW, whose steps do not shrink with the gradient."] if only_sgd else []
            he = ", N(0, 2/fan_in) before a ReLU" if shallow else ""
            larger = [] if normed else [f"Initialise the weights larger: orthogonal before a tanh{he}."]
            return (*adaptive, *best, *norm, *larger)


def tried_on(model: nn.Module) -> Rebuilds:
    """Whether a method rebuilds this model's residual form: tried on the meta device, on a copy without weights."""

    @cache
    def rebuilds(method: str, **options: str) -> bool:
        residual = residual_form(model)
        return residual is None or takes(residual, method, **options)

    return rebuilds


def residual_form(model: nn.Module) -> nn.Module | None:
    """The model itself, or of one that `plainify` made skip-free what its name builds; None if it has no name."""
    if getattr(model, "surgery", None) is None:
        return model
    name = str((getattr(model, "pretrained_cfg", None) or {}).get("architecture", "")).partition(" ")[0]
    build = ENTRIES[name].builder if name in ENTRIES else partial(timm.create_model, name)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build()
    except Exception:  # the name may come from elsewhere
        return None
