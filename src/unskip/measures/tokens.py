"""How alike the tokens of one input are: 1 is rank collapse, behind which no layer can tell them apart.

    mean over i ≠ j of cos(x_i, x_j)        Dong et al. 2021, arXiv:2103.03404; He et al. 2023, arXiv:2302.10322

Without skips, attention averages tokens layer by layer, and a normalised token that is like all others has no gradient
that would tell it apart.
"""

from torch import Tensor
from torch.nn import functional as F

from unskip.measures.measuring import register_measure
from unskip.measures.probe import Layer


def token_similarity(x: Tensor) -> float:
    """The mean cosine between two tokens of one input; of tokens (B, T, C)."""
    unit = F.normalize(x.float(), dim=-1)
    count = unit.shape[1]
    total = unit.sum(1).square().sum(-1) - unit.square().sum(
        (1, 2)
    )  # of all pairs, without those of a token with itself
    return (total / (count * (count - 1))).mean().item()


def tokens(layer: Layer, x: Tensor | None, y: Tensor) -> float | None:
    """How alike tokens are.

    Near 1 (rank collapse) no layer behind can tell them apart; a network that starts so does not learn.
    """
    return token_similarity(y) if y.ndim == 3 and y.shape[1] > 1 else None


register_measure(tokens, default=False)
