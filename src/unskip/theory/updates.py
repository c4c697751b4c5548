"""What an update does to a product of layers: for networks without skips, where a change of each layer multiplies."""

import math

from unskip.theory.checks import at_least, positive


def common_growth(eta: float, d_in: int, d_out: int, matrices: int, agreement: float = 0.5) -> float:
    """How much one update of ±η makes the direction that all tokens share grow, against all others::

        (1 + agreement η √(d_in d_out)) ^ matrices

    AdamW's first update has entries ±η. A matrix of them has the largest singular value η √(d_in d_out) if the signs
    have rank 1, and less where they disagree: 0.5 times that was measured in the middle of 24 layers of 128 channels
    (docs/attention.md). Weights start with singular values of 1, and the same direction is added in each of the layers.

    Args:
        eta: the learning rate.
        d_in: inputs of each matrix.
        d_out: outputs of each matrix.
        matrices: layers in a row, W_V and W_O of each block.
        agreement: the share of the largest possible singular value that an update has.
    """
    positive("common_growth", eta=eta, d_in=d_in, d_out=d_out)
    at_least("common_growth", 0, matrices=matrices, agreement=agreement)
    return (1 + agreement * eta * math.sqrt(d_in * d_out)) ** matrices
