"""Attention `shaped`: A ← αI + βA(X) - γC, the identity when training starts.

He and Hofmann 2024, *Simplifying Transformer Blocks*, arXiv:2311.01906, section 4; the centring is of Noci et al. 2023,
arXiv:2306.17759. C is the uniform attention that A(X) is for zero queries: the mean over the tokens that are seen. α, β
and γ are trained, for each head, and start at 1; W_Q starts at 0, so that A = I.

In the paper W_V and W_O start as the identity or are left out. Here they start orthogonal and are trained: αI with
W_V W_O fixed to the identity would be a skip.
"""

from typing import Any

import torch
from torch import Tensor, nn

from unskip.methods.attention.self_attention import SelfAttention, set_orthogonal


class ShapedAttention(SelfAttention):
    """y = W_O (αI + βA(X) - γC) W_V x."""

    alpha: nn.Parameter
    beta: nn.Parameter
    gamma: nn.Parameter

    def add_gains(self, **factory: Any) -> None:
        for name in ("alpha", "beta", "gamma"):
            setattr(self, name, nn.Parameter(torch.ones(self.heads, **factory)))

    def start(self) -> None:
        self.set_logits_to_zero()
        set_orthogonal(self.v)
        set_orthogonal(self.o)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        alpha, beta, gamma = (self.per_head(p) for p in (self.alpha, self.beta, self.gamma))
        return alpha * v + beta * self.attend(q, k, v, mask) - gamma * self.uniform(q, k, v, mask)
