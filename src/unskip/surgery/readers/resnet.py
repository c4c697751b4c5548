"""Readers of ResNet blocks: timm's and torchvision's BasicBlock and Bottleneck; wide, ResNeXt and d too."""

import timm.models.resnet
import torchvision.models.resnet
from torch import nn

from unskip.methods.spec import BlockSpec, parts
from unskip.surgery.reading import register_reader


@register_reader(timm.models.resnet.BasicBlock)
def read_timm_basic(block: nn.Module, path: str) -> BlockSpec:
    names = "conv1 bn1 drop_block act1 aa conv2 bn2 se drop_path"
    return BlockSpec(path=path, branch=parts(block, names), shortcut=block.downsample, out_act=block.act2)  # type: ignore[arg-type]


@register_reader(timm.models.resnet.Bottleneck)
def read_timm_bottleneck(block: nn.Module, path: str) -> BlockSpec:
    names = "conv1 bn1 act1 conv2 bn2 drop_block act2 aa conv3 bn3 se drop_path"
    return BlockSpec(path=path, branch=parts(block, names), shortcut=block.downsample, out_act=block.act3)  # type: ignore[arg-type]


@register_reader(torchvision.models.resnet.BasicBlock)
def read_torchvision_basic(block: nn.Module, path: str) -> BlockSpec:
    names = "conv1 bn1 relu conv2 bn2"
    return BlockSpec(path=path, branch=parts(block, names), shortcut=block.downsample, out_act=block.relu)  # type: ignore[arg-type]


@register_reader(torchvision.models.resnet.Bottleneck)
def read_torchvision_bottleneck(block: nn.Module, path: str) -> BlockSpec:
    names = "conv1 bn1 relu conv2 bn2 relu conv3 bn3"
    return BlockSpec(path=path, branch=parts(block, names), shortcut=block.downsample, out_act=block.relu)  # type: ignore[arg-type]
