"""Zhang et al. 2024, arXiv:2402.08645, Figure 1: where networks lose their input, at initialisation.

The paper scores layers by DISTS, the perceptual distance to the input image, which needs VGG-16's weights. Here two
measures need none: `noise_to_signal`, whether a trifle of noise looks like another image, and `recovery`, how much of
the image can be read off a layer. `--dists` adds the paper's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models import vgg19_bn

from unskip._core.drawing import FAINT, OTHER, PLAIN, PNNH, RESIDUAL, dress, panels
from unskip.measures import noise_to_signal, record_outputs, recovery
from unskip.measures.dissipation import NOISE, downscaled, sketch
from unskip.measures.dists import SAMPLES, as_image, dissimilarity, image_size
from unskip.models.cifar import cifar_resnet
from unskip.reproduce.images import DataPath, Dataset, load_set, sample_images
from unskip.reproduce.registry import Limit, Outcome, Settings, between, reproduction
from unskip.surgery import plainify

LOST = 0.5  # noise_to_signal above which we call the input lost
DEPTHS = Limit(range(8, 10_000, 6).__contains__, "6N + 2, for instance 20, 56 or 110")
AXES = {  # by measure: the label of its axis, the title of its panel
    "noise_to_signal": ("near/far (1: the input is lost)", "told apart from noise?"),
    "recovery": ("R² of the coarse image, read off the layer", "still readable?"),
    "dists": ("DISTS to the image", "looks like the image?"),
}


@dataclass(frozen=True, kw_only=True)
class Figure1(Settings):
    """What can be set."""

    depth: Annotated[int, "layers of the ResNet that is taken as it is, plain and as PNNH: 6N + 2", DEPTHS] = 56
    images: Annotated[int, "test images, at least 16", between(16, 1_000_000, "; fewer say nothing about recovery")] = (
        128
    )
    seeds: Annotated[int, "initialisations of each network", between(1, 1000)] = 3
    dataset: Dataset = "digits"
    data: DataPath = None
    dists: Annotated[bool, "DISTS too; needs torchmetrics, and downloads VGG-16's weights where they are not there"] = (
        False
    )


def networks(depth: int) -> dict[str, tuple[Callable[[], nn.Module], str]]:
    """How each network is built, and its colour."""
    return {
        "VGG-19 (plain, BatchNorm)": (lambda: vgg19_bn(num_classes=10), OTHER),
        f"plain, {depth} layers": (lambda: plainify(cifar_resnet(depth), "plain"), PLAIN),
        f"ResNet-{depth}": (lambda: cifar_resnet(depth), RESIDUAL),
        f"PNNH, {depth} layers": (lambda: plainify(cifar_resnet(depth), "pnnh"), PNNH),
    }


def outputs(model: nn.Module) -> list[tuple[int, str]]:
    """(depth, module path) after each activation of a VGG, and after stem and blocks of a CIFAR network."""
    features = getattr(model, "features", None)
    if isinstance(features, nn.Sequential):
        paths = [f"features.{i}" for i, module in enumerate(features) if isinstance(module, nn.ReLU)]
        return list(enumerate(paths, start=1))
    blocks = [f"layer{s}.{i}" for s in (1, 2, 3) for i in range(len(model.get_submodule(f"layer{s}")))]  # type: ignore[arg-type]
    return [(1, "act1"), *((3 + 2 * i, path) for i, path in enumerate(blocks))]


def losses(
    model: nn.Module, x: Tensor, noisy: Tensor, *, dists: bool = False
) -> tuple[list[int], dict[str, list[float]]]:
    """Depths and, at each output, the measures by name; BatchNorm with the statistics of the batch."""
    depths, paths = zip(*outputs(model), strict=True)
    clean, other = (record_outputs(model.train(), paths, images) for images in (x, noisy))
    target = downscaled(x)
    found = {
        "noise_to_signal": [noise_to_signal(clean[path], other[path]) for path in paths],
        "recovery": [recovery(sketch(clean[path].flatten(1), seed=0), target) for path in paths],
    }
    if dists:
        found["dists"] = perceptual([clean[path] for path in paths], x)
    return list(depths), found


def perceptual(layers: list[Tensor], images: Tensor) -> list[float]:
    """Mean DISTS between each layer's feature maps, as grey pictures, and the images, over a few of them.

    All layers in one call, since each call loads VGG-16.
    """
    size, count = image_size(images), len(images[:SAMPLES])
    shown = torch.cat([as_image(features[:SAMPLES], 1, size) for features in layers])
    try:
        scores = dissimilarity(shown, as_image(images[:SAMPLES], 1, size).repeat(len(layers), 1, 1, 1))
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"pnnh-figure1: --dists needs torchmetrics and the weights of VGG-16, and something is missing: {reason}. "
            "Leave it out; the other two measures need neither."
        ) from error
    return scores.view(len(layers), count).mean(1).tolist()


@reproduction("pnnh-figure1", settings=Figure1)
def figure1(settings: Figure1) -> Outcome:
    """noise_to_signal and recovery against depth, one line for each network, bands over initialisations."""
    data = load_set(settings.dataset, settings.data)
    x = sample_images(data, settings.images, channels=3)
    possible = recovery(sketch(x.flatten(1), seed=0), downscaled(x))
    name = settings.data.stem if settings.data is not None and settings.dataset == "npz" else data.name
    title = f"Where the input is lost, at initialisation ({settings.images} test images of {name})"
    measures = [measure for measure in AXES if settings.dists or measure != "dists"]
    figure, axes = panels(1, len(measures), size=(4.6 * len(measures), 4.0), title=title)
    for ax, measure in zip(axes, measures, strict=True):
        y, question = AXES[measure]
        dress(ax, x="layers passed", y=y, title=question, log_y=measure == "noise_to_signal")
    small: dict[str, Any] = {"fontsize": 7.5, "color": FAINT}
    numbers: dict[str, object] = {"recovery from the images themselves": possible}
    if settings.dists:  # first, so that what is missing is said before the work
        (level,) = perceptual([torch.rand(x.shape, generator=torch.Generator().manual_seed(0))], x)
        numbers["DISTS of noise"] = level
        axes[2].axhline(level, color=FAINT, linestyle=":", linewidth=1)
        axes[2].text(1, level, "noise", va="bottom", **small)
    lines = []
    for label, (build, colour) in networks(settings.depth).items():
        runs = []
        for seed in range(settings.seeds):
            torch.manual_seed(seed)
            model = build()
            depths, found = losses(model, x, x + NOISE * x.std() * torch.randn_like(x), dists=settings.dists)
            runs.append(found)
        numbers[label] = {"depth": depths} | {measure: [run[measure] for run in runs] for measure in measures}
        mean = {}
        for ax, measure in zip(axes, measures, strict=True):
            curves = np.array([run[measure] for run in runs])
            mean[measure] = curves.mean(0)
            ax.fill_between(depths, curves.min(0), curves.max(0), color=colour, alpha=0.2, linewidth=0)
            ax.plot(depths, mean[measure], "o-", color=colour, markersize=2.5, linewidth=1.2, label=label)
        lost = [d for d, value in zip(depths, mean["noise_to_signal"], strict=True) if value > LOST]
        lines.append(
            f"{label}: near/far {mean['noise_to_signal'][-1]:.3f} and recovery R² {mean['recovery'][-1]:.2f} at layer "
            f"{depths[-1]} (n = {settings.seeds}); near/far above {LOST} "
            f"{f'from layer {lost[0]}' if lost else 'nowhere'}."
        )
    for ax, level in zip(axes, (1, possible), strict=False):
        ax.axhline(level, color=FAINT, linestyle=":", linewidth=1)
    axes[0].text(1, 1.07, "noise moves an image as far as another image", **small)
    axes[1].text(depths[-1], possible, "from the images themselves", ha="right", va="bottom", **small)
    axes[0].set_ylim(top=2)
    axes[1].set_ylim(-0.03, 1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
