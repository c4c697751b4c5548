"""Method `residual_half`: PNNH's half-width learner beside the block's own, full shortcut. An upper bound, not plain.

With C_B = C and an identity coder nothing is lost on the internal path, and after training the block folds into a plain
one of hidden width H + C. While it trains it *is* a residual network, so it is never what `pnnh` stands for.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from unskip.coders import CoderBank
from unskip.methods.pnnh import PNNH, LearnerBlock, set_head_norm
from unskip.methods.registry import BlockMethod, register_method
from unskip.methods.spec import BlockSpec


class ResidualHalfBlock(LearnerBlock):
    """y = σ(learner(pre(x)) + x), or a projection of pre(x) instead of x."""

    keeps_skip = True
    shortcut: nn.Module | None

    def __init__(self, spec: BlockSpec, learner: nn.Sequential) -> None:
        super().__init__(nn.Sequential(*spec.pre), learner, spec.drop_path, spec.out_act, shortcut=spec.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        read = self.pre(x)
        path = x if self.shortcut is None else self.shortcut(read)
        return self.act(self.drop_path(self.learner(read)) + path)


@register_method("residual_half")
@dataclass(frozen=True, kw_only=True)
class ResidualHalf(BlockMethod):
    """The learner of `pnnh` beside the block's own skip connection: an upper bound, not plain."""

    ratio: float = 0.5  # the share of C (of C_low in bottlenecks) by which the hidden width shrinks
    scale: float = 0.3  # of the last convolution at initialisation, relative to He's
    head_norm: bool | None = None  # a norm before pooling, as `pnnh` has it

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 0.5:
            raise ValueError(f"residual_half: ratio={self.ratio} must be above 0 and at most 0.5.")

    def rebuild(self, spec: BlockSpec, bank: CoderBank) -> nn.Module:
        framed, enter, leave = spec.framed()
        learner = PNNH(ratio=self.ratio, scale=self.scale, block="fast", linear_start=False).learner(framed)
        return ResidualHalfBlock(spec, nn.Sequential(*enter, *learner, *leave) if enter else learner)

    def finish(self, model: nn.Module) -> None:
        set_head_norm("residual_half", model, self.head_norm)
