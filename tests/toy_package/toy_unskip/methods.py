"""Method `scaled`: the branch alone, times a trained number."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from unskip.methods import BlockSpec, Unsupported, register_method


class ScaledBlock(nn.Module):
    """y = out_act(scale branch(x))."""

    skip_free = True

    def __init__(self, branch: nn.Sequential, out_act: nn.Module, scale: float) -> None:
        super().__init__()
        self.branch, self.out_act = branch, out_act
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.out_act(self.scale * self.branch(x))

    @torch.no_grad()
    def to_ordinary(self) -> nn.Module:
        """The same function with the scale in the last norm."""
        branch = copy.deepcopy(self.branch)
        branch[-1].weight *= self.scale
        branch[-1].bias *= self.scale
        return nn.Sequential(*branch, copy.deepcopy(self.out_act))


@register_method("scaled")
@dataclass(frozen=True, kw_only=True)
class Scaled:
    """The branch of the block alone, times a trained number."""

    scale: float = 2.0  # the number at initialisation

    keeps_weights: ClassVar[bool] = True

    def build(self, spec: BlockSpec, bank: object) -> nn.Module | None:
        if spec.out_act is None:
            raise Unsupported("it has no activation behind the addition")
        return ScaledBlock(nn.Sequential(*spec.branch), spec.out_act, self.scale)
