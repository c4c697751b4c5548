"""Method `full_carry`: a learner beside all channels that the block reads through its norm. An upper bound, not plain.

    y = learner(LN(x)) + LN(x)

Two hidden units carry a channel exactly, σ(z) - σ(-z) = z, so once trained the block is an ordinary MLP of the block's
own width. While it trains C_B = C, and that is a residual connection, from the norm on.
"""

from dataclasses import dataclass, replace

from torch import nn

from unskip.coders import CoderBank
from unskip.methods.pnnh import PNNH, Hidden
from unskip.methods.registry import BlockMethod, register_method
from unskip.methods.residual_half import ResidualHalfBlock
from unskip.methods.spec import BlockSpec, Unsupported


@register_method("full_carry")
@dataclass(frozen=True, kw_only=True)
class FullCarry(BlockMethod):
    """The learner of `pnnh` beside all channels that an MLP reads: an upper bound, not plain."""

    scale: float = 0.3  # of the last layer at initialisation, relative to He's
    hidden: Hidden = None  # width of the learner, as in `pnnh`; None: H - 2C

    def rebuild(self, spec: BlockSpec, bank: CoderBank) -> nn.Module:
        if spec.family != "mlp":
            raise Unsupported(f"it is {spec.family}, and a full carry is for MLPs; 'residual_half' is for convolutions")
        learner = PNNH(scale=self.scale, hidden=self.hidden, linear_start=False).learner(spec, 2 * spec.in_features)
        return ResidualHalfBlock(replace(spec, shortcut=nn.Identity()), learner)
