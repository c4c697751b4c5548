"""Yu and Tomasi 2019, arXiv:1905.10944, Figure 3 (section 5): layer cushions of trained simplified networks.

The cushion of a sample is ‖A x‖ / (‖A‖ ‖x‖). For residual networks the paper puts the plain weights t = T(r), identity
included, into ‖A x‖, and the residual weights r, without it, into ‖A‖. Here it is beside the measure that has the same
matrix in both places.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.data.sets import DataSet
from unskip.measures.cushion import layer_cushion
from unskip.models import create_model
from unskip.models.simplified import OneLayerBlock, simplified_blocks
from unskip.reproduce.drawing import FAINT, PLAIN, RESIDUAL, dress, legend, panels
from unskip.reproduce.images import load_set, sample_images
from unskip.reproduce.registry import Outcome, reproduction
from unskip.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Figure3:
    """What can be set."""

    plain: Annotated[Path | None, "weights of a trained simplified plain network (safetensors); none: train one"] = None
    residual: Annotated[Path | None, "weights of a trained simplified ResNet (safetensors); none: train one"] = None
    depth: Annotated[int, "layers of both networks: 20, 32 or 44"] = 20
    layer: Annotated[int, "the layer of the histogram, counted from the stem as 1"] = 10
    images: Annotated[int, "test images"] = 1000
    dataset: Annotated[str, "the data set: digits, cifar10, cifar100, fashion_mnist or npz"] = "digits"
    data: Annotated[Path | None, "where the data set lies; digits are embedded"] = None
    size: Annotated[int, "side in px that images are brought to; 0: as they come"] = 0
    epochs: Annotated[int, "epochs of training, where no weights are given"] = 20
    seed: Annotated[int, "seed of training, where no weights are given"] = 0

    def __post_init__(self) -> None:
        if self.depth not in (20, 32, 44):
            raise ValueError(f"noise-figure3: depth={self.depth} must be 20, 32 or 44.")
        if not 2 <= self.layer < self.depth:
            raise ValueError(f"noise-figure3: layer={self.layer} must be a block, 2 to {self.depth - 1}.")
        if self.images < 2 or self.epochs < 1:
            raise ValueError(
                f"noise-figure3: images={self.images} must be at least 2 and epochs={self.epochs} at least 1."
            )


def trained(name: str, weights: Path | None, data: DataSet, config: Figure3) -> tuple[nn.Module, str]:
    """The network with its trained weights, and a word on where they come from."""
    if weights is None:
        from unskip.train import run  # Accelerate takes seconds to import

        recipe = Recipe.of(
            model=name, dataset=config.dataset, image_size=config.size, epochs=config.epochs, batch=32, lr=0.01,
            weight_decay=1e-4, decay_all=True, val_fraction=0.0, seed=config.seed, device="cpu",
        )  # fmt: skip
        torch.manual_seed(config.seed)
        network = create_model(name, num_classes=data.classes, in_chans=data.channels)
        with tempfile.TemporaryDirectory() as folder:
            result = run(recipe, model=network, data=data, out=Path(folder) / name, silent=True)
        return network, f"{config.epochs} epochs on {data.name}, test error {result.test_error:.1f} %"
    try:
        state = load_file(weights)
        network = create_model(name, num_classes=len(state["fc.weight"]), in_chans=state["conv1.weight"].shape[1])
        network.load_state_dict(state)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"noise-figure3: {weights} holds no weights of {name}: {' '.join(str(error).split())}."
        ) from error
    return network, weights.name


@torch.no_grad()
def cushions(network: nn.Module, x: Tensor) -> list[dict[str, np.ndarray]]:
    """For each block: cushions of all samples with the block's own weights, and with those of the plain form t.

    `own` has A x of the plain form over the norm of the block's own weights, which for a residual network are r: the
    paper's measure. `same` has t above and below. For a plain network both are the same.
    """
    found: list[dict[str, np.ndarray]] = []

    def hook(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(block, OneLayerBlock)
        (x,) = args
        r = block.conv.weight
        t = r if block.skip is None else r + block.rho()
        y = F.conv2d(x, t, None, block.conv.stride, block.conv.padding)
        found.append({"own": layer_cushion(r, x, y).numpy(), "same": layer_cushion(t, x, y).numpy()})

    hooks = [block.register_forward_pre_hook(hook) for block in simplified_blocks(network)]
    try:
        network.eval()(x)
    finally:
        for handle in hooks:
            handle.remove()
    return found


@torch.no_grad()
def error_rate(network: nn.Module, data: DataSet) -> float:
    """In percent, on at most 2,000 test images."""
    count = min(2000, len(data.test))
    chosen = torch.arange(count) * len(data.test) // count
    predictions = network.eval()(sample_images(data, count)).argmax(1)
    return 100 * (predictions != data.test.labels[chosen]).float().mean().item()


@reproduction("noise-figure3", config=Figure3)
def figure3(config: Figure3) -> Outcome:
    """Histograms at one layer, by the paper's measure and with one matrix in both places; medians at all layers."""
    data = load_set(config.dataset, config.data, size=config.size)
    x = sample_images(data, min(config.images, len(data.test)))
    layers = np.arange(2, config.depth)
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    numbers: dict[str, object] = {}
    words = []
    for kind, weights in (("plain", config.plain), ("resnet", config.residual)):
        network, origin = trained(f"simplified_{kind}{config.depth}", weights, data, config)
        if x.shape[1] != network.get_submodule("conv1").weight.shape[1]:  # type: ignore[index]
            raise ValueError(f"noise-figure3: the weights of {weights} are for other images than {data.name} has.")
        found[kind] = cushions(network, x)
        error = error_rate(network, data)
        words.append(f"simplified_{kind}{config.depth} ({origin}): test error {error:.1f} % on {data.name}.")
        numbers[kind] = {
            "weights": origin,
            "test_error": error,
            "median": {key: [float(np.median(block[key])) for block in found[kind]] for key in ("own", "same")},
            "quartiles": {
                key: [np.quantile(block[key], (0.25, 0.75)).tolist() for block in found[kind]]
                for key in ("own", "same")
            },
        }
    figure, axes = panels(
        1, 3, size=(10.4, 3.5), title=f"Layer cushions of trained {config.depth}-layer simplified networks"
    )
    index = config.layer - 2
    variants = (
        ("own", f"layer {config.layer}, paper's measure: ‖t x‖ / ‖r‖ ‖x‖"),
        ("same", f"layer {config.layer}, one matrix: ‖t x‖ / ‖t‖ ‖x‖"),
    )
    for ax, (key, title) in zip(axes, variants, strict=False):
        values = {kind: found[kind][index][key] for kind in found}
        bins = np.linspace(0, 1.05 * max(v.max() for v in values.values()), 60)
        for kind, colour in (("plain", PLAIN), ("resnet", RESIDUAL)):
            ax.hist(values[kind], bins=bins.tolist(), color=colour, alpha=0.6, label=f"simplified_{kind}{config.depth}")
        dress(ax, x="layer cushion of a sample", y="samples", title=title)
        legend(ax)
    lines = list(words)
    for key, style, label in (("own", "-", "paper's measure"), ("same", "--", "one matrix")):
        medians = {kind: np.array([np.median(block[key]) for block in found[kind]]) for kind in found}
        axes[2].plot(
            layers, medians["resnet"], style, color=RESIDUAL, marker="o", markersize=3, label=f"ResNet, {label}"
        )
        if key == "own":
            axes[2].plot(layers, medians["plain"], "-", color=PLAIN, marker="o", markersize=3, label="plain")
        larger = int((medians["resnet"] > medians["plain"]).sum())
        numbers[f"layers where the ResNet's median is larger, {label}"] = larger
        lines.append(
            f"{label}: at layer {config.layer} the median cushion is {medians['resnet'][index]:.3f} in the ResNet and "
            f"{medians['plain'][index]:.3f} in the plain network (n = {len(x)} images); the ResNet's is larger at "
            f"{larger} of {len(layers)} layers."
        )
    axes[2].axvline(config.layer, color=FAINT, linewidth=0.8, linestyle=":")
    dress(axes[2], x="layer", y="median layer cushion", title="all blocks", log_y=True)
    axes[2].set_xticks(range(2, config.depth, 4))
    legend(axes[2])
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
