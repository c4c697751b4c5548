"""Method `iso`: an isometric network of convolutions and shifted ReLUs.

The ISONet row of Hu, github.com/hukkai/no-residual-network, Table 1.

Qi et al. 2020, *Deep Isometric Learning for Visual Recognition*: Delta kernels at initialisation, kept near
orthogonal by a penalty while it trains (`unskip.train.Orthogonal`, `orthogonal` in a recipe), and

    SReLU_b(x) = max(x, b)       b = -1 at initialisation and trained, one for each channel
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unskip.coders import CoderBank
from unskip.methods.delta_orthogonal import delta_orthogonal_
from unskip.methods.norm_free import norm_free
from unskip.methods.registry import BlockMethod, register_method
from unskip.methods.spec import BlockSpec

DeltaInit = Literal["orthogonal", "identity"]


class SReLU(nn.Module):
    """Shifted ReLU: max(x, b) with a trained b for each channel. The lower b, the nearer to the identity."""

    is_activation = True

    def __init__(self, channels: int, shift: float = -1.0) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.full((channels,), float(shift)))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        return torch.maximum(x, self.b.view(-1, 1, 1))

    def extra_repr(self) -> str:
        return f"{len(self.b)}"


@register_method("iso")
@dataclass(frozen=True, kw_only=True)
class Iso(BlockMethod):
    """y = SReLU(W_2 SReLU(W_1 x)), W_i Delta-orthogonal, without norms. Blocks without a skip stay as they are."""

    shift: float = -1.0  # b at initialisation; 0 is ReLU
    init: DeltaInit = "orthogonal"  # the centre of a kernel: a random orthogonal matrix, or the identity

    def rebuild(self, spec: BlockSpec, bank: CoderBank) -> nn.Module:
        return norm_free(
            spec,
            act=lambda channels: SReLU(channels, self.shift),
            initialise=lambda conv: delta_orthogonal_(conv, identity=self.init == "identity"),
        )
