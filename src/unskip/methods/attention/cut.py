"""Attention `cut`: an initialisation under which A(X) alone trains.

Ji et al. 2025, *Cutting the Skip: Training Residual-Free Transformers*, arXiv:2510.00345, section 5.

    W_V W_O = c² times an orthonormal matrix              condition number 1
    W_Q W_Kᵀ = αZ + βI, Z_ij ~ N(0, 1/C)                  for each head, by its first d_h singular vectors
    MLP: orthogonal, scaled by √(larger / smaller side)

α = 2, β = 0.6 and c = 3 are what the paper uses for ViT-Base (α = 1.8, β = 1 for ViT-Small). Our reading: U and V of
a random matrix's singular vectors give W_V = cU and W_O = cVᵀ over all heads, since a head's part has rank d_h.
"""

from typing import Any

import torch
from torch import nn

from unskip.methods.attention.self_attention import SelfAttention, set_orthogonal

ALPHA, BETA, C = 2.0, 0.6, 3.0


class CutAttention(SelfAttention):
    """A(X) under the initialisation of Cutting the Skip."""

    def start(self) -> None:
        for layer in (self.v, self.o):
            set_orthogonal(layer)
            layer.weight.mul_(C)
        for layer in (self.q, self.k):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        size, shared = self.q.in_features, self.q.out_features // self.k.out_features
        draw: dict[str, Any] = {"device": self.q.weight.device}
        for head in range(self.heads):
            target = ALPHA * torch.randn(size, size, **draw) / size**0.5 + BETA * torch.eye(size, **draw)
            if target.is_meta:
                return
            U, S, Vt = torch.linalg.svd(target)
            root = S[: self.head_dim, None].sqrt()
            self.q.weight[head * self.head_dim : (head + 1) * self.head_dim] = root * U.T[: self.head_dim]
            if head % shared == 0:
                at = head // shared * self.head_dim
                self.k.weight[at : at + self.head_dim] = root * Vt[: self.head_dim]

    def start_mlp(self, mlp: nn.Module) -> None:
        for layer in mlp.modules():
            if isinstance(layer, nn.Linear):
                set_orthogonal(layer, (max(layer.weight.shape) / min(layer.weight.shape)) ** 0.5)
