"""Method `plain`: the skips are removed and nothing else.

The Plain-N rows of Zhang et al. 2024, arXiv:2402.08645, Tables 1 and 2.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from timm.layers.drop import DropPath
from torch import nn

from unskip.coders import CoderBank
from unskip.methods.registry import BlockMethod, register_method
from unskip.methods.spec import NORMS, BlockSpec


class PlainBlock(nn.Sequential):
    """The branch of a residual block, alone."""

    skip_free = True


@register_method("plain")
@dataclass(frozen=True, kw_only=True)
class Plain(BlockMethod):
    """y = out_act(branch(pre(x))): the block's own modules and weights, without its shortcut."""

    keeps_weights: ClassVar[bool] = True

    def rebuild(self, spec: BlockSpec, bank: CoderBank) -> PlainBlock:
        # Stochastic depth goes with the skip: without a skip, nothing would get past a dropped branch.
        branch = [module for module in spec.branch if not isinstance(module, DropPath)]
        revive_last_norm(branch)
        out_act = [] if spec.out_act is None else [spec.out_act]
        return PlainBlock(*spec.pre, *branch, *out_act)


def revive_last_norm(branch: list[nn.Module]) -> None:
    """Residual networks often start with a zero gain on the last norm, so that a block begins as the identity.

    Without the skip such a block would begin, and stay, as zero: the gain goes back to one.
    """
    norms = [module for module in branch if isinstance(module, NORMS)]
    gain = getattr(norms[-1], "weight", None) if norms else None
    if gain is not None and not gain.is_meta and not torch.any(gain.detach()):
        nn.init.ones_(gain)
