"""Hu, Figure 6 (section A.1): the predicted gradient norm beside the actual one."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from unskip._core.drawing import INK, dress, legend, panels
from unskip.reproduce.registry import SEED, Limit, Outcome, Settings, reproduction
from unskip.reproduce.seqnet_figure5 import COLOURS, predicted
from unskip.reproduce.seqnet_simulation import REPEATS, SimulatedNetwork, measure_gradients
from unskip.theory import batch_norm

NONE_OR_REPEATS = Limit(lambda repeats: repeats == 0 or REPEATS.holds(repeats), f"0 or {REPEATS.words}")


@dataclass(frozen=True, kw_only=True)
class Figure6(Settings):
    """What can be set."""

    repeats: Annotated[int, "networks drawn of each kind, at least 2; the paper draws 4096", REPEATS] = 64
    wide_repeats: Annotated[
        int, "networks drawn of the same kind, four times as wide; 0 draws none", NONE_OR_REPEATS
    ] = 3
    seed: Annotated[int, "seed of weights, inputs and gradients", SEED] = 0


@reproduction("seqnet-figure6", settings=Figure6)
def figure6(settings: Figure6) -> Outcome:
    """One panel for each activation: measured norms, and √r per layer from the last layer back."""
    title = "Predicted and measured gradients, 20 plain layers with BatchNorm"
    figure, axes = panels(1, 3, size=(9.6, 3.3), title=title)
    numbers, lines = {}, []
    for ax, (activation, colour) in zip(axes, reversed(COLOURS.items()), strict=True):
        network = SimulatedNetwork(activation=activation)
        found = measure_gradients(network, repeats=settings.repeats, seed=settings.seed)
        mean, last, rate = found.mean, found.mean[-1], found.rate
        layer = np.arange(1, network.depth + 1)
        half_log_r = predicted(activation, norm=True)
        prediction = np.exp(half_log_r * (network.depth - layer))
        off = rate.value / half_log_r - 1
        bars: dict[str, Any] = {"fmt": "o", "color": colour, "markersize": 3.5, "elinewidth": 1}
        ax.errorbar(layer, mean / last, found.std / last, label="measured", **bars)
        ax.plot(layer, prediction, color=INK, linewidth=1.2, label=f"predicted, √r = {math.exp(half_log_r):.3f}")
        title = f"{activation}: rate {100 * off:+.1f} % off"
        dress(ax, x="layer (1 is next to the input)", y="gradient norm over that of layer 20", title=title, log_y=True)
        ax.set_xticks([1, 5, 10, 15, 20])
        ax.set_ylim(0.8, 200)
        if settings.wide_repeats:
            network = SimulatedNetwork(activation=activation, width=4 * network.width, batch=4 * network.batch)
            wide = measure_gradients(network, repeats=settings.wide_repeats, seed=settings.seed)
            wide_off = wide.rate.value / half_log_r - 1
            numbers[f"{activation}, four times as wide"] = wide.numbers(off=wide_off)
            label = "measured, width and batch × 4"
            ax.plot(layer, wide.mean / wide.mean[-1], "x", color=INK, markersize=3.5, label=label)
            lines.append(
                f"{activation}, width {network.width} and batch {network.batch}: log-rate {wide.rate} "
                f"({100 * wide_off:+.1f} %, n = {settings.wide_repeats})."
            )
        legend(ax)
        with_loss = half_log_r + 0.5 * math.log(batch_norm(1.0, SimulatedNetwork.batch).backward)
        numbers[activation] = found.numbers(half_log_r=half_log_r, half_log_r_with_batch_norm_loss=with_loss, off=off)
        lines.append(
            f"{activation}: log-rate {rate} a layer against ½ ln r = {half_log_r:.4f} "
            f"({100 * off:+.1f} %); first layer {mean[0] / last / prediction[0]:.2f} of its prediction."
        )
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
