"""Attention `espa`: exponential signal preserving attention, A ← D softmax(q kᵀ / √d_h + B), W_Q = 0 at the start.

He et al. 2023, *Deep Transformers without Shortcuts*, arXiv:2302.10322, section 3.2. With orthogonal W_V W_O a layer
turns the kernel Σ of the tokens into A Σ Aᵀ. E-SPA asks for Σ_l = (exp(-γ_l |i - j|))_ij after layer l:

    A_l = L_l L_{l-1}⁻¹,   Σ_l = L_l L_lᵀ       L_l the Cholesky factor for causal attention, else the symmetric root
    A_l = D P,             B = log P            D the sums of the rows, P has rows that sum to 1
    α_l = √(1 - exp(-2γ_l)) = α_L^(l/L)         so that the diagonals α_l / α_{l-1} are the same in all layers

The tokens start uncorrelated, γ_0 = ∞, and end at γ_L. D and B are frozen. For causal attention A_l has a closed form,
which takes texts of any length. Without causality positions are the tokens' numbers, in two dimensions row by row.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from unskip.methods.attention.self_attention import AttentionSpec, SelfAttention, set_orthogonal

torch.fx.wrap("rows_and_bias")  # one node of a symbolic trace (torch.fx), which knows no sizes

GAMMA_L = 0.005  # after the last layer


def gamma_of(layer: int, depth: int, gamma_L: float = GAMMA_L) -> float:
    """γ_l after `layer` of `depth` layers: infinite before the first, γ_L after the last."""
    squared = (-math.expm1(-2 * gamma_L)) ** (layer / depth)  # α_l²
    return math.inf if layer == 0 else -math.log1p(-squared) / 2


def causal_attention(position: Tensor, before: float, after: float) -> Tensor:
    """L(after) L(before)⁻¹ for the kernels exp(-γ |i - j|): (T, T), lower triangular.

    L is that of a stationary autoregressive sequence: L_i1 = exp(-γ(i-1)), L_ij = α exp(-γ(i-j)) for j > 1. L⁻¹ takes
    differences, z_j = (x_j - exp(-γ) x_{j-1}) / α, so that column j of the product is one column of L less the next.
    """
    ratio = math.sqrt(math.expm1(-2 * after) / math.expm1(-2 * before)) if before < math.inf else alpha(after)
    distance = position[:, None] - position[None, :]
    decay = torch.exp(-after * distance.clamp(min=0))
    below = ratio * decay * -math.expm1(after - before) if before < math.inf else ratio * decay
    first = decay - (ratio * decay * math.exp(after - before) if before < math.inf else 0.0)
    matrix = torch.where(position[None, :] == position[:1], first, below)
    matrix = matrix.masked_fill(distance == 0, ratio).masked_fill(distance < 0, 0.0)
    return matrix.masked_fill((distance == 0) & (position == position[:1]), 1.0)


def alpha(gamma: float) -> float:
    """α = √(1 - exp(-2γ))."""
    return math.sqrt(-math.expm1(-2 * gamma))


@lru_cache(maxsize=64)
def symmetric_attention(tokens: int, before: float, after: float) -> np.ndarray:
    """Σ(after)^½ Σ(before)^-½ in float64: (T, T).

    For an endless sequence its entries are positive: log of its spectrum is Σ_n (φ^n - φ'^n) / n cos nω, φ = exp(-γ).
    For a finite one the ends may leave small negative entries, which become 0.
    """
    distance = np.abs(np.subtract.outer(np.arange(tokens), np.arange(tokens)))

    def power(gamma: float, exponent: float) -> np.ndarray:
        values, vectors = np.linalg.eigh(np.exp(-gamma * distance))
        return (vectors * values**exponent) @ vectors.T

    matrix = power(after, 0.5) @ power(before, -0.5) if before < math.inf else power(after, 0.5)
    return matrix.clip(min=0)


@torch.compiler.assume_constant_result
def symmetric_constant(tokens: int, before: float, after: float) -> Tensor:
    """`symmetric_attention` as a constant of a compiled or exported program."""
    return torch.from_numpy(symmetric_attention(tokens, before, after))


def rows_and_bias(q: Tensor, before: float, after: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """D, (T, 1), and B, (T, T), for queries of shape (B, heads, T, d_h)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if causal:
        matrix = causal_attention(torch.ones_like(q[0, 0, :, 0], dtype=wide).cumsum(0), before, after)
    else:
        matrix = symmetric_constant(q.shape[2], before, after).to(wide).to(q.device)
    D = matrix.sum(1, keepdim=True)
    B = (matrix / D).clamp_min(torch.finfo(wide).tiny).log()
    if causal:
        B = B.masked_fill(matrix == 0, torch.finfo(wide).min)
    return D.to(q.dtype), B.to(q.dtype)


class ESPAttention(SelfAttention):
    """y = W_O D softmax(q kᵀ / √d_h + B) W_V x."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.before, self.after = gamma_of(spec.layer, spec.depth), gamma_of(spec.layer + 1, spec.depth)

    def start(self) -> None:
        self.set_logits_to_zero()
        set_orthogonal(self.v)
        set_orthogonal(self.o)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        D, B = rows_and_bias(q, self.before, self.after, causal=self.causal)
        return D * self.attend(q, k, v, mask, B)

    def extra_repr(self) -> str:
        return f"gamma={self.before:.4g} to {self.after:.4g}"
