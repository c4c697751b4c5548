"""How much of an image 110 layers still know at initialisation, by method and option (docs/pnnh.md).

    python benchmarks/dissipation.py OUT [--cifar SPRITE] [--seeds 3]

near/far at the last block: the distance of an image to its copy with 1 % noise over the distance between two images,
medians over 32 images, BatchNorm in training mode. SPRITE is a picture of 32 px tiles, 100 in a row.
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

import unskip
from unskip.measures import noise_to_signal, record_outputs
from unskip.models.cifar import cifar_resnet

IMAGES = 32
NETWORKS = {
    "residual": lambda: cifar_resnet(110),
    "plain": lambda: unskip.plainify(cifar_resnet(110), "plain"),
    "pnnh (default)": lambda: unskip.plainify(cifar_resnet(110)),
    "pnnh, identity": lambda: unskip.plainify(cifar_resnet(110), pretext="identity"),
    "pnnh, whole transitions": lambda: unskip.plainify(cifar_resnet(110), transition="whole"),
    "pnnh, scale 1": lambda: unskip.plainify(cifar_resnet(110), scale=1.0),
    "pnnh, scale 1, whole transitions": lambda: unskip.plainify(cifar_resnet(110), scale=1.0, transition="whole"),
    "pnnh, second norm": lambda: unskip.plainify(cifar_resnet(110), norm="both"),
    "pnnh_paper": lambda: unskip.plainify(cifar_resnet(110), "pnnh_paper"),
}


def standardised(images: Tensor) -> Tensor:
    return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    digits = torch.tensor(load_digits().images[:IMAGES], dtype=torch.float32)[:, None]
    digits = F.interpolate(digits, 32, mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    sets = {"random": None, "digits": standardised(digits)}
    if arguments.cifar:
        row = np.asarray(Image.open(arguments.cifar))[:32, : 32 * IMAGES].copy()
        sets["cifar10"] = standardised(torch.tensor(row).view(32, IMAGES, 32, 3).permute(1, 3, 0, 2).float())
    results: dict[str, dict[str, list[float]]] = {}
    for name, build in NETWORKS.items():
        for seed in range(arguments.seeds):
            torch.manual_seed(seed)
            network = build().train()
            for label, images in sets.items():
                x = torch.randn(IMAGES, 3, 32, 32) if images is None else images
                noisy = x + 0.01 * x.std() * torch.randn_like(x)
                features = record_outputs(network, ["layer3.17"], torch.cat([x, noisy]))["layer3.17"]
                ratio = round(noise_to_signal(*features.chunk(2)), 3)
                results.setdefault(name, {}).setdefault(label, []).append(ratio)
        print(name, results[name], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "python": platform.python_version(), "images": IMAGES, "noise": 0.01}
    (arguments.out / "noise_to_signal.json").write_text(
        json.dumps({"about": about, "noise_to_signal": results}, indent=1)
    )


if __name__ == "__main__":
    main()
