"""Which internal path suits MobileNet-V2, whose blocks have linear, signed outputs? Trained from scratch at 64 px.

    python benchmarks/mobilenet_signs.py DATA OUT [--epochs 30] [--seeds 2] [--at-once 4]

DATA holds imagenette64 as one JPEG sprite per split (100 tiles a row, 64 px) with labels.npz; `digits` as DATA takes
scikit-learn's instead, enlarged, for a machine without a GPU. SGD 0.1, momentum 0.9, cosine with one epoch of warm-up,
weight decay 4e-5, batch 128 (digits: 64), random crop, and a flip for photographs; bfloat16 autocast on a GPU. A tenth
of the training images, stratified, is held out for choosing; the test set is evaluated once, at the end.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, multiprocessing, nn
from torch.nn import functional as F

import unskip

VARIANTS = {
    "residual": lambda: timm.create_model("mobilenetv2_100", num_classes=10),
    "plain": lambda: unskip.create_model("plain_mobilenetv2", num_classes=10),
    **{
        f"pnnh {signed} {transition}": lambda signed=signed, transition=transition: unskip.create_model(
            "pnnh_mobilenetv2", num_classes=10, signed=signed, transition=transition
        )
        for signed in ("paired", "rectify")
        for transition in ("coded", "whole")
    },
}


def split(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """uint8 images (N, 3, 64, 64) and labels of the 'train' or the 'val' split."""
    if str(folder) == "digits":
        digits = load_digits()
        chosen = (
            torch.arange(len(digits.target)) % 5 != 4 if name == "train" else torch.arange(len(digits.target)) % 5 == 4
        )
        images = torch.tensor(digits.images, dtype=torch.float32)[chosen][:, None] * (255 / 16)
        images = F.interpolate(images, 64, mode="bilinear", align_corners=False)
        return images.round().to(torch.uint8).repeat(1, 3, 1, 1), torch.tensor(digits.target)[chosen].long()
    labels = torch.tensor(np.load(folder / "labels.npz")[f"y_{name}"]).long()
    sprite = np.asarray(Image.open(folder / f"{name}.jpg"))
    rows, side = sprite.shape[0] // 64, 64
    tiles = sprite.reshape(rows, side, 100, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)[: len(labels)]
    return torch.tensor(tiles.copy()).permute(0, 3, 1, 2), labels


def prepare(x: Tensor) -> Tensor:
    return (x.float() / 255 - 0.45) / 0.28


def augment(x: Tensor, mirror: bool) -> Tensor:
    """Random crop after 8 px of padding, and a mirror image half of the time."""
    n, channels, side, _ = x.shape
    x = F.pad(prepare(x), (8,) * 4)
    pixel = torch.arange(side, device=x.device)
    top, left = torch.randint(0, 17, (2, n, 1), device=x.device)
    flip = mirror & (torch.rand(n, 1, device=x.device) < 0.5)
    rows = (top + pixel)[:, None, :, None]
    columns = (left + torch.where(flip, side - 1 - pixel, pixel))[:, None, None, :]
    image = torch.arange(n, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[None, :, None, None]
    return x[image, channel, rows, columns]


@torch.no_grad()
def error(network: nn.Module, x: Tensor, y: Tensor) -> float:
    network.eval()
    wrong = 0
    for images, labels in zip(x.split(500), y.split(500), strict=True):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            wrong += (network(prepare(images)).argmax(1) != labels).sum().item()
    network.train()
    return 100 * wrong / len(y)


def train(name: str, seed: int, data: Path, out: Path, epochs: int) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = (t.to(device) for t in split(data, "train"))
    x_test, y_test = (t.to(device) for t in split(data, "val"))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).to(device)
    held = torch.cat([order[y[order] == c][: len(y) // 100] for c in range(10)])
    rest = order[~torch.isin(order, held)]
    x_val, y_val, x, y = x[held], y[held], x[rest], y[rest]

    network = VARIANTS[name]().to(device).train()
    groups = unskip.param_groups(network, 4e-5)
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    photographs = str(data) != "digits"
    size = 128 if photographs else 64
    steps = len(y) // size
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=steps)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, (epochs - 1) * steps)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [steps])
    start, curve = time.time(), []
    for _ in range(epochs):
        shuffled = torch.randperm(len(y), device=device)
        total = 0.0
        for i in range(steps):
            batch = shuffled[i * size : (i + 1) * size]
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = F.cross_entropy(network(augment(x[batch], photographs)), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        curve.append([round(float(total) / steps, 4), error(network, x_val, y_val)])
    result = {
        "variant": name,
        "seed": seed,
        "epochs": epochs,
        "trained_parameters": sum(p.numel() for p in network.parameters()),
        "validation_error": curve[-1][1],
        "test_error": error(network, x_test, y_test),
        "loss_and_validation_error": curve,
        "seconds": round(time.time() - start, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "timm": timm.__version__},
    }
    (out / f"{name.replace(' ', '_')}-{seed}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=4, help="networks in training at the same time")
    arguments = parser.parse_args()
    parts = arguments.out / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    jobs = [
        (name, seed, arguments.data, parts, arguments.epochs) for seed in range(arguments.seeds) for name in VARIANTS
    ]
    with context.Pool(arguments.at_once, maxtasksperchild=1) as pool:
        pool.starmap(train, jobs, chunksize=1)
    results = [json.loads(file.read_text()) for file in sorted(parts.glob("*.json"))]
    (arguments.out / "mobilenet_signs.json").write_text(json.dumps(results, indent=1))
    for name in VARIANTS:
        rows = [r for r in results if r["variant"] == name]
        errors = [r["validation_error"] for r in rows]
        params = rows[0]["trained_parameters"] / 1e6 if rows else float("nan")
        print(f"{name:22s} {params:6.3f} M  validation error {errors}  seconds {[r['seconds'] for r in rows]}")


if __name__ == "__main__":
    main()
