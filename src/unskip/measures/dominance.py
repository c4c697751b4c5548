"""Dominant gradient flow: does a channel's gradient come from the same channel at the end?

Yu and Tomasi 2019, section D, Eq. 5 and 13.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from unskip.measures.losses import loss_of
from unskip.measures.probe import Call, Family, Layer, Probe
from unskip.measures.series import About, Findings

NAN = float("nan")
SAMPLES = 4  # of the batch
BANDS = 4  # of channels, at most
CHANNELS = 8  # drawn from every band; each costs a backward pass

DOMINANCE = About(
    name="dominance",
    title="Gradients that stay on their own channel",
    label="σ, share of channels with a dominant gradient flow",
    healthy="Higher in networks with an internal path, and rising towards the output; flat in plain networks.",
    source="Yu and Tomasi 2019, section D.4.2, Eq. 13",
)


def dominant(own: Tensor, rest: Tensor) -> Tensor:
    """Whether a channel's gradient flow is dominant, (B,) of booleans (Yu and Tomasi 2019, Eq. 5 and 13)::

        r_i = 1/P Σ_p |Θ_iip| / |Σ_{j≠i} Θ_ijp| > 1

    An entry that no gradient reaches (0 / 0) counts as 0. As printed, r_i is a mean of ratios, which a few small
    denominators can carry above 1: plain networks are not at 0.

    Args:
        own: Θ_iip, the gradient through channel i of the last activation, (B, P).
        rest: Σ_{j≠i} Θ_ijp, through all others, (B, P).
    """
    ratio = torch.where(own == 0, torch.zeros_like(own), own.abs() / rest.abs())
    return ratio.mean(1) > 1


def bands(widths: Sequence[int]) -> list[range]:
    """Channels in bands between the widths that occur: 16, 32 and 64 make 0..15, 16..31 and 32..63.

    Of many different widths (DenseNet) a few are taken, evenly, the largest among them.
    """
    known = sorted(set(widths), reverse=True)
    edges = [0, *reversed(known[:: math.ceil(len(known) / BANDS)])]
    return [range(low, high) for low, high in pairwise(edges)]


@dataclass(kw_only=True)
class Captured:
    """The graph of one pass, with where gradients are read."""

    layers: list[Layer] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    last: Tensor | None = None  # a^(L), (B, C)


def capture(probe: Probe, classifier: Layer, samples: int) -> tuple[Captured, Tensor]:
    """A forward pass on a few samples; a^(L) is what the last linear layer reads. With the loss."""
    captured = Captured()
    known = {(layer.path, layer.call): layer for layer in probe.layers}

    def on_entry(path: str, arguments: tuple, keywords: dict) -> None:
        if path == classifier.path and arguments:
            captured.last = arguments[0]

    def on_call(call: Call) -> None:
        layer = known.get((call.path, call.number))
        if layer is None or layer.sample_axis != 0 or not call.output.requires_grad or captured.last is not None:
            return
        if layer.kind == "activation" or (layer.kind == "block" and layer.trunk):
            captured.layers.append(layer)
            captured.edges.append(get_gradient_edge(call.output))

    target = probe.target
    if isinstance(target, Tensor) and target.ndim and target.shape[0] == probe.samples:
        target = target[:samples]
    arguments, keywords = probe.part(samples)
    with torch.enable_grad(), probe.with_hooks(on_call, on_entry=on_entry):
        output = probe.run(arguments, keywords)
        loss, _ = loss_of(output, target, probe.loss_function, samples, probe.seed)
    return captured, loss


def channelwise(gradient: Tensor, layer: Layer, channel: int) -> Tensor:
    """One channel of a gradient, (B, P)."""
    return gradient.select(layer.unit_axis % gradient.ndim, channel).reshape(gradient.shape[0], -1)


def shares(
    probe: Probe, classifier: Layer, *, samples: int = SAMPLES, channels: int | None = CHANNELS
) -> tuple[list[Layer], list[float], list[float]]:
    """σ^(l) of Eq. 13 for every activation before the classifier, with standard errors: layers, values, errors.

    r_i needs one backward pass for each channel i. Channels are drawn from bands (those that exist since the same
    stage), `channels` from each, and weighted by the size of their band; None takes all.
    """
    captured, loss = capture(probe, classifier, samples)
    last = captured.last
    if last is None or last.ndim != 2 or not captured.edges or not last.requires_grad:
        return [], [], []
    # Through the last activation only: (B, C), nothing else of the loss.
    (signal,) = torch.autograd.grad(loss, last, retain_graph=True)
    total = torch.autograd.grad(last, captured.edges, signal, retain_graph=True, allow_unused=True)
    width = last.shape[1]
    widths = [min(layer.shape[layer.unit_axis], width) for layer in captured.layers]
    generator = torch.Generator().manual_seed(probe.seed)
    found: list[dict[range, list[float]]] = [{} for _ in captured.layers]
    for band in bands(widths):
        order = torch.randperm(len(band), generator=generator).tolist()
        for channel in (band[index] for index in order[: channels or len(band)]):
            mask = torch.zeros_like(signal)
            mask[:, channel] = signal[:, channel]
            through = torch.autograd.grad(last, captured.edges, mask, retain_graph=True, allow_unused=True)
            for index, (layer, everything, part) in enumerate(zip(captured.layers, total, through, strict=True)):
                if channel >= widths[index] or everything is None or part is None:
                    continue
                own = channelwise(part, layer, channel).double()
                rest = channelwise(everything, layer, channel).double() - own
                found[index].setdefault(band, []).append(dominant(own, rest).double().mean().item())
    values, errors = [], []
    for drawn_from, limit in zip(found, widths, strict=True):
        # Of each band the channels that this layer has.
        sizes = {band: min(limit, band.stop) - band.start for band in drawn_from}
        size = sum(sizes.values())
        parts = [(sizes[band] / size, sizes[band], drawn) for band, drawn in drawn_from.items()]
        values.append(sum(share * mean(drawn) for share, _, drawn in parts) if parts else NAN)
        errors.append(
            math.sqrt(sum(share**2 * sampling(drawn, count) for share, count, drawn in parts)) if parts else NAN
        )
    return captured.layers, values, errors


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def sampling(values: Sequence[float], population: int) -> float:
    """The squared standard error of the mean of a sample drawn without replacement."""
    count = len(values)
    if count < 2:
        return 0.0
    spread = sum((value - mean(values)) ** 2 for value in values) / (count - 1)
    return spread / count * (1 - count / population)


def report(probe: Probe) -> Findings:
    classifier = next((layer for layer in reversed(probe.layers) if layer.kind == "linear" and layer.call == 0), None)
    reason = "there is no linear layer at the end"
    if classifier is not None:
        try:
            layers, values, errors = shares(probe, classifier, samples=min(SAMPLES, probe.samples))
        except RuntimeError as error:  # a network whose backward pass fails, which the probe has said already
            layers, values, errors = [], [], []
            reason = str(error).split(". ")[0].rstrip(".")
        else:
            reason = "the last linear layer does not read one vector a sample behind activations"
        if layers:
            return Findings(series=(DOMINANCE.series((layer.name for layer in layers), values, errors),))
    return Findings(series=(DOMINANCE.series((), ()),), notes=(f"Dominant gradient flow is not measured: {reason}.",))


FAMILY = Family(name="dominance", report=report)
