"""The wide PNNH networks for CIFAR: a path as wide as He's ResNet, at about half of its parameters (docs/results.md).

Widths are twice He's, and the coder `identity` carries half of the channels, so C_B = C/2 is He's width. What is not
carried is read and written through the centre tap alone. A block of width C whose learner has the hidden width h then
has 2 h (9 + 1) C/2 weights and 2 h of the norm; He's block of width C/2 has 18 (C/2)^2 weights.
"""

from typing import Any

from unskip.models.cifar import HE

WIDTHS = tuple(2 * width for width in HE)
SHARE = 0.55  # of the parameters of He's network of the same depth


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


def hidden_widths(blocks: int, widths: tuple[int, ...] = WIDTHS, share: float = SHARE) -> dict[int, int]:
    """Learners of C/4, the widest ones narrowed until the network has at most `share` of He's parameters."""
    hidden = {width: width // 4 for width in widths}
    while wide_parameters(blocks, hidden) > share * he_parameters(blocks):
        hidden[widths[-1]] -= 1
    return hidden


def wide_options(depth: int) -> dict[str, Any]:
    """The options of `pnnh` that make the wide network of this depth."""
    return {"pretext": "identity", "transient": "centre", "hidden": hidden_widths(depth // 6)}
