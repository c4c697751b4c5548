"""Hu, Figure 1 (right), sections 2.2 and C.2: BatchNorm's running variance by layer.

σ = √(mean of a layer's running variances), of a plain and a residual network, before and after training. The paper's
is of VGG-19 trained on ImageNet: its claim is that the weights of shallow layers, which get the largest gradients at
first, grow until BatchNorm's 1/σ cancels the growth. σ before training is that of one batch of training images.
"""

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unskip._core.drawing import PLAIN, RESIDUAL, dress, legend, panels
from unskip.data.sets import DataSet
from unskip.models import create_model
from unskip.reproduce.images import DataPath, Dataset, load_set, sample_images
from unskip.reproduce.registry import Outcome, Settings, between, reproduction


@dataclass(frozen=True, kw_only=True)
class RunningVariance(Settings):
    """What can be set."""

    plain: Annotated[str, "a plain network with BatchNorm, by name"] = "plain_resnet20"
    residual: Annotated[str, "a residual network with BatchNorm, by name"] = "resnet20"
    dataset: Dataset = "digits"
    data: DataPath = None
    epochs: Annotated[int, "epochs of training", between(1, 1_000_000)] = 20
    lr: Annotated[float, "peak learning rate", between(1e-12, 100)] = 0.05
    seeds: Annotated[int, "runs of each network", between(1, 1000)] = 3


def deviations(model: nn.Module) -> list[float]:
    """√(mean running variance) of each BatchNorm, in order of execution for networks that are built in order."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_var is not None]
    return [norm.running_var.double().mean().sqrt().item() for norm in norms]  # type: ignore[union-attr]


@torch.no_grad()
def at_start(model: nn.Module, x: Tensor) -> list[float]:
    """The same of an untrained network: the statistics of one batch."""
    model = copy.deepcopy(model).train()
    for norm in (m for m in model.modules() if isinstance(m, _BatchNorm)):
        norm.momentum = 1.0
    model(x)
    return deviations(model)


def slope(values: NDArray[np.float64]) -> float:
    """The slope of ln σ over the layers: negative if σ grows from the last layer to the first."""
    return float(np.polyfit(np.arange(len(values)), np.log(values), 1)[0])


def train_one(name: str, data: DataSet, settings: RunningVariance, seed: int) -> dict[str, Any]:
    """σ before and after training, and the test error."""
    from unskip.train import run  # Accelerate takes seconds to import
    from unskip.train.recipe import load_recipe

    recipe = load_recipe(
        "digits-pnnh-56", model=name, method="", dataset=settings.dataset, epochs=settings.epochs, lr=settings.lr,
        warmup_epochs=min(1.0, settings.epochs), val_fraction=0.0, seed=seed, device="cpu",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = create_model(name, num_classes=data.classes, in_chans=data.channels)
    before = at_start(model, sample_images(data, min(256, len(data.test))))
    with tempfile.TemporaryDirectory() as folder:
        result = run(recipe, model=model, data=data, out=Path(folder) / "run", silent=True)
    return {"before": before, "after": deviations(model), "test_error": result.test_error}


@reproduction("seqnet-running-variance", settings=RunningVariance)
def running_variance(settings: RunningVariance) -> Outcome:
    """σ against layer for both networks, before and after training."""
    data = load_set(settings.dataset, settings.data)
    figure, axes = panels(1, 2, size=(8.8, 3.6), title=f"BatchNorm's running variance by layer ({data.name})")
    numbers: dict[str, Any] = {}
    lines = []
    for name, colour in ((settings.plain, PLAIN), (settings.residual, RESIDUAL)):
        runs = [train_one(name, data, settings, seed) for seed in range(settings.seeds)]
        numbers[name] = runs
        slopes = {}
        for ax, when in zip(axes, ("before", "after"), strict=True):
            curves = np.array([run[when] for run in runs])
            layers = np.arange(1, curves.shape[1] + 1)
            ax.fill_between(layers, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0)
            ax.plot(layers, curves.mean(0), "o-", color=colour, markersize=3, linewidth=1.2, label=name)
            slopes[when] = [slope(curve) for curve in curves]
        ends = [run["after"][0] / run["after"][-1] for run in runs]
        errors = ", ".join(f"{run['test_error']:.1f}" for run in runs)
        lines.append(
            f"{name} (test error {errors} %): slope of ln σ over layers {np.mean(slopes['before']):+.3f} before and "
            f"{np.mean(slopes['after']):+.3f} after training ({min(slopes['after']):+.3f} to "
            f"{max(slopes['after']):+.3f}, n = {settings.seeds}); first over last layer {np.mean(ends):.2f} after."
        )
    lines.append("Paper, VGG-19 on ImageNet, trained: σ grows from the last layer to the first, roughly exponentially.")
    for ax, when in zip(axes, ("before", "after"), strict=True):
        dress(ax, x="layer (1 is next to the input)", y="σ", title=f"{when} training", log_y=True)
        legend(ax)
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
