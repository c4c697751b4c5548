"""DISTS between a layer and the input, the measure of Zhang et al. 2024, Figure 1.

Needs torchmetrics (`pip install torchmetrics`) and torchvision's VGG-16 weights, 528 MB, which torchvision downloads on
first use or finds as `vgg16-397923af.pth` in `torch.hub.get_dir()/checkpoints`. `noise_to_signal` and `recovery` show
the same effect without them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Findings, mean_with_error, measures_of

SAMPLES = 8  # of the batch
MAX_SIDE = 64  # pixels of the images that are compared
CALL_SIZE = 256  # images per call, because each call loads VGG-16 again


def as_image(x: Tensor, axis: int, size: tuple[int, int]) -> Tensor:
    """A feature map as grey images, (B, 3, *size): the mean over channels, each image scaled to the range 0 to 1.

    The paper does not say how it turns a layer into an image. The mean keeps what all channels have in common.
    """
    grey = x.detach().float().mean(axis)[:, None]
    grey = F.interpolate(grey, size, mode="bilinear", align_corners=False, antialias=True)
    low, high = grey.amin((1, 2, 3), keepdim=True), grey.amax((1, 2, 3), keepdim=True)
    return ((grey - low) / (high - low).clamp_min(1e-12)).expand(-1, 3, -1, -1)


def image_size(images: Tensor) -> tuple[int, int]:
    """The size at which images are compared: 32 to MAX_SIDE pixels a side."""
    return min(MAX_SIDE, max(32, images.shape[-2])), min(MAX_SIDE, max(32, images.shape[-1]))


def dissimilarity(images: Tensor, inputs: Tensor) -> Tensor:
    """DISTS of every pair, (N,); 0 for equal images. Raises ImportError or OSError if a dependency is missing."""
    from torchmetrics.functional.image import deep_image_structure_and_texture_similarity

    parts = [
        torch.as_tensor(deep_image_structure_and_texture_similarity(left, right)).detach().reshape(-1)
        for left, right in zip(torch.split(images, CALL_SIZE), torch.split(inputs, CALL_SIZE), strict=True)
    ]
    return torch.cat(parts)


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> dict[str, Tensor] | None:
    if y.ndim != 4 or layer.sample_axis != 0 or min(y.movedim(layer.unit_axis, 1).shape[2:]) < 2:
        return None
    return {"image": as_image(y[:SAMPLES], layer.unit_axis, (MAX_SIDE, MAX_SIDE))[:, :1]}


def report(probe: Probe) -> Findings:
    layers = {layer: image for layer, image in probe.values("image").items() if layer.trunk}
    if probe.input is None or probe.input.ndim != 4 or not layers:
        return Findings(notes=("DISTS is not measured: the input or the layers are not images.",))
    size = image_size(probe.input)
    inputs = as_image(probe.input[:SAMPLES], 1, size)
    noise = torch.rand(inputs[:, :1].shape, generator=torch.Generator().manual_seed(probe.seed)).to(inputs)
    images = [F.interpolate(image.expand(-1, 3, -1, -1), size) for image in layers.values()]
    images.append(noise.expand(-1, 3, -1, -1))
    try:
        scores = dissimilarity(torch.cat(images), inputs.repeat(len(images), 1, 1, 1)).view(len(images), -1)
    except (ImportError, OSError, RuntimeError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        note = f"DISTS is not measured, because torchmetrics or the VGG-16 weights are missing: {why}."
        return Findings(notes=(note,))
    for layer, score in zip(layers, scores, strict=False):  # the last score is that of noise
        layer.values["dists"] = mean_with_error(score)
    return Findings(numbers={"dists_noise": scores[-1].mean().item()})


FAMILY = Family(name="dists", measures=measures_of("dists"), forward=forward, report=report)
