"""The wide PNNH networks for CIFAR: a wider path than that of He's ResNet, at about half of its parameters.

Widths are three times He's, and the coder `identity` carries half of the channels (C_B = C/2): 24/48/96 where He's
network has 16/32/64. What is not carried is read and written through the centre tap alone. A block of width C whose
learner has the hidden width h then has 2 h (9 + 1) C/2 weights and 2 h of the norm. Measured in docs/results.md.
"""

from typing import Any

from unskip.models.cifar import HE

WIDTHS = tuple(3 * width for width in HE)
EARLY = (8, 12)  # hidden widths of the first two stages; the third gets what the budget leaves
SHARE = 0.55  # the budget, of the parameters of He's network of the same depth


def he_parameters(blocks: int, widths: tuple[int, ...] = HE, *, classes: int = 10, in_chans: int = 3) -> int:
    """Of He's network with shortcuts of option A and `blocks` blocks in each stage."""
    total, read = (9 * in_chans + 2) * widths[0], widths[0]
    for width in widths:
        total += 9 * width * (read + width) + 4 * width  # the first block of the stage
        total += (blocks - 1) * (18 * width**2 + 4 * width)
        read = width
    return total + classes * (read + 1)


def wide_parameters(
    blocks: int, hidden: dict[int, int], *, ratio: float = 0.5, classes: int = 10, in_chans: int = 3
) -> int:
    """Of the PNNH network with these learners' widths by block width, transient channels centred, with a head norm."""
    read = next(iter(hidden))
    total = (9 * in_chans + 2) * read
    for width, h in hidden.items():
        for index in range(blocks):
            sides = [(c, round(ratio * c)) for c in (read if index == 0 else width, width)]
            total += sum(h * (9 * carried + c - carried) for c, carried in sides) + 2 * h
        read = width
    return total + 2 * read + classes * (read + 1)


def hidden_widths(
    blocks: int, widths: tuple[int, ...] = WIDTHS, early: tuple[int, ...] = EARLY, share: float = SHARE
) -> dict[int, int]:
    """Learners of the `early` widths, and in the last stage as wide as `share` of He's parameters allow."""
    hidden = dict(zip(widths, (*early, 1), strict=True))
    while wide_parameters(blocks, {**hidden, widths[-1]: hidden[widths[-1]] + 1}) <= share * he_parameters(blocks):
        hidden[widths[-1]] += 1
    return hidden


def wide_options(depth: int) -> dict[str, Any]:
    """The options of `pnnh` that make the wide network of this depth."""
    return {"pretext": "identity", "transient": "centre", "hidden": hidden_widths(depth // 6)}
