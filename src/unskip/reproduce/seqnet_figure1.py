"""Hu, Figure 1 (left) and Figure 10: gradients of plain and residual networks at initialisation."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from unskip.reproduce.drawing import PLAIN, RESIDUAL, dress, legend, panels
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.seqnet_simulation import SimulatedNetwork, gradient_norms, log_rate


@dataclass(frozen=True, kw_only=True)
class Figure1:
    """What can be set."""

    repeats: Annotated[int, "networks drawn, at least 2; the paper draws 4096"] = 64
    depth: Annotated[int, "layers, an even number; 40 is the paper's Figure 10"] = 20
    seed: Annotated[int, "seed of weights, inputs and gradients"] = 0

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ValueError(f"seqnet-figure1: repeats={self.repeats} must be at least 2, for an error bar.")
        if self.depth < 4 or self.depth % 2:
            raise ValueError(
                f"seqnet-figure1: depth={self.depth} must be even, since skips span two layers, and above 2."
            )


@reproduction("seqnet-figure1", config=Figure1)
def figure1(config: Figure1) -> Outcome:
    """Gradient norm against layer, on a linear axis as in the paper and on a logarithmic one, where rates show."""
    layer = np.arange(1, config.depth + 1)
    title = f"Gradients of weights at initialisation, {config.depth} layers of 256 with BatchNorm and ReLU"
    figure, axes = panels(1, 2, size=(8.4, 3.5), title=title)
    numbers, lines = {}, []
    for name, residual, colour in (("plain", False, PLAIN), ("residual", True, RESIDUAL)):
        norms = gradient_norms(
            SimulatedNetwork(residual=residual, depth=config.depth), repeats=config.repeats, seed=config.seed
        )
        mean, std, rate = norms.mean(0), norms.std(0, ddof=1), log_rate(norms)
        growth = np.diff(mean[::-2])  # over two layers at a time, since a block has two kinds of layers
        numbers[name] = {
            "mean": mean.tolist(),
            "std": std.tolist(),
            "log_rate": vars(rate),
            "first_over_last": mean[0] / mean[-1],
        }
        numbers[name]["steps_over_two_layers"] = growth.tolist()
        for ax in axes:
            ax.fill_between(layer, mean - std, mean + std, color=colour, alpha=0.2, linewidth=0)
            ax.plot(layer, mean, "o-", color=colour, markersize=3, label=f"{name}: × {np.exp(rate.value):.3f} a layer")
        lines.append(
            f"{name}: first layer {mean[0] / mean[-1]:.1f} times the last; log-rate {rate.value:.4f} ± "
            f"{rate.error:.4f} a layer (n = {config.repeats}); what two layers add grows "
            f"{growth[-1] / growth[0]:.1f}-fold."
        )
    for ax, log in zip(axes, (False, True), strict=True):
        dress(ax, x="layer (1 is next to the input)", y="norm of the weights' gradient", log_y=log)
        ax.set_xticks([1, *range(5, config.depth + 1, 5)])
        ax.set_title("as in the paper" if not log else "logarithmic", fontsize=9.5, loc="left")
    legend(axes[1])
    axes[0].text(
        0.97, 0.95, "paper: exponential (plain),\n“roughly linear” (residual)", transform=axes[0].transAxes, fontsize=8,
        ha="right", va="top",
    )  # fmt: skip
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
