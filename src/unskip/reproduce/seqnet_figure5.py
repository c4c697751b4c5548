"""Hu, Figure 5 (section A): gradients for SELU, Tanh and ReLU, with and without BatchNorm."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from unskip._core.drawing import OTHER, PLAIN, PNNH, dress, legend, panels
from unskip.reproduce.registry import SEED, Outcome, Settings, between, reproduction
from unskip.reproduce.seqnet_simulation import ACTIVATIONS, GAINS, REPEATS, SimulatedNetwork, measure_gradients
from unskip.theory import growth_rate, unnormalised

COLOURS = {"SELU": PNNH, "Tanh": OTHER, "ReLU": PLAIN}


@dataclass(frozen=True, kw_only=True)
class Figure5(Settings):
    """What can be set."""

    repeats: Annotated[int, "networks drawn of each kind, at least 2; the paper draws 4096", REPEATS] = 64
    width: Annotated[int, "units of a layer", between(2, 10_000)] = 256
    batch: Annotated[int, "inputs that BatchNorm sees", between(3, 100_000)] = 128
    seed: Annotated[int, "seed of weights, inputs and gradients", SEED] = 0


def predicted(activation: str, *, norm: bool) -> float:
    """The log-rate that theory predicts: ½ ln r(σ) with BatchNorm, ½ ln χ without."""
    g = ACTIVATIONS[activation]
    growth = growth_rate(g) if norm else unnormalised(g, gain=GAINS[activation]).growth
    return 0.5 * math.log(growth)


@reproduction("seqnet-figure5", settings=Figure5)
def figure5(settings: Figure5) -> Outcome:
    """Mean gradient norm over that of the last layer; lines are theory's exp(rate · layers), bars one deviation."""
    title = "How fast gradients grow, by activation (20 plain layers of 256)"
    figure, axes = panels(1, 2, size=(8.4, 3.7), title=title)
    numbers, lines = {}, []
    for ax, norm in zip(axes, (True, False), strict=True):
        with_norm = f"{'with' if norm else 'without'} BatchNorm"
        for activation, colour in COLOURS.items():
            network = SimulatedNetwork(activation=activation, norm=norm, width=settings.width, batch=settings.batch)
            found = measure_gradients(network, repeats=settings.repeats, seed=settings.seed)
            rate, theory, last = found.rate, predicted(activation, norm=norm), found.mean[-1]
            layer = np.arange(1, network.depth + 1)
            label = f"{activation}  {rate}  ({theory:.4f})"
            bars: dict[str, Any] = {"fmt": "o", "color": colour, "markersize": 3, "elinewidth": 1}
            ax.errorbar(layer, found.mean / last, found.std / last, label=label, **bars)
            ax.plot(layer, np.exp(theory * (network.depth - layer)), color=colour, linewidth=1)
            numbers[f"{activation} {with_norm}"] = found.numbers(theory=theory)
            off = f", {100 * (rate.value / theory - 1):+.1f} %" if theory > 1e-9 else ""
            lines.append(f"{activation} {with_norm}: log-rate {rate}, theory {theory:.4f}{off}.")
        title = f"{with_norm}; theory: {'½ ln r(σ)' if norm else '½ ln χ'}"
        dress(ax, x="layer (1 is next to the input)", y="gradient norm over that of layer 20", title=title, log_y=True)
        legend(ax, title="log-rate a layer (theory)", title_fontsize=8)
        ax.set_ylim(0.6, 90)
        ax.set_xticks([1, 5, 10, 15, 20])
    words = "The paper shows ReLU growing here too.\nIt does not: with He's weights χ = 1."
    axes[1].text(0.03, 0.34, words, transform=axes[1].transAxes, fontsize=8)
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
