"""Reader of what method `residual_half` makes: once trained, `rm` makes a plain block of hidden width H + C of it."""

from torch import nn

from unskip.methods.residual_half import ResidualHalfBlock
from unskip.methods.spec import BlockSpec
from unskip.surgery.reading import register_reader


@register_reader(ResidualHalfBlock)
def read_residual_half(block: nn.Module, path: str) -> BlockSpec:
    assert isinstance(block, ResidualHalfBlock)
    return BlockSpec(
        path=path,
        pre=tuple(block.pre),
        branch=(*block.learner, block.drop_path),
        shortcut=block.shortcut,
        out_act=None if isinstance(block.act, nn.Identity) else block.act,
    )
