"""Gradients at initialisation of 50-layer networks, first block over last (Hu, Figure 4, left).

    python benchmarks/seqnet_gradients.py --out benchmarks/records/2026-11-15_seqnet-gradients_cpu [--npz images.npz]

Images: scikit-learn's digits enlarged to 64 px, crops of its two photographs, and those of an .npz file with `x`
(N, H, W, 3; uint8). For each network the gradient norm of every convolution in a block, their geometric mean, and the
ratio of the first block to the last. Then 1,004-layer networks of SeqBasic blocks by initialisation.
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import timm
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.measures import measure
from unskip.models.cifar import cifar_resnet

SIDE, COUNT, SEEDS = 64, 16, 3

NETWORKS = {
    "seqnet50": lambda: unskip.create_model("seqnet50"),
    "resnet50 by method seq": lambda: unskip.plainify(timm.create_model("resnet50"), "seq"),
    "resnet50, norm scales 1": lambda: timm.create_model("resnet50", zero_init_last=False),
    "plain_resnet50": lambda: unskip.create_model("plain_resnet50"),
}


def images(npz: Path | None) -> dict[str, Tensor]:
    digits = torch.tensor(load_digits().images[:COUNT], dtype=torch.float32)[:, None]
    photos = torch.tensor(np.stack(load_sample_images().images), dtype=torch.float32).permute(0, 3, 1, 2)
    photos = F.interpolate(photos, scale_factor=0.5, mode="area")
    tiles = F.unfold(photos, SIDE, stride=SIDE).transpose(1, 2).reshape(-1, 3, SIDE, SIDE)
    found = {
        "digits": F.interpolate(digits, size=(SIDE, SIDE), mode="bilinear").expand(-1, 3, -1, -1),
        "photographs": tiles[torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))[:COUNT]],
    }
    if npz is not None:
        pixels = torch.tensor(np.load(npz)["x"][:COUNT], dtype=torch.float32).permute(0, 3, 1, 2)
        found[npz.stem] = F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear")
    return {name: (x - x.mean()) / x.std() for name, x in found.items()}


def first_over_last(network: nn.Module, x: Tensor, first: str, last: str) -> float:
    """The geometric mean of a block's convolution gradients, of one block over another."""
    series = measure(network, x, torch.arange(len(x)) % 10, families=("gradient",)).series["gradient_norm"]
    norms = dict(zip(series.layers, series.values, strict=True))
    convs = {name for name, m in network.named_modules() if isinstance(m, nn.Conv2d) and "downsample" not in name}
    means = []
    for block in (first, last):
        own = [norm for name, norm in norms.items() if name in convs and name.startswith(f"{block}.")]
        assert own, f"{block} has no convolution"
        means.append(np.mean(np.log(own)))
    if not np.all(np.isfinite(means)):
        return float("inf")
    return float(np.exp(means[0] - means[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--npz", type=Path)
    options = parser.parse_args()
    ratios: dict[str, dict[str, list[float]]] = {}
    for data, x in reversed(images(options.npz).items()):
        for name, build in NETWORKS.items():
            for seed in range(SEEDS):
                torch.manual_seed(seed)
                ratios.setdefault(data, {}).setdefault(name, []).append(
                    first_over_last(build(), x, "layer1.0", "layer4.2")
                )
            print(data, name, ratios[data][name], flush=True)
    deep: dict[str, float] = {}
    for init in ("R", "O", "L"):
        torch.manual_seed(0)
        network = unskip.plainify(cifar_resnet(1004), "seq", init=init)
        deep[init] = first_over_last(network, torch.randn(8, 3, 8, 8), "layer1.0", "layer3.166")
        print("1004 layers", init, deep[init], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
    setting = {"side": SIDE, "images": COUNT, "seeds": SEEDS, "versions": versions}
    result = {"setting": setting, "first_over_last": ratios, "first_over_last_1004_layers": deep}
    (options.out / "gradients.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
