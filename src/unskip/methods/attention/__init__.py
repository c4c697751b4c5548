"""Attention without a skip, one file per way: what `plainify(model, method, attention=...)` builds.

A block's attention, y = x + W_O A(X) W_V x, becomes y = W_O A W_V x. The ways differ in A and in how they start.
"""

from unskip._core.text import nearest
from unskip.methods.attention.cut import CutAttention
from unskip.methods.attention.espa import ESPAttention
from unskip.methods.attention.plain import PlainAttention
from unskip.methods.attention.self_attention import AttentionSpec, Rotary, SelfAttention
from unskip.methods.attention.shaped import ShapedAttention
from unskip.methods.attention.value_skipinit import ValueSkipInitAttention

KEEP = "keep"  # attention keeps its skip
ATTENTIONS: dict[str, type[SelfAttention]] = {
    "shaped": ShapedAttention,
    "value_skipinit": ValueSkipInitAttention,
    "espa": ESPAttention,
    "cut": CutAttention,
    "plain": PlainAttention,
}

__all__ = ["ATTENTIONS", "KEEP", "AttentionSpec", "Rotary", "SelfAttention", "check_attention"]


def check_attention(name: object) -> None:
    """Raises a ValueError if `name` is no way to treat attention."""
    known = [*ATTENTIONS, KEEP]
    if name not in known:
        raise ValueError(f"plainify: attention={name!r} is not known.{nearest(str(name), known)}")
