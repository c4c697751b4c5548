"""Forty residual networks as people write them, at most two of a family: name -> builder and the size of one input.

`python -m tests.surgery.forty` prints the table of docs/networks.md.

Networks of libraries are small ones of their class: all kinds of blocks that the class has, few of each.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import timm
import torch
import torchvision.models as tv
from timm.layers import DropPath
from timm.models.cspnet import CspNet, model_cfgs
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

import unskip
from unskip.methods import PNNHBlock


class BasicBlock(nn.Module):
    """As in most CIFAR code: functions instead of modules, and `out += shortcut`."""

    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != 4 * planes:
            conv = nn.Conv2d(in_planes, 4 * planes, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(4 * planes))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.shortcut(x))


class PreActBlock(nn.Module):
    """Pre-activation; the projection reads what the branch reads."""

    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out += shortcut
        return out


class SEBlock(nn.Module):
    """Squeeze-and-excitation written out in the forward of the block."""

    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
        self.fc1 = nn.Conv2d(planes, planes // 4, 1)
        self.fc2 = nn.Conv2d(planes // 4, planes, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        w = F.avg_pool2d(out, out.size(2))
        w = F.relu(self.fc1(w))
        w = F.sigmoid(self.fc2(w))
        out = out * w
        out += self.shortcut(x)
        return F.relu(out)


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class OptionABlock(BasicBlock):
    """Option A of He et al.: every second pixel, and zero channels on both sides."""

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__(in_planes, planes, stride)
        if stride != 1 or in_planes != planes:
            half = planes // 4
            self.shortcut = Lambda(lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half), "constant", 0))


class PooledBlock(BasicBlock):
    """Option A with an average pooling, and zeros by torch.cat."""

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__(in_planes, planes, stride)
        self.shortcut = None
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.stride != 1:
            x = F.avg_pool2d(x, 2)
            x = torch.cat([x, torch.zeros_like(x)], dim=1)
        return F.relu(x + out)


class TinyBlock(BasicBlock):
    """MLPerf Tiny's ResNet-8 in PyTorch: at stride 2 the padding of TensorFlow, right and below alone."""

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__(in_planes, planes, stride)
        if stride != 1:
            self.conv1 = nn.Conv2d(in_planes, planes, 3, stride)
            self.shortcut = nn.Conv2d(in_planes, planes, 1, stride)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x, (0, 1, 0, 1)) if self.stride == 2 else x
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(y)))))
        return F.relu(y + self.shortcut(x))


class ReZeroBlock(nn.Module):
    """A gain on the branch that is trained from zero."""

    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1)
        self.down = nn.Conv2d(in_planes, planes, 1, stride) if stride != 1 or in_planes != planes else None
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.down is None else self.down(x)
        return torch.relu(identity + self.alpha * self.conv2(torch.relu(self.conv1(x))))


class FixupBlock(nn.Module):
    """No norms; biases and a gain that are single numbers (Zhang, Dauphin and Ma 2019, arXiv:1901.09321)."""

    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.bias1a, self.bias1b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.bias2a, self.bias2b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(in_planes, planes, 1, stride, bias=False) if stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x + self.bias1a)
        out = self.relu(out + self.bias1b)
        out = self.conv2(out + self.bias2a)
        out = out * self.scale + self.bias2b
        identity = x if self.down is None else self.down(x + self.bias1a)
        out += identity
        return self.relu(out)


class WideBlock(nn.Module):
    """A wide residual block with dropout; the projection reads the activated input, the identity the input."""

    expansion = 1

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.drop_rate = 0.3
        self.drop_path = DropPath(0.1)
        self.same = in_planes == planes
        self.project = None if self.same else nn.Conv2d(in_planes, planes, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.same:
            x = self.relu1(self.bn1(x))
        else:
            out = self.relu1(self.bn1(x))
        out = self.relu2(self.bn2(self.conv1(out if self.same else x)))
        if self.drop_rate > 0:
            out = F.dropout(out, p=self.drop_rate, training=self.training)
        out = self.drop_path(self.conv2(out))
        return torch.add(x if self.same else self.project(x), out)


class CifarNet(nn.Module):
    def __init__(self, block: Any, blocks: tuple[int, ...] = (2, 2, 2), width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        planes, layers = width, []
        for stage, count in enumerate(blocks):
            layer = []
            for i in range(count):
                layer.append(block(planes, width * 2**stage, 2 if stage and i == 0 else 1))
                planes = width * 2**stage * block.expansion
            layers.append(nn.Sequential(*layer))
        self.layers = nn.ModuleList(layers)
        self.linear = nn.Linear(planes, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        for layer in self.layers:
            out = layer(out)
        out = F.adaptive_avg_pool2d(out, 1)
        return self.linear(out.view(out.size(0), -1))


class SeriesBlock(nn.Module):
    """Wang, Yan and Oates 2017 (arXiv:1611.06455): kernels 7, 5 and 3 along time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(inputs, outputs, 7, padding=3)
        self.bn1 = nn.BatchNorm1d(outputs)
        self.conv2 = nn.Conv1d(outputs, outputs, 5, padding=2)
        self.bn2 = nn.BatchNorm1d(outputs)
        self.conv3 = nn.Conv1d(outputs, outputs, 3, padding=1)
        self.bn3 = nn.BatchNorm1d(outputs)
        self.expand = None
        if inputs != outputs:
            self.expand = nn.Sequential(nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.expand is None else self.expand(x)))


class SeriesNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(SeriesBlock(2, 16), SeriesBlock(16, 32), SeriesBlock(32, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(dim=-1))


class SignalBlock(nn.Module):
    """Pre-activation along time, with a stride and every second sample as shortcut."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.conv1 = nn.Conv1d(width, width, 9, stride, padding=4, bias=False)
        self.conv2 = nn.Conv1d(width, width, 9, padding=4, bias=False)
        self.dropout = nn.Dropout(0.2)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.norm1(x).relu())
        y = self.conv2(self.dropout(self.norm2(y).relu_()))
        return y + (x[:, :, :: self.stride] if self.stride > 1 else x)


class SignalNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 16, 15, padding=7)
        self.blocks = nn.Sequential(SignalBlock(16, 1), SignalBlock(16, 2), SignalBlock(16, 1), SignalBlock(16, 2))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(F.adaptive_avg_pool1d(x, 1).squeeze(-1))


class ScaledBlock(nn.Module):
    """EDSR's (Lim et al. 2017, arXiv:1707.02921): no norms, the branch times 0.1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True), nn.Conv2d(width, width, 3, padding=1)
        )
        self.res_scale = 0.1

    def forward(self, x: Tensor) -> Tensor:
        res = self.body(x).mul(self.res_scale)
        res += x
        return res


class EDSR(nn.Module):
    """With the long skip from head to tail."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Sequential(*[ScaledBlock(16) for _ in range(3)], nn.Conv2d(16, 16, 3, padding=1))
        self.tail = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        res = self.body(x)
        res += x
        return self.tail(res)


class NormFree(nn.Module):
    """A classifier of EDSR's blocks, without a long skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList([ScaledBlock(16) for _ in range(4)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.relu().mean((2, 3)))


class MLPBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.fc2(F.relu(self.fc1(x))))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(20, 32)
        self.blocks = nn.Sequential(*[MLPBlock(32) for _ in range(4)])
        self.output = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.blocks(torch.relu(self.input(x))))


class TabularBlock(nn.Module):
    """Gorishniy et al. 2021 (arXiv:2106.11959): norm, linear, ReLU, dropout, linear, dropout."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear_first = nn.Linear(width, hidden)
        self.linear_second = nn.Linear(hidden, width)
        self.dropout = 0.1

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        z = F.relu(self.linear_first(z))
        z = F.dropout(z, self.dropout, self.training)
        z = self.linear_second(z)
        z = F.dropout(z, self.dropout, self.training)
        return x + z


class Tabular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.blocks = nn.ModuleList([TabularBlock(24, 48) for _ in range(3)])
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.norm(x)))


def branch(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
    )  # fmt: skip


class LoopNet(nn.Module):
    """Branches in a list, with the addition in the network's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.ModuleList([branch(16) for _ in range(4)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.relu(x).mean((2, 3)))


class NamedNet(nn.Module):
    """Branches by name, each addition a line of the network's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.b1, self.b2, self.b3 = branch(16), branch(16), branch(16)
        self.down = nn.Conv2d(16, 24, 3, 2, 1)
        self.b4 = branch(24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.b1(x))
        x = F.relu(self.b2(x).add_(x))
        x = torch.relu_(torch.add(x, self.b3(x)))
        x = F.relu(self.down(x))
        x = F.relu(x + self.b4(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


CONVNEXT = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 2)]
CSP = replace(
    model_cfgs["cspresnet50"], stages=replace(model_cfgs["cspresnet50"].stages, depth=(1, 2), out_chs=(64, 96))
)
NARROW = {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 32), "num_classes": 10}
VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "CIFAR, functions": (lambda: CifarNet(BasicBlock), (3, 32, 32)),
    "CIFAR, bottleneck": (lambda: CifarNet(Bottleneck), (3, 32, 32)),
    "CIFAR, pre-activation": (lambda: CifarNet(PreActBlock), (3, 32, 32)),
    "CIFAR, SE in the block": (lambda: CifarNet(SEBlock), (3, 32, 32)),
    "CIFAR, option A on both sides": (lambda: CifarNet(OptionABlock), (3, 32, 32)),
    "CIFAR, pooled option A": (lambda: CifarNet(PooledBlock), (3, 32, 32)),
    "MLPerf Tiny ResNet-8": (lambda: CifarNet(TinyBlock, (1, 1, 1)), (3, 32, 32)),
    "ReZero": (lambda: CifarNet(ReZeroBlock), (3, 32, 32)),
    "Fixup": (lambda: CifarNet(FixupBlock, (2, 2)), (3, 32, 32)),
    "wide, dropout and drop path": (lambda: CifarNet(WideBlock), (3, 32, 32)),
    "1-D ResNet, time series": (SeriesNet, (2, 50)),
    "1-D pre-activation, signals": (SignalNet, (1, 64)),
    "EDSR": (EDSR, (3, 16, 16)),
    "norm-free, scale 0.1": (NormFree, (3, 24, 24)),
    "MLP": (MLP, (20,)),
    "tabular ResNet": (Tabular, (12,)),
    "skips in a loop of the parent": (LoopNet, (3, 16, 16)),
    "skips in lines of the parent": (NamedNet, (3, 16, 16)),
    "torchvision ResNet-18": (lambda: tv.resnet18(num_classes=10), (3, 64, 64)),
    "torchvision ResNeXt": (
        lambda: tv.ResNet(tv.resnet.Bottleneck, [1, 1, 1, 1], 10, groups=32, width_per_group=4), (3, 64, 64),
    ),
    "torchvision RegNet-Y": (lambda: tv.regnet_y_400mf(num_classes=10), (3, 64, 64)),
    "torchvision MobileNet-V2": (lambda: tv.mobilenet_v2(num_classes=10), (3, 64, 64)),
    "torchvision MobileNet-V3": (lambda: tv.mobilenet_v3_small(num_classes=10), (3, 64, 64)),
    "torchvision ViT": (lambda: tv.VisionTransformer(**VIT, num_classes=10), (3, 32, 32)),
    "torchvision ConvNeXt": (lambda: ConvNeXt(CONVNEXT, num_classes=10), (3, 64, 64)),
    "torchvision EfficientNet": (lambda: tv.efficientnet_b0(num_classes=10), (3, 64, 64)),
    "timm ResNet-26-D": (lambda: timm.create_model("resnet26d", **NARROW), (3, 64, 64)),
    "timm RegNet-X": (lambda: timm.create_model("regnetx_002", num_classes=10), (3, 64, 64)),
    "timm ResNet-V2": (
        lambda: timm.create_model("resnetv2_50", layers=(1, 2, 1, 1), channels=(32, 64, 64, 64), num_classes=10),
        (3, 64, 64),
    ),
    "timm ResNet-V2 without norms": (lambda: timm.create_model("nf_resnet26", num_classes=10), (3, 64, 64)),
    "timm CSPResNet": (lambda: CspNet(CSP, num_classes=10), (3, 64, 64)),
    "timm Res2Net": (lambda: timm.create_model("res2net50_26w_4s", layers=(1, 1, 1, 2), num_classes=10), (3, 64, 64)),
    "timm ConvNeXt": (lambda: timm.create_model("convnext_atto", depths=(1, 1, 2, 1), num_classes=10), (3, 64, 64)),
    "timm MLP-Mixer": (
        lambda: MlpMixer(img_size=64, patch_size=16, num_blocks=2, embed_dim=64, num_classes=10),
        (3, 64, 64),
    ),
    "timm DeiT-3": (
        lambda: timm.create_model("deit3_small_patch16_224", img_size=64, depth=2, num_classes=10), (3, 64, 64),
    ),
    "timm SE-ResNet": (lambda: timm.create_model("seresnet18", num_classes=10), (3, 64, 64)),
    "timm ECA-ResNet": (lambda: timm.create_model("ecaresnet26t", **NARROW), (3, 64, 64)),
    "timm EfficientNet": (lambda: timm.create_model("efficientnet_b0", num_classes=10), (3, 64, 64)),
    "timm MobileNet-V2": (lambda: timm.create_model("mobilenetv2_050", num_classes=10), (3, 64, 64)),
    "timm MobileNet-V3": (lambda: timm.create_model("mobilenetv3_small_050", num_classes=10), (3, 64, 64)),
}  # fmt: skip


def outcome(name: str, method: str) -> str:
    """'yes', with what a method has to say beside it, or the reason why it refuses a network; anything else raises.

    By rm the two networks must agree to 1e-9 in float64, also on an input that nothing was checked on. What plain and
    pnnh give must have no addition that joins the input and the output of a block, and run forward and backward.
    """
    build, size = NETWORKS[name]
    torch.manual_seed(0)
    network = build().eval()
    randomise(network)
    x = torch.randn(2, *size, dtype=torch.float64)
    exact = method == "rm"
    options = {"pnnh": {"block": "plain"}, "rm": {"limit": LIMIT}}.get(method, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # trained weights are lost
            plain = unskip.plainify(network.double() if exact else network, method, example=x, **options)
    except ValueError as error:
        return str(error)
    assert not plain.surgery.left
    assert set(plain.surgery.kept) <= {"attention"}
    if exact:
        with torch.no_grad():
            expected, found = network(3 * x), plain(3 * x)
        assert (expected - found).abs().max() <= 1e-9 * expected.abs().max()
    count = sum(isinstance(m, PNNHBlock) and m.coder is not None for m in plain.modules())
    sums = additions(plain.eval(), x.to(next(plain.parameters()).dtype))
    assert len(sums) == count + plain.surgery.kept.get("attention", 0)
    if not exact:
        plain.train()(x.float()).square().mean().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in plain.parameters())
        assert any(p.grad is not None for p in plain.parameters())
    kept = plain.surgery.kept.get("attention", 0)
    grown = sum(p.numel() for p in plain.parameters()) / sum(p.numel() for p in network.parameters())
    notes = [f"{kept} attentions keep their skips"] * bool(kept) + [f"{grown:.1f} x weights"] * (grown > 4)
    return ", ".join(["yes", *notes])


@torch.no_grad()
def randomise(network: nn.Module) -> None:
    """Norms as after training, and gains that are not zero."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.ndim <= 1:
                parameter.add_(0.1 * torch.randn_like(parameter))


def additions(network: nn.Module, x: Tensor) -> list[fx.Node]:
    """The sums of two tensors that depend on the input, in the graph of PyTorch's operators."""
    with torch.no_grad():
        graph = make_fx(lambda x: network(x))(x).graph
    (start,) = (node for node in graph.nodes if node.op == "placeholder")
    known = {start}
    for node in graph.nodes:
        if known.intersection(node.all_input_nodes):
            known.add(node)
    adds = (node for node in known if getattr(node.target, "overloadpacket", None) in ADDS)
    return [node for node in adds if all(isinstance(a, fx.Node) and a in known for a in node.args[:2])]


ADDS = (torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.sub)


def table(found: dict[tuple[str, str], str]) -> str:
    """What plain, pnnh and rm did with each network, as a table for the documentation."""
    rows = ["| network | plain | pnnh | rm |", "|---|---|---|---|"]
    for name in NETWORKS:
        cells = [found[name, method] if found[name, method].startswith("yes") else "no" for method in METHODS]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    counts = [sum(found[name, method].startswith("yes") for name in NETWORKS) for method in METHODS]
    rows.append(f"| **of {len(NETWORKS)}** | {' | '.join(map(str, counts))} |")
    reasons = [
        f"- {name}, {method}: {reason.partition(': ')[2].partition(chr(10))[0].removesuffix(WAY_OUT)}"
        for (name, method), reason in found.items()
        if not reason.startswith("yes")
    ]
    return "\n".join([*rows, "", *reasons])


LIMIT = 12  # of the weights by rm, whose default refuses above 4 times as many
METHODS = ("plain", "pnnh", "rm")
WAY_OUT = " strict=False leaves such blocks as they are."

if __name__ == "__main__":
    print(table({(name, method): outcome(name, method) for name in NETWORKS for method in METHODS}))
