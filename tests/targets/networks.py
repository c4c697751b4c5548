"""The networks that targets are tested on, and their images. Trained ones are in a folder beside the checkout."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

import unskip
from unskip.models.cifar import PadShortcut, cifar_resnet

HERE = Path(__file__).resolve().parents[2]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # akamaster's, ImageNet's


def shared(name: str) -> Path:
    """A file of real data; without it the test is skipped."""
    path = Path(os.environ.get("UNSKIP_SHARED_DATA", HERE.parent / "shared" / "data")) / name
    if not path.exists():
        pytest.skip(f"{name} is not there; UNSKIP_SHARED_DATA names the folder")
    return path


def cifar10(part: str, count: int) -> tuple[Tensor, Tensor]:
    """Images from 0 to 1, and their classes: of 'train' the first batch."""
    file = {"train": "data_batch_1.jpg", "test": "test_batch.jpg"}[part]
    sprite = np.asarray(Image.open(shared(f"cifar10/{file}")))
    tiles = sprite.reshape(100, 32, 100, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)[:count]
    labels = np.load(shared("cifar10/labels.npz"))[f"y_{part}"][:count]
    images = torch.from_numpy(tiles.copy()).permute(0, 3, 1, 2).float() / 255
    return images.contiguous(), torch.from_numpy(labels).long()


def normalised(images: Tensor, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """Images as a network was trained on them."""
    return (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def mlperf_resnet8() -> nn.Module:
    """MLPerf Tiny's trained ResNet-8 for images from 0 to 1 (it is trained on 0 to 255, so the first kernel grows).

    Keras pads a stride of two on one side; here its kernels are 5 x 5 with zeros instead.
    """
    stored = np.load(shared("trained/mlperf_tiny_resnet8.npz"))

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(stored[name])

    def conv(name: str, stride: int = 1) -> nn.Conv2d:
        kernel = tensor(f"{name}/kernel").permute(3, 2, 0, 1)
        if stride == 2 and kernel.shape[-1] == 3:
            kernel = nn.functional.pad(kernel, (2, 0, 2, 0))
        layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[2], stride, kernel.shape[2] // 2)
        layer.weight.data, layer.bias.data = kernel.contiguous(), tensor(f"{name}/bias")  # type: ignore[union-attr]
        return layer

    def norm(i: int) -> nn.BatchNorm2d:
        name = "batch_normalization" + (f"_{i}" if i else "")
        layer = nn.BatchNorm2d(len(stored[f"{name}/gamma"]), eps=1e-3)
        layer.weight.data, layer.bias.data = tensor(f"{name}/gamma"), tensor(f"{name}/beta")
        layer.running_mean, layer.running_var = tensor(f"{name}/moving_mean"), tensor(f"{name}/moving_variance")
        return layer

    def block(first: int, norms: int, stride: int = 1) -> BasicBlock:
        names = [f"conv2d_{first + i}" for i in range(3)]
        shape = stored[f"{names[0]}/kernel"].shape
        shortcut = nn.Sequential(conv(names[2], stride)) if stride == 2 else None
        made = BasicBlock(shape[2], shape[3], stride, downsample=shortcut)
        made.conv1, made.bn1, made.conv2, made.bn2 = (
            conv(names[0], stride),
            norm(norms),
            conv(names[1]),
            norm(norms + 1),
        )
        return made

    head = nn.Linear(64, 10)
    head.weight.data, head.bias.data = tensor("dense/kernel").T.contiguous(), tensor("dense/bias")
    stem = conv("conv2d")
    stem.weight.data *= 255
    blocks = (block(1, 1), block(3, 3, 2), block(6, 5, 2))
    return nn.Sequential(stem, norm(0), nn.ReLU(), *blocks, nn.AvgPool2d(8), nn.Flatten(), head).eval()


def akamaster_resnet20() -> nn.Module:
    """The trained ResNet-20 for CIFAR-10 of akamaster/pytorch_resnet_cifar10.

    Its option-A shortcuts, zeros on both sides of the channels, are the 1 x 1 projections that they amount to.
    """
    from safetensors.torch import load_file

    network = cifar_resnet(20, num_classes=10)
    for module in network.modules():
        if isinstance(shortcut := getattr(module, "shortcut", None), PadShortcut):
            channels = module.conv1.in_channels
            projection = nn.Conv2d(channels, 2 * channels, 1, shortcut.stride, bias=False)
            with torch.no_grad():
                projection.weight.zero_()
                projection.weight[channels // 2 : channels // 2 + channels, :, 0, 0] = torch.eye(channels)
            module.shortcut = projection
    stored = load_file(shared("trained/akamaster_resnet20.safetensors"))
    weights = {name.replace("linear", "fc"): value for name, value in stored.items()}
    left = network.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys
    assert all("num_batches" in name or "shortcut" in name for name in left.missing_keys)
    return network.eval()


def plain(network: nn.Module, example: Tensor, method: str = "rm") -> nn.Module:
    """Without its skips, folded."""
    return unskip.fold(unskip.plainify(network, method), example=example)
