"""DISTS between a layer and the input: the measure by which Zhang et al. 2024, Figure 1, shows inputs dissipate.

Needs torchmetrics (`pip install torchmetrics`) and torchvision's VGG-16 weights, 528 MB, which torchvision downloads on
first use or finds as `vgg16-397923af.pth` in `torch.hub.get_dir()/checkpoints`. Without them, use
`noise_to_signal` and `recovery`, which tell the same story.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import About, Findings

SAMPLES = 8  # of the batch
SIDE = 64  # pixels of the pictures that are compared, at most
AT_ONCE = 256  # pictures in one call, which loads VGG-16 anew

DISSIMILARITY = About(
    name="dists",
    title="Does the layer still look like the input?",
    label="DISTS between the layer, as a picture, and the input",
    healthy="Below the level of noise (the number dists_noise) to the last layer.",
    source="Zhang et al. 2024, section 1, Figure 1",
)


def picture(x: Tensor, axis: int, side: tuple[int, int]) -> Tensor:
    """A feature map as grey pictures between 0 and 1: the mean over channels, each stretched to its full range.

    The paper does not say how it makes a picture of a layer; this keeps what all channels agree on. (B, 3, *side).
    """
    grey = x.detach().float().mean(axis)[:, None]
    grey = F.interpolate(grey, side, mode="bilinear", align_corners=False, antialias=True)
    low, high = grey.amin((1, 2, 3), keepdim=True), grey.amax((1, 2, 3), keepdim=True)
    return ((grey - low) / (high - low).clamp_min(1e-12)).expand(-1, 3, -1, -1)


def side_of(probe_input: Tensor) -> tuple[int, int]:
    return min(SIDE, max(32, probe_input.shape[-2])), min(SIDE, max(32, probe_input.shape[-1]))


def dissimilarity(pictures: Tensor, inputs: Tensor) -> Tensor:
    """DISTS of every pair, (N,); 0 for equal pictures. Raises ImportError or OSError where a part is missing."""
    from torchmetrics.functional.image import deep_image_structure_and_texture_similarity

    parts = [
        torch.as_tensor(deep_image_structure_and_texture_similarity(left, right)).detach().reshape(-1)
        for left, right in zip(pictures.split(AT_ONCE), inputs.split(AT_ONCE), strict=True)
    ]
    return torch.cat(parts)


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> Tensor | None:
    if y.ndim != 4 or layer.sample_axis != 0 or min(y.movedim(layer.unit_axis, 1).shape[2:]) < 2:
        return None
    return picture(y[:SAMPLES], layer.unit_axis, (SIDE, SIDE))[:, :1]


def report(probe: Probe) -> Findings:
    nothing = (DISSIMILARITY.series((), ()),)
    layers = [layer for layer in probe.layers if layer.trunk and layer.kept["dists"] is not None]
    if probe.input is None or probe.input.ndim != 4 or not layers:
        return Findings(series=nothing, notes=("DISTS is not measured: input or layers are no pictures.",))
    side = side_of(probe.input)
    seen = picture(probe.input[:SAMPLES], 1, side)
    noise = torch.rand(seen[:, :1].shape, generator=torch.Generator().manual_seed(probe.seed)).to(seen)
    shown = [F.interpolate(layer.kept["dists"].expand(-1, 3, -1, -1), side) for layer in layers]
    shown.append(noise.expand(-1, 3, -1, -1))
    try:
        scores = dissimilarity(torch.cat(shown), seen.repeat(len(shown), 1, 1, 1)).view(len(shown), -1)
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        return Findings(
            series=nothing,
            notes=(f"DISTS is not measured, since torchmetrics or the weights of VGG-16 are missing: {reason}.",),
        )
    *values, level = scores.mean(1).tolist()
    errors = (scores.std(1) / len(seen) ** 0.5).tolist()[:-1] if len(seen) > 1 else None
    return Findings(
        series=(DISSIMILARITY.series((layer.name for layer in layers), values, errors),), numbers={"dists_noise": level}
    )


FAMILY = Family(name="dists", report=report, forward=forward)
