"""Yu and Tomasi 2019, arXiv:1905.10944, Figure 12 (D.4.2, Eq. 13): dominant gradient flow in simplified networks.

The share of sub-activations of each layer whose gradient comes more through their own channel of the last activation
than through all others together, before and after training. The paper's Figure 12 (b) has networks with BatchNorm.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from unskip._core.drawing import dress, legend, panels
from unskip.measures import Findings, Probe, measure
from unskip.measures.dominance import FAMILY, fractions
from unskip.models import create_model
from unskip.reproduce.images import load_set, sample_images
from unskip.reproduce.noise_figure3 import COLOURS, TrainedPair, trained
from unskip.reproduce.registry import Outcome, between, reproduction

WHEN = {"before": "-", "after": "--"}  # training


@dataclass(frozen=True, kw_only=True)
class Figure12(TrainedPair):
    """What can be set."""

    images: Annotated[int, "test images", between(2, 1_000_000)] = 32


def dominance(model: nn.Module, x: Tensor, labels: Tensor) -> list[float]:
    """σ^(l) of Eq. 13 of all activations in order, over all channels and images."""

    def report(probe: Probe) -> Findings:
        classifier = next(layer for layer in reversed(probe.layers) if layer.kind == "linear")
        for layer, found in fractions(probe, classifier, samples=len(x), channels=None).items():
            if layer.kind == "activation":  # a block's output is its activation's
                layer.values["dominance"] = found
        return Findings()

    return list(measure(model, x, labels, families=[replace(FAMILY, report=report)]).series["dominance"].values)


@reproduction("noise-figure12", settings=Figure12)
def figure12(settings: Figure12) -> Outcome:
    """σ against layer for both networks, before and after training; ratios at the first, middle and last layer."""
    data = load_set(settings.dataset, settings.data, size=settings.size)
    count = min(settings.images, len(data.test))
    x = sample_images(data, count)
    labels = data.test.labels[torch.arange(count) * len(data.test) // count]
    layers = np.arange(1, settings.depth)  # activations: the stem's and one for each block
    found: dict[tuple[str, str], list[float]] = {}
    origins = {}
    for kind, weights in (("plain", settings.plain), ("resnet", settings.residual)):
        name = f"simplified_{kind}{settings.depth}"
        torch.manual_seed(settings.seed)
        untrained = create_model(name, num_classes=data.classes, in_chans=data.channels)
        model, origins[kind] = trained(name, weights, data, settings)
        found[kind, "before"], found[kind, "after"] = (dominance(net, x, labels) for net in (untrained, model))
    title = f"Channels with a dominant gradient flow, {settings.depth}-layer simplified networks ({data.name})"
    figure, (axes,) = panels(1, 1, size=(6.4, 4.0), title=title)
    numbers: dict[str, Any] = {"weights": origins, "images": count}
    lines = [f"Plain: {origins['plain']}; residual: {origins['resnet']}; {count} test images of {data.name}."]
    for (kind, when), values in found.items():
        style: dict[str, Any] = {"linestyle": WHEN[when], "color": COLOURS[kind], "marker": "o", "markersize": 3}
        axes.plot(layers, values, label=f"simplified_{kind}{settings.depth}, {when} training", **style)
        numbers[f"{kind} {when} training"] = values
    for when in WHEN:
        plain, residual = (np.array(found[kind, when]) for kind in ("plain", "resnet"))
        ahead = int((residual > plain).sum())
        lines.append(
            f"{when.capitalize()} training σ is larger in the residual network at {ahead} of {len(layers)} layers: "
            f"{residual[0]:.3f} against {plain[0]:.3f} at layer 1, {residual[-2]:.3f} against {plain[-2]:.3f} at layer "
            f"{layers[-2]}; means {residual.mean():.3f} and {plain.mean():.3f}."
        )
    lines.append(
        "Paper (depth 20, CIFAR-10, 200 epochs): larger at all layers; on average over training 1.24 times at layer 1 "
        "and 4.06 times at layer 18; both fall as training goes on."
    )
    dress(axes, x="layer", y="σ: share of channels (Eq. 13)", title="")
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, settings.depth, 4))
    legend(axes)
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
