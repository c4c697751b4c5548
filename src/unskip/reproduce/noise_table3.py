"""Yu and Tomasi 2019, arXiv:1905.10944, Table 3 and Figure 7 (section C): weights before and after training.

The plain network p from Kaiming's initialisation beside t = T(r), the plain form of a residual network from Hardt and
Ma's. The weights are those of the stem and the blocks, without biases and without the classifier.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from unskip._core.drawing import PLAIN, RESIDUAL, dress, legend, panels
from unskip.measures.weights import LARGE, id_entries
from unskip.models import create_model, to_plain
from unskip.models.simplified import simplified_blocks
from unskip.reproduce.images import load_set
from unskip.reproduce.noise_figure3 import TrainedPair, trained
from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction

COLUMNS = {"p_0": "p_0", "p_e": "p_200", "t_0": "t_0", "t_e": "t_200"}  # ours: the paper's
ROWS = ("mean", "standard deviation", "mass of all weights", f"mass of |weights| >= {LARGE}", "mass of ID entries")
BINS = np.linspace(-1.0, 1.5, 126).tolist()


@dataclass(frozen=True, kw_only=True)
class Table3(TrainedPair):
    """What can be set."""


def weights_of(plain: nn.Module) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All weights of convolutions of a plain simplified network, and the ID entries of its blocks."""
    convs = [m.weight.detach().double() for m in plain.modules() if isinstance(m, nn.Conv2d)]
    identity = [id_entries(block.conv.weight.detach().double()) for block in simplified_blocks(plain)]
    return torch.cat([w.flatten() for w in convs]).numpy(), torch.cat(identity).numpy()


def statistics_of(plain: nn.Module) -> dict[str, float]:
    """The rows of Table 3."""
    weights, identity = weights_of(plain)
    size = np.abs(weights)
    values = (weights.mean(), weights.std(), size.sum(), size[size >= LARGE].sum(), np.abs(identity).sum())
    return dict(zip(ROWS, map(float, values), strict=True))


@reproduction("noise-table3", settings=Table3)
def table3(settings: Table3) -> Outcome:
    """The statistics of Table 3 beside the paper's, and the histograms of Figure 7."""
    data = load_set(settings.dataset, settings.data, size=settings.size)
    models: dict[str, nn.Module] = {}
    origins = {}
    for kind, weights, start, end in (
        ("plain", settings.plain, "p_0", "p_e"),
        ("resnet", settings.residual, "t_0", "t_e"),
    ):
        name = f"simplified_{kind}{settings.depth}"
        torch.manual_seed(settings.seed)
        untrained = create_model(name, num_classes=data.classes, in_chans=data.channels)
        model, origins[kind] = trained(name, weights, data, settings)
        models |= (
            {start: untrained, end: model} if kind == "plain" else {start: to_plain(untrained), end: to_plain(model)}
        )
    numbers: dict[str, Any] = {"weights": origins}
    numbers |= {column: statistics_of(model) for column, model in models.items()}
    printed = paper_table("noise_stability", "3")
    lines = [f"Depth {settings.depth}; plain: {origins['plain']}; residual: {origins['resnet']}. Paper: depth 32."]
    for row, paper in zip(ROWS, printed.rows, strict=True):
        cells = (f"{column} {numbers[column][row]:.4g} (paper {paper[COLUMNS[column]]})" for column in COLUMNS)
        lines.append(f"{row}: {', '.join(cells)}.")
    after, before = numbers["t_e"], numbers["t_0"]
    lines.append(
        f"After training the ID entries hold {100 * after[ROWS[4]] / after[ROWS[3]]:.0f} % of the mass of the large "
        f"weights of t (before: {100 * before[ROWS[4]] / before[ROWS[3]]:.0f} %), and "
        f"{100 * numbers['p_e'][ROWS[4]] / numbers['p_e'][ROWS[3]]:.0f} % of p's; paper: 76 and 10 %."
    )
    figure, axes = panels(2, 2, size=(9.2, 5.6), title=f"Weights of {settings.depth}-layer simplified networks")
    for ax, when, (p, t) in zip(axes, ("before", "after"), (("p_0", "t_0"), ("p_e", "t_e")), strict=False):
        for name, colour in ((p, PLAIN), (t, RESIDUAL)):
            ax.hist(weights_of(models[name])[0], bins=BINS, color=colour, alpha=0.6, label=name)
        dress(ax, x="weight", y="weights", title=f"all weights, {when} training")
        ax.set_ylim(0, 800)
        legend(ax)
    for ax, when, t in zip(axes[2:], ("before", "after"), ("t_0", "t_e"), strict=True):
        ax.hist(weights_of(models[t])[1], bins=BINS, color=RESIDUAL, alpha=0.6, label=t)
        dress(ax, x="weight", y="ID entries", title=f"ID entries of t, {when} training")
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
