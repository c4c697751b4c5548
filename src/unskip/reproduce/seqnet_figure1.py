"""Hu, Figure 1 (left) and Figure 10: gradients of plain and residual networks at initialisation."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from unskip._core.drawing import PLAIN, RESIDUAL, dress, legend, panels
from unskip.reproduce.registry import SEED, Limit, Outcome, Settings, reproduction
from unskip.reproduce.seqnet_simulation import REPEATS, SimulatedNetwork, measure_gradients

DEPTHS = Limit(range(4, 1001, 2).__contains__, "even, since skips span two layers, and between 4 and 1,000")


@dataclass(frozen=True, kw_only=True)
class Figure1(Settings):
    """What can be set."""

    repeats: Annotated[int, "networks drawn, at least 2; the paper draws 4096", REPEATS] = 64
    depth: Annotated[int, "layers, an even number; 40 is the paper's Figure 10", DEPTHS] = 20
    seed: Annotated[int, "seed of weights, inputs and gradients", SEED] = 0


@reproduction("seqnet-figure1", settings=Figure1)
def figure1(settings: Figure1) -> Outcome:
    """Gradient norm against layer, on a linear axis as in the paper and on a logarithmic one, where rates show."""
    depth = settings.depth
    layer = np.arange(1, depth + 1)
    title = f"Gradients of weights at initialisation, {depth} layers of 256 with BatchNorm and ReLU"
    figure, axes = panels(1, 2, size=(8.4, 3.5), title=title)
    numbers, lines = {}, []
    for name, residual, colour in (("plain", False, PLAIN), ("residual", True, RESIDUAL)):
        network = SimulatedNetwork(residual=residual, depth=depth)
        found = measure_gradients(network, repeats=settings.repeats, seed=settings.seed)
        mean, std, rate = found.mean, found.std, found.rate
        growth = np.diff(mean[::-2])  # over two layers at a time, since a block has two kinds of layers
        first_over_last = mean[0] / mean[-1]
        numbers[name] = found.numbers(first_over_last=first_over_last, steps_over_two_layers=growth.tolist())
        for ax in axes:
            ax.fill_between(layer, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
            ax.plot(layer, mean, "o-", color=colour, markersize=3, label=f"{name}: × {np.exp(rate.value):.3f} a layer")
        lines.append(
            f"{name}: first layer {first_over_last:.1f} times the last; log-rate {rate} a layer "
            f"(n = {settings.repeats}); what two layers add grows {growth[-1] / growth[0]:.1f}-fold."
        )
    for ax, title in zip(axes, ("as in the paper", "logarithmic"), strict=True):
        dress(ax, x="layer (1 is next to the input)", y="norm of the weights' gradient", title=title)
        ax.set_xticks([1, *range(5, depth + 1, 5)])
    axes[1].set_yscale("log")
    legend(axes[1])
    words = "paper: exponential (plain),\n“roughly linear” (residual)"
    axes[0].text(0.97, 0.95, words, transform=axes[0].transAxes, fontsize=8, ha="right", va="top")
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
