"""Hu, Figure 5 (section A): gradients for SELU, Tanh and ReLU, with and without BatchNorm."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from unskip.reproduce.drawing import OTHER, PLAIN, PNNH, dress, legend, panels
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.seqnet_simulation import ACTIVATIONS, GAINS, SimulatedNetwork, gradient_norms, log_rate
from unskip.theory import growth_rate, unnormalised

COLOURS = {"SELU": PNNH, "Tanh": OTHER, "ReLU": PLAIN}


@dataclass(frozen=True, kw_only=True)
class Figure5:
    """What can be set."""

    repeats: Annotated[int, "networks drawn of each kind, at least 2; the paper draws 4096"] = 64
    width: Annotated[int, "units of a layer"] = 256
    batch: Annotated[int, "inputs that BatchNorm sees"] = 128
    seed: Annotated[int, "seed of weights, inputs and gradients"] = 0

    def __post_init__(self) -> None:
        if self.repeats < 2 or self.width < 2 or self.batch < 3:
            raise ValueError(
                f"seqnet-figure5: repeats={self.repeats} and width={self.width} must be at least 2, batch={self.batch} "
                "at least 3."
            )


def predicted(activation: str, *, norm: bool) -> float:
    """The log-rate that theory predicts: ½ ln r(σ) with BatchNorm, ½ ln χ without."""
    g = ACTIVATIONS[activation]
    growth = growth_rate(g) if norm else unnormalised(g, gain=GAINS[activation]).growth
    return 0.5 * math.log(growth)


@reproduction("seqnet-figure5", config=Figure5)
def figure5(config: Figure5) -> Outcome:
    """Mean gradient norm over that of the last layer; lines are theory's exp(rate · layers), bars one deviation."""
    figure, axes = panels(
        1, 2, size=(8.4, 3.7), title="How fast gradients grow, by activation (20 plain layers of 256)"
    )
    numbers: dict[str, dict[str, object]] = {}
    lines = []
    for ax, norm in zip(axes, (True, False), strict=True):
        for activation, colour in COLOURS.items():
            network = SimulatedNetwork(activation=activation, norm=norm, width=config.width, batch=config.batch)
            norms = gradient_norms(network, repeats=config.repeats, seed=config.seed)
            rate, theory = log_rate(norms), predicted(activation, norm=norm)
            layer = np.arange(1, network.depth + 1)
            mean, std = norms.mean(0), norms.std(0, ddof=1)
            ax.errorbar(
                layer, mean / mean[-1], std / mean[-1], fmt="o", color=colour, markersize=3, elinewidth=1,
                label=f"{activation}  {rate.value:.4f} ± {rate.error:.4f}  ({theory:.4f})",
            )  # fmt: skip
            ax.plot(layer, np.exp(theory * (network.depth - layer)), color=colour, linewidth=1)
            label = f"{activation} {'with' if norm else 'without'} BatchNorm"
            numbers[label] = {"mean": mean.tolist(), "std": std.tolist(), "log_rate": vars(rate), "theory": theory}
            off = f", {100 * (rate.value / theory - 1):+.1f} %" if theory > 1e-9 else ""
            lines.append(f"{label}: log-rate {rate.value:.4f} ± {rate.error:.4f}, theory {theory:.4f}{off}.")
        title = f"{'with' if norm else 'without'} BatchNorm; theory: {'½ ln r(σ)' if norm else '½ ln χ'}"
        dress(ax, x="layer (1 is next to the input)", y="gradient norm over that of layer 20", title=title, log_y=True)
        legend(ax, title="log-rate a layer (theory)", title_fontsize=8)
        ax.set_ylim(0.6, 90)
        ax.set_xticks([1, 5, 10, 15, 20])
    axes[1].text(
        0.03, 0.34, "The paper shows ReLU growing here too.\nIt does not: with He's weights χ = 1.",
        transform=axes[1].transAxes, fontsize=8,
    )  # fmt: skip
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
