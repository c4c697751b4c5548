"""Blocks to write a network with by hand: their formulas, sizes counted by hand, and what folds them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unskip
from unskip.models.cifar import cifar_resnet


def hand_written() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = unskip.nn.PNNHBlock(16), unskip.nn.SeqBlock(16), unskip.nn.PNNHBlock(16, 32, stride=2)
    return nn.Sequential(
        stem, *blocks, unskip.nn.PlainBlock(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
    )


@pytest.mark.parametrize(
    ("block", "weights"),
    [
        (unskip.nn.PNNHBlock(16), 9 * 16 * 8 + 2 * 8 + 9 * 8 * 16),
        (unskip.nn.SeqBlock(16), 9 * 16 * 32 + 32 * 16 + 2 * 16),
        (unskip.nn.PlainBlock(16), 2 * (9 * 16 * 16 + 2 * 16)),
        (unskip.nn.PlainBlock(16, 32, stride=2), 9 * 32 * (16 + 32) + 4 * 32),
    ],
)
def test_sizes_by_hand(block: nn.Module, weights: int) -> None:
    assert sum(p.numel() for p in block.parameters() if p.requires_grad) == weights
    assert block.skip_free


@torch.no_grad()
def test_a_pnnh_block_is_its_formula() -> None:
    """The coder averages pairs of channels, and hands each average to both."""
    block, x = unskip.nn.PNNHBlock(8).eval(), torch.randn(2, 8, 5, 5)
    learnt = F.conv2d(
        block.learner.norm1(F.conv2d(x, block.learner.conv1.weight, padding=1)).relu(),
        block.learner.conv2.weight,
        padding=1,
    )
    pairs = x.unflatten(1, (4, 2)).mean(2).relu().repeat_interleave(2, 1)
    torch.testing.assert_close(block(x), (learnt + pairs).relu())


def test_a_pnnh_block_is_what_plainify_builds() -> None:
    built = unskip.plainify(cifar_resnet(8), "pnnh").layer2[0]
    ours = unskip.nn.PNNHBlock(16, 32, stride=2)
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [(n, p.shape) for n, p in built.named_parameters()]
    ours.load_state_dict(built.state_dict())
    x = torch.randn(2, 16, 8, 8).relu()
    torch.testing.assert_close(copy.deepcopy(ours).eval()(x), built.eval()(x))


def test_a_network_by_hand_trains_and_folds() -> None:
    net = hand_written()
    net(torch.randn(4, 3, 16, 16)).square().mean().backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)
    folded = unskip.fold(net.eval(), example=torch.randn(2, 3, 16, 16))
    assert not [m for m in folded.modules() if isinstance(m, nn.BatchNorm2d)]
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"unskip.nn: channels=0 must be a whole number, at least 1"):
        unskip.nn.PlainBlock(0)
    with pytest.raises(ValueError, match=r"unskip.nn: head_norm=True is a norm behind the last block; put it there"):
        unskip.nn.PNNHBlock(8, head_norm=True)


def test_printed_objects_are_a_few_lines() -> None:
    plain = unskip.convert(cifar_resnet(8).eval(), example=torch.randn(2, 3, 32, 32))
    lines = str(plain.surgery).splitlines()
    assert lines[0] == "rm: 3 blocks without skips (layer1.0 to layer3.0)"
    assert lines[1].startswith("the same function to ")
    assert len(str(plain.conversion).splitlines()) == 5
