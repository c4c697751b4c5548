"""The similarity of the tokens of one input. At 1 (rank collapse) no later layer can tell them apart.

    mean over i ≠ j of cos(x_i, x_j)        Dong et al. 2021, arXiv:2103.03404; He et al. 2023, arXiv:2302.10322

Without skips, attention averages the tokens layer by layer. The gradient can't tell apart tokens that are equal.
"""

from torch import Tensor
from torch.nn import functional as F

from unskip.measures.measuring import register_measure
from unskip.measures.probe import Layer


def token_similarity(x: Tensor) -> float:
    """The mean cosine similarity of two different tokens of one input, for tokens x (B, T, C)."""
    unit = F.normalize(x.float(), dim=-1)
    count = unit.shape[1]
    pairs = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))  # without those of a token with itself
    return (pairs / (count * (count - 1))).mean().item()


def tokens(layer: Layer, x: Tensor | None, y: Tensor) -> float | None:
    """The mean cosine similarity of two tokens of one input.

    Near 1 (rank collapse) no later layer can tell them apart, and a network that starts so does not learn.
    """
    return token_similarity(y) if y.ndim == 3 and y.shape[1] > 1 else None


register_measure(tokens, default=False)
