"""Readers of MobileNet-V2 blocks, timm's and torchvision's. Their output is linear: what they read is signed."""

import timm.models._efficientnet_blocks as timm_blocks
import torchvision.models.mobilenetv2
from torch import nn

from unskip.kernels.layers import FastInvertedResidual
from unskip.methods.spec import BlockSpec, parts
from unskip.surgery.reading import register_reader


@register_reader(timm_blocks.InvertedResidual, FastInvertedResidual)
def read_timm_inverted(block: nn.Module, path: str) -> BlockSpec:
    names = "conv_s2d bn_s2d conv_pw bn1 conv_dw bn2 aa se conv_pwl bn3" + (" drop_path" if block.has_skip else "")
    return BlockSpec(path=path, branch=parts(block, names), skip=bool(block.has_skip))


@register_reader(timm_blocks.DepthwiseSeparableConv)
def read_timm_separable(block: nn.Module, path: str) -> BlockSpec:
    names = "conv_s2d bn_s2d conv_dw bn1 aa se conv_pw bn2" + (" drop_path" if block.has_skip else "")
    return BlockSpec(path=path, branch=parts(block, names), skip=bool(block.has_skip))


@register_reader(torchvision.models.mobilenetv2.InvertedResidual)
def read_torchvision_inverted(block: nn.Module, path: str) -> BlockSpec:
    branch: list[nn.Module] = []
    for part in block.conv:  # type: ignore[union-attr]
        branch += part if isinstance(part, nn.Sequential) else [part]
    return BlockSpec(path=path, branch=tuple(branch), skip=bool(block.use_res_connect))
