"""Zhang et al. 2024, arXiv:2402.08645, section 3.1: dissipating inputs for other activations than ReLU.

The paper says that leaky ReLU "preserves more information" and leaves it at that. Here is how alike two independent
inputs are after each layer of a plain network at initialisation (the cosine κ of `theory.relu_cosine` and
`theory.activation_cosine`, layer after layer), beside a simulation, for ReLU, LReLU, PReLU and GELU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from unskip._core.drawing import FAINT, INK, OTHER, PLAIN, PNNH, RESIDUAL, dress, legend, panels
from unskip.reproduce.registry import SEED, Outcome, Settings, between, reproduction
from unskip.theory import activation_cosine, linear_fidelity, relu_cosine

ALIKE = 0.99  # cosine above which we call two inputs alike
SETTLED = 1e-5  # change of the cosine in a layer below which it has settled
SLOPES = (0.0, 0.5)  # from and to which PReLU's slopes are spread evenly over the units


@dataclass(frozen=True, kw_only=True)
class Activations(Settings):
    """What can be set."""

    layers: Annotated[int, "layers of the simulated networks", between(1, 1000)] = 50
    width: Annotated[int, "units of a layer", between(16, 100_000)] = 512
    repeats: Annotated[int, "networks drawn for each activation", between(2, 100_000)] = 8
    seed: Annotated[int, "seed of weights and inputs", SEED] = 0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One activation, and theory's map of the cosine."""

    name: str
    colour: str
    apply: Callable[[Tensor], Tensor]
    cosine: Callable[[float], float]  # of two inputs, after one layer
    fidelity: float | None  # ρ²; None for PReLU, whose units differ


def leaky(a: float, colour: str) -> Kind:
    """ReLU, or LReLU of slope a."""
    apply = partial(F.leaky_relu, negative_slope=a)
    name = f"LReLU {a:g}" if a else "ReLU"
    return Kind(
        name=name, colour=colour, apply=apply, cosine=partial(relu_cosine, slope=a), fidelity=linear_fidelity(apply)
    )


def kinds(width: int) -> list[Kind]:
    """ReLU, two LReLUs, PReLU with slopes spread over the units, GELU."""
    slopes = torch.linspace(*SLOPES, width, dtype=torch.float64)
    prelu = Kind(
        name=f"PReLU {SLOPES[0]:g} to {SLOPES[1]:g}",
        colour=OTHER,
        apply=lambda z: torch.where(z > 0, z, slopes * z),
        cosine=partial(relu_cosine, slope=slopes.tolist()),
        fidelity=None,
    )
    gelu = Kind(
        name="GELU",
        colour=RESIDUAL,
        apply=F.gelu,
        cosine=partial(activation_cosine, F.gelu),
        fidelity=linear_fidelity(F.gelu),
    )
    return [leaky(0.0, PLAIN), leaky(0.01, INK), leaky(0.3, PNNH), prelu, gelu]


def predicted(kind: Kind, layers: int) -> list[float]:
    """The cosine after 0, 1, ... `layers` layers, of two inputs at right angles."""
    values = [0.0]
    for _ in range(layers):
        values.append(min(1.0, kind.cosine(values[-1])))
    return values


def alike_after(kind: Kind) -> int | None:
    """The layer from which on theory's cosine is above ALIKE; None if it settles below."""
    c, layer = 0.0, 0
    while c < ALIKE:
        before, c, layer = c, kind.cosine(c), layer + 1
        if abs(c - before) < SETTLED:
            return None
    return layer


def simulated(kind: Kind, settings: Activations) -> NDArray[np.float64]:
    """(repeats, layers + 1): the same in random networks.

    Responses are scaled to mean square 1, as an RMSNorm would: GELU's signal has no size of its own at which it
    settles. For ReLU, LReLU and PReLU that changes nothing.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    n, found = settings.width, np.zeros((settings.repeats, settings.layers + 1))
    for repeat in range(settings.repeats):
        x = torch.linalg.qr(torch.randn(n, 2, generator=generator, dtype=torch.float64)).Q.T
        for layer in range(1, settings.layers + 1):
            z = x @ torch.randn(n, n, generator=generator, dtype=torch.float64)
            x = kind.apply(z / z.square().mean(1, keepdim=True).sqrt())
            found[repeat, layer] = F.cosine_similarity(x[0], x[1], dim=0).item()
    return found


@reproduction("pnnh-activations", settings=Activations)
def activations(settings: Activations) -> Outcome:
    """1 - cosine against layer by theory and simulation, and the layer at which two inputs are alike."""
    title = "How alike two inputs become in plain networks at initialisation, by activation"
    figure, (axes,) = panels(1, 1, size=(6.6, 4.2), title=title)
    numbers: dict[str, Any] = {}
    lines = []
    for kind in kinds(settings.width):
        theory, runs = np.array(predicted(kind, settings.layers)), simulated(kind, settings)
        mean, error = runs.mean(0), runs.std(0, ddof=1) / math.sqrt(settings.repeats)
        alike = alike_after(kind)
        layers = np.arange(settings.layers + 1)
        axes.plot(layers, 1 - theory, color=kind.colour, linewidth=1.3, label=kind.name)
        axes.plot(layers[::5], 1 - mean[::5], "o", color=kind.colour, markersize=3)
        numbers[kind.name] = {
            "theory": theory.tolist(),
            "simulated": mean.tolist(),
            "standard error": error.tolist(),
            "linear fidelity": kind.fidelity,
            "alike after": alike,
        }
        rho = (
            ""
            if kind.fidelity is None
            else f"; {100 * kind.fidelity:.1f} % of a unit's variance is linear in its input"
        )
        where = f"never above {ALIKE:g}" if alike is None else f"above {ALIKE:g} from layer {alike} on"
        lines.append(
            f"{kind.name}: cosine of two inputs after one layer {theory[1]:.4f} (simulated {mean[1]:.4f} ± "
            f"{error[1]:.4f}), after {settings.layers} {theory[-1]:.4f} ({mean[-1]:.4f} ± {error[-1]:.4f}); "
            f"{where}{rho}."
        )
    axes.axhline(1 - ALIKE, color=FAINT, linestyle=":", linewidth=1)
    dress(axes, x="layer", y="1 - cosine of two inputs", title="lines: theory, points: simulation", log_y=True)
    legend(axes)
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
