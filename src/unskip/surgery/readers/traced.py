"""Reader of the blocks that `unskip.surgery.expose` cuts out of larger forwards."""

from torch import nn

from unskip.methods.pieces import Residual
from unskip.methods.spec import BlockSpec
from unskip.surgery.reading import register_reader


@register_reader(Residual)
def read_residual(block: nn.Module, path: str) -> BlockSpec:
    assert isinstance(block, Residual)
    return BlockSpec(
        path=path,
        pre=tuple(block.pre),
        branch=tuple(block.branch),
        shortcut=block.shortcut,
        out_act=None if isinstance(block.out_act, nn.Identity) else block.out_act,
        projects_input=block.projects_input,
        skip=not block.attention,
        kept=("attention",) if block.attention else (),
    )
