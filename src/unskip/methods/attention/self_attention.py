"""Self-attention of any library as one module whose attention matrix a method can change.

q, k, v = W_Q x, W_K x, W_V x          A(X) = softmax(q kᵀ / √d_h + bias + mask)          y = W_O A v
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.methods.inits import orthogonal_like

torch.fx.wrap("additive")  # one node of a symbolic trace (torch.fx), which knows no dtypes

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The parts of a block's self-attention. A reader makes it."""

    q: nn.Linear
    k: nn.Linear  # of fewer rows than q where heads share keys and values (grouped queries)
    v: nn.Linear
    o: nn.Linear
    heads: int  # of the queries
    write: Callable[[nn.Module, nn.Module], None]  # (block, attention): puts it there, and takes the skip away
    causal: bool = False
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    bias: nn.Module | None = None  # of relative positions: called without arguments, it returns (1, heads, T, T)
    drop: float = 0.0  # of the attention matrix
    out_drop: float = 0.0
    layer: int = 0  # the number of this attention in the network, from 0; `plainify` sets it
    depth: int = 1  # how many there are


class SelfAttention(nn.Module):
    """Self-attention with the weights of a spec. Methods redefine `mix`, and `start` for another initialisation."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        assert not (spec.causal and spec.bias is not None), "a bias of positions replaces causality"
        self.heads, self.causal, self.drop = spec.heads, spec.causal, spec.drop
        self.head_dim = spec.q.out_features // spec.heads
        self.shared = spec.q.out_features // spec.k.out_features  # heads of queries that share keys and values
        self.q, self.k, self.v, self.o = (copy.deepcopy(layer) for layer in (spec.q, spec.k, spec.v, spec.o))
        self.q_norm = nn.Identity() if spec.q_norm is None else spec.q_norm
        self.k_norm = nn.Identity() if spec.k_norm is None else spec.k_norm
        self.bias = spec.bias
        self.out_drop = nn.Dropout(spec.out_drop)

    @classmethod
    def build(cls, spec: AttentionSpec) -> Self:
        """The attention of a skip-free block, initialised as the method asks for."""
        attention = cls(spec)
        attention.add_gains(device=spec.q.weight.device, dtype=spec.q.weight.dtype)
        with torch.no_grad():
            attention.start()
        return attention

    def add_gains(self, **factory: Any) -> None:
        """Adds the trained gains of the method; none by default."""

    def start(self) -> None:
        """Initialises the weights; by default they stay those of the spec."""

    def set_logits_to_zero(self) -> None:
        """Zeroes W_Q, the shift of its norm and the bias of relative positions, so that A(X) is the uniform C."""
        biases = () if self.bias is None else self.bias.parameters()
        for parameter in (*self.q.parameters(), getattr(self.q_norm, "bias", None), *biases):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def start_mlp(self, mlp: nn.Module) -> None:
        """Initialises the MLP of the block; by default it stays as it is."""

    def forward(self, x: Tensor, mask: Tensor | None = None, rotary: Rotary | None = None) -> Tensor:
        """(B, T, C) to (B, T, C).

        Args:
            x: the tokens.
            mask: which tokens see which, (B, 1, T, T) or what broadcasts to it: True for those that are seen, or 0 and
                -inf. None is all of them or, in causal attention, those up to their own.
            rotary: turns queries and keys by their positions.
        """
        y = self.mix(*self.heads_of(x, rotary), mask)
        return self.out_drop(self.o(y.transpose(1, 2).flatten(2)))

    def heads_of(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of each head, (B, heads, T, d_h)."""
        q, k, v = (self.by_head(layer(x)) for layer in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotary(q, k)
        if self.shared > 1:
            k, v = k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1)
        return q, k, v

    @torch.no_grad()
    def matrix(self, x: Tensor, mask: Tensor | None = None, rotary: Rotary | None = None) -> Tensor:
        """A of the method, (B, heads, T, T), for the arguments of `forward` and without dropout."""
        q, k, _ = self.heads_of(x, rotary)
        drop, self.drop = self.drop, 0.0
        try:
            return self.mix(
                q, k, torch.eye(x.shape[1], dtype=x.dtype, device=x.device).expand(*q.shape[:2], -1, -1), mask
            )
        finally:
            self.drop = drop

    def by_head(self, x: Tensor) -> Tensor:
        """(B, T, heads * d_h) to (B, heads, T, d_h)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """A v, for the attention matrix A of the method; A(X) by default."""
        return self.attend(q, k, v, mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """A(X) v, with `bias` added to the logits, also to those of relative positions; it replaces the causal mask."""
        if self.bias is not None:
            mask = self.bias() if mask is None else self.bias() + mask
        if bias is not None:
            mask = bias + additive(mask, bias.dtype)
        return self.softmax(q, k, v, mask, self.drop if self.training else 0.0)

    def softmax(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
        causal = self.causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)

    def uniform(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """C v: the mean over the tokens that each one sees, bit for bit what A(X) v is for zero queries."""
        return self.softmax(torch.zeros_like(q), k, v, mask)

    def per_head(self, gain: Tensor) -> Tensor:
        """A gain by head, (heads,), in the shape that multiplies (B, heads, T, d_h)."""
        return gain[:, None, None]


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | float:
    """A mask as what is added to logits: 0 where a token is seen, a large negative number where it is not."""
    if mask is None:
        return 0.0
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


@torch.no_grad()
def set_orthogonal(layer: nn.Linear, gain: float | None = None) -> None:
    """Sets the weight to an orthogonal matrix times `gain`, and the bias to 0.

    By default the mean square of the output is that of the input.
    """
    rows, columns = layer.weight.shape
    layer.weight.copy_(orthogonal_like(layer.weight, max(1.0, rows / columns) ** 0.5 if gain is None else gain))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
