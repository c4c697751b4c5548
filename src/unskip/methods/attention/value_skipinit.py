"""Attention `value_skipinit`: A ← αI + βA(X), with α = 1 and β = 0 when training starts.

He et al. 2023, *Deep Transformers without Shortcuts*, arXiv:2302.10322, section 3. α and β are trained, here for each
head; W_V and W_O start orthogonal.
"""

from typing import Any

import torch
from torch import Tensor, nn

from unskip.methods.attention.self_attention import SelfAttention, set_orthogonal


class ValueSkipInitAttention(SelfAttention):
    """y = W_O (αI + βA(X)) W_V x."""

    def add_gains(self, **factory: Any) -> None:
        self.alpha = nn.Parameter(torch.ones(self.heads, **factory))
        self.beta = nn.Parameter(torch.zeros(self.heads, **factory))

    def start(self) -> None:
        set_orthogonal(self.v)
        set_orthogonal(self.o)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.per_head(self.alpha) * v + self.per_head(self.beta) * self.attend(q, k, v, mask)
