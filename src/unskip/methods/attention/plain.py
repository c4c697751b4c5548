"""Attention `plain`: the skip is removed and nothing else, x ← W_O A(X) W_V x."""

from unskip.methods.attention.self_attention import SelfAttention


class PlainAttention(SelfAttention):
    """A(X), with the block's own weights."""
