"""The reader of HandBlock."""

from torch import nn

from toy_unskip.networks import HandBlock
from unskip.methods import BlockSpec
from unskip.methods.spec import parts
from unskip.surgery import register_reader


@register_reader(HandBlock)
def read(block: nn.Module, path: str) -> BlockSpec:
    return BlockSpec(path=path, branch=parts(block, "conv1 norm1 act conv2 norm2"), out_act=block.act)
