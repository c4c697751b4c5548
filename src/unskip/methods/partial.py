"""A convolution that reads or writes some of its channels through the centre of its kernel only.

PNNH with the coder `identity` carries the first C_B channels from block to block; the uncarried ones live for one
block. These are worth fewer weights: k x k taps for what is carried, 1 x 1 for what is not (docs/results.md).
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.methods.spec import Conv, conv_arguments, replace_weight

Side = Literal["reads", "writes"]


class PartialConv2d(nn.Conv2d):
    """k x k taps for the first `full` channels that it reads (or writes), the centre tap alone for the others.

    `weight` holds the former and `centre` the latter, so that no zero is stored, trained or counted. Both start from
    He's normal over the fan-in that there is; where it writes, the full channels times `scale`.
    """

    centre: Tensor

    def __init__(self, like: nn.Conv2d, full: int, *, side: Side, scale: float = 1.0) -> None:
        channels = like.in_channels if side == "reads" else like.out_channels
        if like.groups != 1 or not 1 <= full < channels:
            raise ValueError(
                f"PartialConv2d: full={full} must be at least 1 and less than the {channels} channels that {like} "
                f"{side}, and that must have one group."
            )
        rest = channels - full
        inputs, outputs = (full, like.out_channels) if side == "reads" else (like.in_channels, full)
        super().__init__(inputs, outputs, bias=False, **conv_arguments(like))
        self.in_channels, self.out_channels, self.side = like.in_channels, like.out_channels, side
        shape = (like.out_channels, rest) if side == "reads" else (rest, like.in_channels)
        self.centre = nn.Parameter(self.weight.new_empty(*shape, 1, 1))
        if like.bias is not None:
            self.bias = nn.Parameter(torch.zeros_like(like.bias))
        taps, others = self.weight[0].numel(), self.centre[0].numel()
        fans = (taps + others, taps + others) if side == "reads" else (taps, others)
        nn.init.normal_(self.weight, std=scale * (2 / fans[0]) ** 0.5)
        nn.init.normal_(self.centre, std=(2 / fans[1]) ** 0.5)

    def whole_weight(self) -> Tensor:
        """(out, in, k, k), zeros around the centre taps."""
        around = [k // 2 for k in reversed(self.kernel_size) for _ in range(2)]
        return torch.cat([self.weight, F.pad(self.centre, around)], dim=1 if self.side == "reads" else 0)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.whole_weight(), self.bias)

    def to_ordinary(self) -> Conv:
        return replace_weight(self, self.whole_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.side} {self.centre.shape[self.side == 'reads']} through the centre"
