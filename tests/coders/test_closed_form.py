"""A cheap coder is the closed-form coder, without its matrices."""

import pytest
import torch
from torch import nn

from unskip.coders import ClosedFormCoder, Coder, CoderSpec, closed_of, make_coder


def closed_form(coder: Coder) -> object:
    return closed_of(coder.enc, coder.dec, coder.act, coder.depth)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("pretext", "channels", "code"), [("group_average", 12, 4), ("identity", 10, 4)])
def test_a_cheap_coder_is_the_coder(pretext: str, channels: int, code: int, linear: bool, paired: bool) -> None:
    spec = CoderSpec(channels=channels, code=code, pretext=pretext, act="ReLU()", linear=linear, paired=paired, depth=2)
    coder = make_coder(spec, nn.ReLU())
    cheap = closed_form(coder)
    assert cheap is not None
    x = torch.randn(3, 5, channels) if linear else torch.randn(3, channels, 5, 4)
    torch.testing.assert_close(cheap(x.double()), coder.double()(x.double()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("code", [6, 2])  # groups that are summed slice by slice, and others
def test_a_traced_cheap_coder_keeps_to_the_memory_layout_it_is_given(code: int) -> None:
    spec = CoderSpec(channels=12, code=code, pretext="group_average", act="ReLU()")
    cheap = ClosedFormCoder(closed_form(make_coder(spec, nn.ReLU())))  # type: ignore[arg-type]
    traced = torch.fx.symbolic_trace(cheap)
    x = torch.randn(3, 12, 5, 4)
    for layout in (torch.contiguous_format, torch.channels_last):
        y = cheap(x.to(memory_format=layout))
        assert y.is_contiguous(memory_format=layout)
        assert torch.equal(traced(x.to(memory_format=layout)), y)
        torch.testing.assert_close(y, cheap(x))


def test_groups_of_different_sizes_and_fitted_weights_have_no_cheap_form() -> None:
    assert (
        closed_form(make_coder(CoderSpec(channels=7, code=3, pretext="group_average", act="ReLU()"), nn.ReLU())) is None
    )
    assert closed_form(make_coder(CoderSpec(channels=8, code=4, pretext="random", act="ReLU()"), nn.ReLU())) is None
