"""CIFAR ResNets (He et al. 2016, section 4.2) and wide residual networks (Zagoruyko & Komodakis 2016), for 32 px.

He's ResNet-N has 6n + 2 layers, widths 16, 32, 64 and shortcuts without weights (option A) or projections (option B).
WRN-N-k has 6n + 4 layers, widths 16k, 32k, 64k and pre-activation blocks.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from unskip.methods.pieces import PadShortcut
from unskip.methods.spec import BlockSpec, factory, parts
from unskip.models.staged import StagedNet, check_count
from unskip.surgery import register_reader

Shortcut = Literal["A", "B"]
HE_WIDTHS = (16, 32, 64)  # channels of He's three stages; the stem has those of the first


def make_shortcut(in_chs: int, out_chs: int, stride: int, shortcut: Shortcut) -> nn.Module | None:
    """None for the identity; else zero padding (A) or a 1 x 1 convolution (B)."""
    if stride == 1 and in_chs == out_chs:
        return None
    return (
        PadShortcut(stride, out_chs - in_chs) if shortcut == "A" else nn.Conv2d(in_chs, out_chs, 1, stride, bias=False)
    )


class CifarBlock(nn.Module):
    """Two 3 x 3 convolutions; y = relu(x + branch(x))."""

    preact = False

    def __init__(self, in_chs: int, out_chs: int, stride: int, shortcut: Shortcut, drop_path: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chs, out_chs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_chs)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_chs, out_chs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_chs)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.act2 = nn.ReLU(inplace=True)
        self.shortcut = make_shortcut(in_chs, out_chs, stride, shortcut)
        if isinstance(self.shortcut, nn.Conv2d):
            self.shortcut = nn.Sequential(self.shortcut, nn.BatchNorm2d(out_chs))

    def forward(self, x: Tensor) -> Tensor:
        response = self.act1(self.bn1(self.conv1(x)))
        response = self.drop_path(self.bn2(self.conv2(response)))
        return self.act2(response + (x if self.shortcut is None else self.shortcut(x)))


class WideBlock(nn.Module):
    """Pre-activation: norm and ReLU come before each convolution; y = x + branch(relu(norm(x)))."""

    preact = True

    def __init__(self, in_chs: int, out_chs: int, stride: int, shortcut: Shortcut, drop_path: float = 0.0) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_chs)
        self.act1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_chs, out_chs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_chs)
        self.act2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_chs, out_chs, 3, 1, 1, bias=False)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.shortcut = make_shortcut(in_chs, out_chs, stride, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        read = self.act1(self.bn1(x))
        response = self.drop_path(self.conv2(self.act2(self.bn2(self.conv1(read)))))
        return response + (x if self.shortcut is None else self.shortcut(read))


@register_reader(CifarBlock)
def read_cifar_block(block: nn.Module, path: str) -> BlockSpec:
    branch = parts(block, "conv1 bn1 act1 conv2 bn2 drop_path")
    return BlockSpec(path=path, branch=branch, shortcut=block.shortcut, out_act=block.act2)  # type: ignore[arg-type]


@register_reader(WideBlock)
def read_wide_block(block: nn.Module, path: str) -> BlockSpec:
    branch = parts(block, "conv1 bn2 act2 conv2 drop_path")
    return BlockSpec(path=path, pre=parts(block, "bn1 act1"), branch=branch, shortcut=block.shortcut)  # type: ignore[arg-type]


class CifarNet(StagedNet):
    """Stem, three stages, pooling and a linear classifier.

    Its classes set what is declared here, and the stages with `add_stages`.
    """

    conv1: nn.Module
    bn1: nn.Module
    act1: nn.Module
    norm: nn.Module
    act: nn.Module
    stage_names = ("layer1", "layer2", "layer3")

    def add_stages(
        self, blocks: int, stem: int, widths: tuple[int, ...], make: Callable[[int, int, int, int], nn.Module]
    ) -> None:
        """Three stages of `blocks` blocks each, of these widths, behind a stem of `stem` channels.

        `make(in_chs, out_chs, stride, index)` builds a block.
        """
        if blocks < 1:
            raise ValueError(f"{type(self).__name__}: blocks={blocks} must be at least 1 in each stage.")
        in_chs = stem
        self.feature_info = []
        for stage, (name, out_chs) in enumerate(zip(self.stage_names, widths, strict=True)):
            layer = nn.Sequential()
            for i in range(blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                layer.append(make(in_chs, out_chs, stride, stage * blocks + i))
                in_chs = out_chs
            self.add_module(name, layer)
            self.feature_info.append({"num_chs": out_chs, "reduction": 2**stage, "module": name})
        self.num_features = in_chs

    def stem(self, x: Tensor) -> Tensor:
        return self.act1(self.bn1(self.conv1(x)))

    def tail(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))

    def remove_tail(self) -> None:
        self.norm, self.act = nn.Identity(), nn.Identity()

    def pool(self, x: Tensor) -> Tensor:
        return torch.mean(x, dim=(2, 3))


class CifarResNet(CifarNet):
    """A CIFAR ResNet or wide ResNet of `blocks` blocks in each stage."""

    def __init__(
        self,
        *,
        blocks: int,  # in each stage
        block: type[CifarBlock] | type[WideBlock] = CifarBlock,
        widths: tuple[int, ...] = HE_WIDTHS,  # channels of each stage
        stem: int | None = None,  # channels behind the first convolution; None: those of the first stage
        head_norm: bool = False,  # a norm before pooling; pre-activation networks have one in any case
        shortcut: Shortcut = "A",
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,  # dropout before the classifier
        drop_path_rate: float = 0.0,  # stochastic depth of the last block, falling to 0 at the first
        global_pool: str = "avg",  # '' for unpooled features, without a classifier
    ) -> None:
        super().__init__()
        if shortcut not in ("A", "B"):
            raise ValueError(f"CifarResNet: shortcut={shortcut!r} must be 'A' (no weights) or 'B' (projections).")
        widths = check_widths(widths)
        stem = widths[0] if stem is None else stem
        for name, value, least in (("stem", stem, 1), ("in_chans", in_chans, 1), ("num_classes", num_classes, 0)):
            check_count("CifarResNet", name, value, least)
        for name, rate in (("drop_rate", drop_rate), ("drop_path_rate", drop_path_rate)):
            if not 0 <= rate < 1:
                raise ValueError(f"CifarResNet: {name}={rate} must be a probability, at least 0 and below 1.")
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.conv1 = nn.Conv2d(in_chans, stem, 3, 1, 1, bias=False)
        self.bn1 = nn.Identity() if block.preact else nn.BatchNorm2d(stem)
        self.act1 = nn.Identity() if block.preact else nn.ReLU(inplace=True)

        def make(in_chs: int, out_chs: int, stride: int, index: int) -> nn.Module:
            return block(in_chs, out_chs, stride, shortcut, drop_path_rate * index / (3 * blocks - 1))

        self.add_stages(blocks, stem, widths, make)
        self.norm: nn.Module = nn.Identity()
        if block.preact or head_norm:
            self.add_head_norm()
        self.act = nn.ReLU(inplace=True) if block.preact else nn.Identity()
        self.reset_classifier(num_classes, global_pool)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def add_head_norm(self) -> None:
        """Puts a norm before pooling, where there is none. `fold` absorbs it into the classifier."""
        if isinstance(self.norm, nn.Identity):
            self.norm = nn.BatchNorm2d(self.num_features, **factory(self.conv1)).train(self.training)


def check_widths(widths: object) -> tuple[int, ...]:
    """Lists are welcome, since recipes have no tuples."""
    given = tuple(widths) if isinstance(widths, tuple | list) else ()
    if len(given) != 3 or not all(type(width) is int and width >= 1 for width in given):
        raise ValueError(
            f"CifarResNet: widths={widths} must be three whole numbers, the channels of each stage, as in {HE_WIDTHS}."
        )
    return given


def cifar_resnet(depth: int, **kwargs: Any) -> CifarResNet:
    """He's ResNet of this depth for CIFAR."""
    if depth % 6 != 2 or depth < 8:
        raise ValueError(f"cifar_resnet: depth={depth} must be 6n + 2 with n >= 1, for instance 20, 56, 110 or 1202.")
    return CifarResNet(blocks=depth // 6, **kwargs)


def wide_resnet(depth: int, width: int, **kwargs: Any) -> CifarResNet:
    """WRN-depth-width, without dropout, projections where the width changes."""
    if depth % 6 != 4 or depth < 10:
        raise ValueError(f"wide_resnet: depth={depth} must be 6n + 4 with n >= 1, for instance 16, 28 or 40.")
    widths = tuple(width * channels for channels in HE_WIDTHS)
    return CifarResNet(
        blocks=depth // 6, block=WideBlock, **{"widths": widths, "stem": HE_WIDTHS[0], "shortcut": "B", **kwargs}
    )
