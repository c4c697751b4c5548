"""Hu, Figure 6 (section A.1): the predicted gradient norm beside the actual one."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from unskip.reproduce.drawing import INK, dress, legend, panels
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.seqnet_figure5 import COLOURS, predicted
from unskip.reproduce.seqnet_simulation import SimulatedNetwork, gradient_norms, log_rate
from unskip.theory import batch_norm


@dataclass(frozen=True, kw_only=True)
class Figure6:
    """What can be set."""

    repeats: Annotated[int, "networks drawn of each kind, at least 2; the paper draws 4096"] = 64
    wide_repeats: Annotated[int, "networks drawn of the same kind, four times as wide; 0 draws none"] = 3
    seed: Annotated[int, "seed of weights, inputs and gradients"] = 0

    def __post_init__(self) -> None:
        for name in ("repeats", "wide_repeats"):
            if getattr(self, name) < 2 and not (name == "wide_repeats" and self.wide_repeats == 0):
                raise ValueError(f"seqnet-figure6: {name}={getattr(self, name)} must be at least 2, for an error bar.")


@reproduction("seqnet-figure6", config=Figure6)
def figure6(config: Figure6) -> Outcome:
    """One panel an activation: measured norms, and √r per layer from the last layer back."""
    figure, axes = panels(
        1, 3, size=(9.6, 3.3), title="Predicted and measured gradients, 20 plain layers with BatchNorm"
    )
    numbers: dict[str, dict[str, object]] = {}
    lines = []
    for ax, (activation, colour) in zip(axes, reversed(COLOURS.items()), strict=True):
        network = SimulatedNetwork(activation=activation)
        norms = gradient_norms(network, repeats=config.repeats, seed=config.seed)
        layer = np.arange(1, network.depth + 1)
        mean, std, rate = norms.mean(0), norms.std(0, ddof=1), log_rate(norms)
        half_log_r = predicted(activation, norm=True)
        prediction = np.exp(half_log_r * (network.depth - layer))
        off = rate.value / half_log_r - 1
        ax.errorbar(
            layer,
            mean / mean[-1],
            std / mean[-1],
            fmt="o",
            color=colour,
            markersize=3.5,
            elinewidth=1,
            label="measured",
        )
        ax.plot(layer, prediction, color=INK, linewidth=1.2, label=f"predicted, √r = {math.exp(half_log_r):.3f}")
        dress(
            ax, x="layer (1 is next to the input)", y="gradient norm over that of layer 20", log_y=True,
            title=f"{activation}: rate {100 * off:+.1f} % off",
        )  # fmt: skip
        ax.set_xticks([1, 5, 10, 15, 20])
        ax.set_ylim(0.8, 200)
        if config.wide_repeats:
            wide = SimulatedNetwork(activation=activation, width=4 * network.width, batch=4 * network.batch)
            wide_norms = gradient_norms(wide, repeats=config.wide_repeats, seed=config.seed)
            wide_mean, wide_rate = wide_norms.mean(0), log_rate(wide_norms)
            words = "measured, width and batch × 4"
            ax.plot(layer, wide_mean / wide_mean[-1], "x", color=INK, markersize=3.5, label=words)
            wide_off = wide_rate.value / half_log_r - 1
            lines.append(
                f"{activation}, width {wide.width} and batch {wide.batch}: log-rate {wide_rate.value:.4f} ± "
                f"{wide_rate.error:.4f} ({100 * wide_off:+.1f} %, n = {config.wide_repeats})."
            )
            numbers[f"{activation}, four times as wide"] = {
                "mean": wide_mean.tolist(),
                "log_rate": vars(wide_rate),
                "off": wide_off,
            }
        legend(ax)
        numbers[activation] = {
            "mean": mean.tolist(),
            "std": std.tolist(),
            "log_rate": vars(rate),
            "half_log_r": half_log_r,
            "half_log_r_with_batch_norm_loss": half_log_r + 0.5 * math.log(batch_norm(1.0, network.batch).backward),
            "off": off,
        }
        lines.append(
            f"{activation}: log-rate {rate.value:.4f} ± {rate.error:.4f} a layer against ½ ln r = {half_log_r:.4f} "
            f"({100 * off:+.1f} %); first layer {mean[0] / mean[-1] / prediction[0]:.2f} of its prediction."
        )
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
