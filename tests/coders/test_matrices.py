"""Closed-form coders against what the formulas promise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unskip.coders import CoderSpec, averaging, floor, make_coder

RELU = nn.ReLU()


def spec(**changes: object) -> CoderSpec:
    base = {"channels": 16, "code": 8, "pretext": "group_average", "act": "ReLU()"}
    return CoderSpec(**{**base, **changes})


@given(st.integers(1, 40), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_averaging_has_orthonormal_rows_that_cover_every_channel(groups: int, more: int) -> None:
    matrix = averaging(groups, groups + more)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(groups, dtype=torch.float64))
    assert (matrix > 0).sum() == groups + more
    assert torch.all(matrix >= 0)


@pytest.mark.parametrize(("channels", "code"), [(16, 8), (64, 32), (24, 12), (256, 32), (10, 4)])
def test_group_average_is_on_the_floor_and_idempotent(channels: int, code: int) -> None:
    coder = make_coder(spec(channels=channels, code=code), RELU, dtype=torch.float64)
    x = torch.randn(200_000 // channels, channels, 1, 1, dtype=torch.float64).relu()
    once = coder(x)
    mse = (once - x).square().mean().item()
    expected = floor(spec(channels=channels, code=code, pretext="rectified_normal"))
    assert mse == pytest.approx(expected, rel=0.03)
    torch.testing.assert_close(coder(once.relu()), once)


def test_the_floor_of_the_papers_choice() -> None:
    assert floor(spec(pretext="rectified_normal")) == pytest.approx(0.5 * (0.5 - 1 / (2 * math.pi)))
    assert floor(spec(pretext="rectified_normal")) == pytest.approx(0.1704, abs=5e-5)


def test_identity_keeps_the_first_channels_and_loses_the_rest() -> None:
    coder = make_coder(spec(pretext="identity"), RELU)
    x = torch.rand(2, 16, 3, 3)
    torch.testing.assert_close(coder(x)[:, :8], x[:, :8])
    assert not coder(x)[:, 8:].any()


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU()], ids=["relu", "gelu"])
def test_a_paired_coder_carries_signs(act: nn.Module) -> None:
    """σ(z) - σ(-z) = z, so what it carries, it carries exactly, and a second pass changes nothing."""
    coder = make_coder(spec(paired=True, code=8, act=repr(act)), act, dtype=torch.float64)
    x = torch.randn(4, 16, 3, 3, dtype=torch.float64)
    expected = torch.einsum("gc,gd,ndhw->nchw", averaging(4, 16), averaging(4, 16), x)
    torch.testing.assert_close(coder(x), expected)
    torch.testing.assert_close(coder(coder(x)), coder(x))


def test_random_is_he_normal_and_seeded() -> None:
    big = spec(channels=256, code=128, kernel=3, pretext="random")
    one, two = make_coder(big, RELU), make_coder(big, RELU)
    other = make_coder(spec(channels=256, code=128, kernel=3, pretext="random", seed=1), RELU)
    assert torch.equal(one.enc, two.enc)
    assert not torch.equal(one.enc, other.enc)
    assert one.enc.std().item() == pytest.approx(math.sqrt(2 / (256 * 9)), rel=0.02)
    assert one.dec.std().item() == pytest.approx(math.sqrt(2 / (128 * 9)), rel=0.02)


@pytest.mark.parametrize("changes", [{"code": 0}, {"code": 16}, {"code": 7, "paired": True}])
def test_impossible_widths_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="code="):
        spec(**changes)


def test_an_unknown_pretext_task_is_refused() -> None:
    with pytest.raises(ValueError, match="pretext='gaussian' is not known"):
        make_coder(spec(pretext="gaussian"), RELU)
