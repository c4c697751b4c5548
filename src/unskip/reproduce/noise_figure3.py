"""Yu and Tomasi 2019, arXiv:1905.10944, Figure 3 (section 5): layer cushions of trained simplified networks.

The cushion of a sample is ‖A x‖ / (‖A‖ ‖x‖). For residual networks the paper puts the plain weights t = T(r), identity
included, into ‖A x‖, and the residual weights r, without it, into ‖A‖. Here it is beside the measure that has the same
matrix in both places.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._core.drawing import FAINT, PLAIN, RESIDUAL, dress, legend, panels
from unskip.data.sets import DataSet
from unskip.measures.cushion import layer_cushion
from unskip.models import create_model
from unskip.models.simplified import OneLayerBlock, simplified_blocks
from unskip.reproduce.images import DataPath, Dataset, load_set, sample_images
from unskip.reproduce.registry import SEED, Outcome, Settings, between, one_of, reproduction
from unskip.train.recipe import Recipe

MEASURES = {"own": "paper's measure", "same": "one matrix"}
COLOURS = {"plain": PLAIN, "resnet": RESIDUAL}
Cushions = list[dict[str, NDArray[np.float32]]]  # by block and measure, one number for each sample


@dataclass(frozen=True, kw_only=True)
class TrainedPair(Settings):
    """What can be set about a trained simplified plain network and a trained simplified ResNet."""

    plain: Annotated[Path | None, "weights of a trained simplified plain network (safetensors); none: train one"] = None
    residual: Annotated[Path | None, "weights of a trained simplified ResNet (safetensors); none: train one"] = None
    depth: Annotated[int, "layers of both networks: 20, 32 or 44", one_of(20, 32, 44)] = 20
    dataset: Dataset = "digits"
    data: DataPath = None
    size: Annotated[int, "side in px that images are brought to; 0: as they come", between(0, 1024)] = 0
    epochs: Annotated[int, "epochs of training, where no weights are given", between(1, 1_000_000)] = 20
    seed: Annotated[int, "seed of training, where no weights are given", SEED] = 0


@dataclass(frozen=True, kw_only=True)
class Figure3(TrainedPair):
    """What can be set."""

    layer: Annotated[int, "the layer of the histogram, counted from the stem as 1"] = 10
    images: Annotated[int, "test images", between(2, 1_000_000)] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.layer < self.depth:
            raise ValueError(f"reproduce: layer={self.layer} must be a block, 2 to {self.depth - 1}.")


def trained(name: str, weights: Path | None, data: DataSet, settings: TrainedPair) -> tuple[nn.Module, str]:
    """The model with its trained weights, and where these come from in words."""
    if weights is None:
        from unskip.train import run  # Accelerate takes seconds to import

        recipe = Recipe.of(
            model=name, dataset=settings.dataset, image_size=settings.size, epochs=settings.epochs, batch=32, lr=0.01,
            weight_decay=1e-4, decay_all=True, val_fraction=0.0, seed=settings.seed, device="cpu",
        )  # fmt: skip
        torch.manual_seed(settings.seed)
        model = create_model(name, num_classes=data.classes, in_chans=data.channels)
        with tempfile.TemporaryDirectory() as folder:
            result = run(recipe, model=model, data=data, out=Path(folder) / name, silent=True)
        return model, f"{settings.epochs} epochs on {data.name}, test error {result.test_error:.1f} %"
    try:
        if not weights.is_file():  # reading a pipe would wait for ever
            raise OSError("it is not a file")
        state = load_file(weights)
        model = create_model(name, num_classes=len(state["fc.weight"]), in_chans=state["conv1.weight"].shape[1])
        model.load_state_dict(state)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"reproduce: {weights} holds no weights of {name}: {why}.") from error
    return model, weights.name


@torch.no_grad()
def cushions(model: nn.Module, x: Tensor) -> Cushions:
    """For each block: cushions of all samples with the block's own weights, and with those of the plain form t.

    `own` has A x of the plain form over the norm of the block's own weights, which for a residual network are r: the
    paper's measure. `same` has t above and below. For a plain network both are the same.
    """
    found: Cushions = []

    def hook(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(block, OneLayerBlock)
        (x,) = args
        r = block.conv.weight
        t = r if block.skip is None else r + block.rho()
        y = F.conv2d(x, t, None, block.conv.stride, block.conv.padding)
        found.append({"own": layer_cushion(r, x, y).numpy(), "same": layer_cushion(t, x, y).numpy()})

    hooks = [block.register_forward_pre_hook(hook) for block in simplified_blocks(model)]
    try:
        model.eval()(x)
    finally:
        for handle in hooks:
            handle.remove()
    return found


@torch.no_grad()
def error_rate(model: nn.Module, data: DataSet) -> float:
    """In percent, on at most 2,000 test images."""
    count = min(2000, len(data.test))
    chosen = torch.arange(count) * len(data.test) // count
    predictions = model.eval()(sample_images(data, count)).argmax(1)
    return float(100 * (predictions != data.test.labels[chosen]).float().mean())


@reproduction("noise-figure3", settings=Figure3)
def figure3(settings: Figure3) -> Outcome:
    """Histograms at one layer, by the paper's measure and with one matrix in both places; medians at all layers."""
    data = load_set(settings.dataset, settings.data, size=settings.size)
    x = sample_images(data, min(settings.images, len(data.test)))
    depth, layer = settings.depth, settings.layer
    found: dict[str, Cushions] = {}
    medians: dict[tuple[str, str], NDArray[np.float64]] = {}  # by network and measure, one for each block
    numbers: dict[str, Any] = {}
    lines = []
    for kind, weights in (("plain", settings.plain), ("resnet", settings.residual)):
        name = f"simplified_{kind}{depth}"
        model, origin = trained(name, weights, data, settings)
        if x.shape[1] != model.get_submodule("conv1").weight.shape[1]:  # type: ignore[index]
            raise ValueError(f"reproduce: the weights of {weights} are for other images than {data.name} has.")
        blocks = found[kind] = cushions(model, x)
        error = error_rate(model, data)
        lines.append(f"{name} ({origin}): test error {error:.1f} % on {data.name}.")
        numbers[kind] = {"weights": origin, "test_error": error, "median": {}, "quartiles": {}}
        for key in MEASURES:
            medians[kind, key] = np.array([np.median(block[key]) for block in blocks])
            numbers[kind]["median"][key] = medians[kind, key].tolist()
            numbers[kind]["quartiles"][key] = [np.quantile(block[key], (0.25, 0.75)).tolist() for block in blocks]
    title = f"Layer cushions of trained {depth}-layer simplified networks"
    figure, axes = panels(1, 3, size=(10.4, 3.5), title=title)
    formulas = {"own": "paper's measure: ‖t x‖ / ‖r‖ ‖x‖", "same": "one matrix: ‖t x‖ / ‖t‖ ‖x‖"}
    for ax, (key, formula) in zip(axes, formulas.items(), strict=False):
        samples = {kind: blocks[layer - 2][key] for kind, blocks in found.items()}
        bins = np.linspace(0, 1.05 * max(values.max() for values in samples.values()), 60).tolist()
        for kind, colour in COLOURS.items():
            ax.hist(samples[kind], bins=bins, color=colour, alpha=0.6, label=f"simplified_{kind}{depth}")
        dress(ax, x="layer cushion of a sample", y="samples", title=f"layer {layer}, {formula}")
        legend(ax)
    for (key, label), style in zip(MEASURES.items(), ("-", "--"), strict=True):
        plain, residual = medians["plain", key], medians["resnet", key]
        line: dict[str, Any] = {"linestyle": style, "marker": "o", "markersize": 3}
        axes[2].plot(range(2, depth), residual, color=RESIDUAL, label=f"ResNet, {label}", **line)
        if key == "own":
            axes[2].plot(range(2, depth), plain, color=PLAIN, label="plain", **line)
        larger = int((residual > plain).sum())
        numbers[f"layers where the ResNet's median is larger, {label}"] = larger
        lines.append(
            f"{label}: at layer {layer} the median cushion is {residual[layer - 2]:.3f} in the ResNet and "
            f"{plain[layer - 2]:.3f} in the plain network (n = {len(x)} images); the ResNet's is larger at "
            f"{larger} of {len(plain)} layers."
        )
    axes[2].axvline(layer, color=FAINT, linewidth=0.8, linestyle=":")
    dress(axes[2], x="layer", y="median layer cushion", title="all blocks", log_y=True)
    axes[2].set_xticks(range(2, depth, 4))
    legend(axes[2])
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
