"""Blocks for networks without skip connections that are written by hand, the same as `unskip.plainify` builds.

    net = nn.Sequential(stem, unskip.nn.PNNHBlock(64), unskip.nn.PNNHBlock(64, 128, stride=2), pool, head)

Each reads (B, channels, H, W) and returns (B, out_channels, H / stride, W / stride): two convolutions in the place of a
residual basic block (He et al. 2016, arXiv:1512.03385). `unskip.fold`, `export` and `unskip.io.save` take them.
"""

from typing import Any

from torch import nn

from unskip.coders import CoderBank
from unskip.methods import PNNH, BlockSpec, Method, Plain
from unskip.methods.seq import Seq

__all__ = ["CoderBank", "PNNHBlock", "PlainBlock", "SeqBlock"]


def PNNHBlock(
    channels: int,
    out_channels: int | None = None,
    *,
    stride: int = 1,
    act: nn.Module | None = None,
    bank: CoderBank | None = None,
    **options: Any,
) -> nn.Module:
    """Returns a block of `channels` with a trained learner beside a frozen coder of half the width.

    Zhang et al. 2024, https://arxiv.org/abs/2402.08645, section 4; C = channels, C_B = C / 2:

        y = σ( learner(x) + coder(x) )
        learner(x) = W_2 ⊛ σ(norm(W_1 ⊛ x))     W_1: 3 x 3, C → C − C_B;  W_2: 3 x 3, C − C_B → C
        coder(x)   = W_dec ⊛ σ(W_enc ⊛ x)       C → C_B → C, frozen

    (B, C, H, W) -> (B, out_channels, H / stride, W / stride).

    Args:
        channels: of the input.
        out_channels: of the output; as many unless given.
        stride: of the first convolution, and of the coder.
        act: σ; ReLU unless given.
        bank: where blocks of one network share their coder. Only fitted coders have weights to share.
        options: of the method `pnnh`, for instance ratio=0.25; `unskip models pnnh --methods` lists them. `head_norm`
            belongs to a whole network.

    Example:
        >>> block = unskip.nn.PNNHBlock(16, 32, stride=2)
        >>> block(torch.zeros(2, 16, 8, 8)).shape
        torch.Size([2, 32, 4, 4])
        >>> head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        >>> net = nn.Sequential(unskip.nn.PNNHBlock(3, 16), block, head)
        >>> unskip.fold(net.eval(), example=torch.zeros(2, 3, 8, 8))(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 10])
    """
    if options.get("head_norm"):
        raise ValueError("unskip.nn: head_norm=True is a norm behind the last block; put it there, before the pooling.")
    return _built(PNNH(**options), channels, out_channels, stride, act, bank)


def SeqBlock(channels: int, out_channels: int | None = None, *, stride: int = 1, **options: Any) -> nn.Module:
    """Returns a block of `channels` of one pair of convolutions, the second of which begins as the first's transpose.

    Hu, *Revisiting Exploding Gradient*, https://github.com/hukkai/no-residual-network:

        y = norm(W_2 ⊛ relu(W_1 ⊛ x))           W_1: 3 x 3, C → 2 C;  W_2: 1 x 1, 2 C → C, at the start W_1's centreᵀ

    (B, C, H, W) -> (B, out_channels, H / stride, W / stride). Arguments as in `PNNHBlock`, options of the method `seq`.

    Example:
        >>> unskip.nn.SeqBlock(16, 32, stride=2)(torch.zeros(2, 16, 8, 8)).shape
        torch.Size([2, 32, 4, 4])
    """
    return _built(Seq(**options), channels, out_channels, stride, None, None)


def PlainBlock(
    channels: int, out_channels: int | None = None, *, stride: int = 1, act: nn.Module | None = None
) -> nn.Module:
    """Returns a residual block of `channels` without its skip: the baseline.

        y = σ( norm_2(W_2 ⊛ σ(norm_1(W_1 ⊛ x))) )

    (B, C, H, W) -> (B, out_channels, H / stride, W / stride). Arguments as in `PNNHBlock`.

    Example:
        >>> unskip.nn.PlainBlock(16)(torch.zeros(2, 16, 8, 8)).shape
        torch.Size([2, 16, 8, 8])
    """
    return _built(Plain(), channels, out_channels, stride, act, None)


def _built(
    method: Method, channels: int, out_channels: int | None, stride: int, act: nn.Module | None, bank: CoderBank | None
) -> nn.Module:
    """The method's skip-free version of a residual block of two 3 x 3 convolutions."""
    out = channels if out_channels is None else out_channels
    for name, value in (("channels", channels), ("out_channels", out), ("stride", stride)):
        if type(value) is not int or value < 1:
            raise ValueError(f"unskip.nn: {name}={value!r} must be a whole number, at least 1.")
    act = nn.ReLU(inplace=True) if act is None else act
    branch = (
        nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), act,
        nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
    )  # fmt: skip
    shortcut = None
    if stride != 1 or out != channels:
        shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
    spec = BlockSpec(path="", branch=branch, shortcut=shortcut, out_act=act)
    block = method.build(spec, CoderBank() if bank is None else bank)
    assert block is not None
    return block
