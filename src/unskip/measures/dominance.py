"""Dominant gradient flow: does a channel's gradient come mainly from the same channel of the last activation?

Yu and Tomasi 2019, section D, Eq. 5 and 13.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, variance
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from unskip.measures.losses import loss_of
from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Estimate, Findings, measures_of

SAMPLES = 4  # of the batch
MAX_BANDS = 4  # of channels
CHANNELS = 8  # drawn from every band; each takes a backward pass


def dominant(own: Tensor, rest: Tensor) -> Tensor:
    """Whether a channel's gradient flow is dominant, (B,) of booleans (Yu and Tomasi 2019, Eq. 5 and 13)::

        r_i = 1/P Σ_p |Θ_iip| / |Σ_{j≠i} Θ_ijp| > 1

    An entry that no gradient reaches (0 / 0) counts as 0. As printed, r_i is a mean of ratios, and a few small
    denominators can raise it above 1: plain networks are not at 0.

    Args:
        own: Θ_iip, the gradient through channel i of the last activation, (B, P).
        rest: Σ_{j≠i} Θ_ijp, the gradient through all others, (B, P).
    """
    ratio = torch.where(own == 0, torch.zeros_like(own), own.abs() / rest.abs())
    return ratio.mean(1) > 1


def bands(widths: Sequence[int]) -> list[range]:
    """Channels in bands between the layers' widths: 16, 32 and 64 give 0..15, 16..31 and 32..63.

    If there are many different widths (DenseNet), MAX_BANDS of them are used, evenly spaced and with the largest.
    """
    known = sorted(set(widths), reverse=True)
    edges = [0, *reversed(known[:: math.ceil(len(known) / MAX_BANDS)])]
    return [range(low, high) for low, high in pairwise(edges)]


def capture(probe: Probe, classifier: Layer, samples: int) -> tuple[dict[Layer, GradientEdge], Tensor | None, Tensor]:
    """A forward pass on a few samples: the gradient edges of layers, a^(L) of (B, C), and the loss.

    a^(L) is the input of the last linear layer.
    """
    edges: dict[Layer, GradientEdge] = {}
    last: Tensor | None = None

    def on_entry(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal last
        if path == classifier.path and args:
            last = args[0]

    def on_layer(layer: Layer, x: Tensor | None, y: Tensor) -> None:
        wanted = layer.kind == "activation" or (layer.kind == "block" and layer.trunk)
        if wanted and layer.sample_axis == 0 and y.requires_grad and last is None:
            edges[layer] = get_gradient_edge(y)

    targets = probe.targets
    if isinstance(targets, Tensor) and targets.ndim and targets.shape[0] == probe.samples:
        targets = targets[:samples]
    with torch.enable_grad():
        output = probe.rerun(on_layer, probe.first_samples(samples), on_entry=on_entry)
        loss, _ = loss_of(output, targets, probe.loss_function, samples, probe.seed)
    return edges, last, loss


def one_channel(gradient: Tensor, layer: Layer, channel: int) -> Tensor:
    """One channel of a gradient, (B, P)."""
    return gradient.select(layer.unit_axis % gradient.ndim, channel).reshape(gradient.shape[0], -1).double()


def fractions(
    probe: Probe, classifier: Layer, *, samples: int = SAMPLES, channels: int | None = CHANNELS
) -> dict[Layer, Estimate]:
    """σ^(l) of Eq. 13 of every activation before the classifier.

    r_i takes one backward pass for each channel i. `channels` are drawn from every band of channels (those that exist
    since the same stage) and weighted by the size of their band; None takes all.
    """
    edges, last, loss = capture(probe, classifier, samples)
    if last is None or last.ndim != 2 or not edges or not last.requires_grad:
        return {}
    (signal,) = torch.autograd.grad(loss, last, retain_graph=True)  # (B, C)

    def gradients(through: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(last, list(edges.values()), through, retain_graph=True, allow_unused=True)

    total = gradients(signal)
    widths = {layer: min(layer.shape[layer.unit_axis], last.shape[1]) for layer in edges}
    drawn: dict[Layer, dict[range, list[float]]] = {layer: {} for layer in edges}
    generator = torch.Generator().manual_seed(probe.seed)
    for band in bands(list(widths.values())):
        order = torch.randperm(len(band), generator=generator).tolist()
        for channel in (band[index] for index in order[: channels or len(band)]):
            mask = torch.zeros_like(signal)
            mask[:, channel] = signal[:, channel]
            for layer, everything, part in zip(edges, total, gradients(mask), strict=True):
                if channel >= widths[layer] or everything is None or part is None:
                    continue
                own = one_channel(part, layer, channel)
                rest = one_channel(everything, layer, channel) - own
                drawn[layer].setdefault(band, []).append(dominant(own, rest).double().mean().item())
    return {layer: weighted_mean(by_band, widths[layer]) for layer, by_band in drawn.items()}


def weighted_mean(by_band: dict[range, list[float]], width: int) -> Estimate:
    """The mean over a layer's `width` channels, from values of channels drawn in each band."""
    sizes = {band: min(width, band.stop) - band.start for band in by_band}  # channels that the layer has
    if not sizes:
        return Estimate(math.nan, math.nan)
    weights = {band: size / sum(sizes.values()) for band, size in sizes.items()}
    squares = (weights[band] ** 2 * squared_error(drawn, sizes[band]) for band, drawn in by_band.items())
    return Estimate(sum(weights[band] * fmean(drawn) for band, drawn in by_band.items()), math.sqrt(sum(squares)))


def squared_error(values: Sequence[float], population: int) -> float:
    """The squared standard error of the mean of a sample drawn without replacement."""
    return variance(values) / len(values) * (1 - len(values) / population) if len(values) > 1 else 0.0


def report(probe: Probe) -> Findings:
    classifier = next((layer for layer in reversed(probe.layers) if layer.kind == "linear" and layer.call == 0), None)
    why = "there is no linear layer at the end"
    if classifier is not None:
        why = "the last linear layer does not read one vector per sample, computed by activations"
        try:
            found = fractions(probe, classifier, samples=min(SAMPLES, probe.samples))
        except RuntimeError as error:  # the backward pass fails, as the probe has noted already
            found, why = {}, str(error).split(". ")[0].rstrip(".")
        for layer, estimate in found.items():
            layer.values["dominance"] = estimate
        if found:
            return Findings()
    return Findings(notes=(f"Dominant gradient flow is not measured: {why}.",))


FAMILY = Family(name="dominance", measures=measures_of("dominance"), report=report)
