"""A closed-form coder is its definition without the matrices, and knows its form wherever it goes."""

import copy
import io
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unskip
from unskip.coders import (
    ClosedFormCoder,
    ClosedFormTransition,
    CoderBank,
    CoderSpec,
    FittedCoder,
    averaging,
    make_coder,
)
from unskip.models.cifar import cifar_resnet


def group_average(code: int = 4, channels: int = 12, **options: object) -> CoderSpec:
    return CoderSpec(channels=channels, code=code, pretext="group_average", act="ReLU()", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("pretext", "channels", "code"), [("group_average", 12, 4), ("identity", 10, 4)])
def test_without_matrices_it_is_the_definition(
    pretext: str, channels: int, code: int, linear: bool, paired: bool
) -> None:
    spec = CoderSpec(channels=channels, code=code, pretext=pretext, act="ReLU()", linear=linear, paired=paired, depth=2)
    fast, dense = (make_coder(spec, nn.ReLU(), dense=dense, dtype=torch.float64) for dense in (False, True))
    assert [len(list(coder.buffers())) for coder in (fast, dense)] == [0, 2]
    x = torch.randn(3, 5, channels).double() if linear else torch.randn(3, channels, 5, 4).double()
    groups = code // 2 if paired else code
    matrix = averaging(groups, channels) if pretext == "group_average" else torch.eye(groups, channels).double()
    code = torch.einsum("gc,n...c->n...g", matrix, x if linear else x.movedim(1, -1))
    carried = torch.einsum("gc,n...g->n...c", matrix, code if paired else code.relu())
    expected = carried if linear else carried.movedim(-1, 1)
    for coder in (fast, dense, fast.to_ordinary(), dense.to_fast()):
        torch.testing.assert_close(coder(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("code", [6, 2])  # groups that are summed slice by slice, and others
def test_a_traced_coder_keeps_to_the_memory_layout_it_is_given(code: int) -> None:
    coder = make_coder(group_average(code), nn.ReLU())
    traced = torch.fx.symbolic_trace(coder)
    x = torch.randn(3, 12, 5, 4)
    for layout in (torch.contiguous_format, torch.channels_last):
        y = coder(x.to(memory_format=layout))
        assert y.is_contiguous(memory_format=layout)
        assert torch.equal(traced(x.to(memory_format=layout)), y)
        torch.testing.assert_close(y, coder(x))


def test_groups_of_different_sizes_need_the_matrices() -> None:
    coder = make_coder(group_average(3, 7), nn.ReLU())
    assert coder.to_fast() is None
    assert not coder.state_dict().keys() & {"enc", "dec"}
    x = torch.rand(2, 7, 3, 3)
    mean = [x[:, part].mean(1, keepdim=True).expand(-1, len(part), -1, -1) for part in ([0, 1, 2], [3, 4], [5, 6])]
    torch.testing.assert_close(coder(x), torch.cat(mean, 1))


def saved(coder: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(coder, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def reloaded(coder: nn.Module) -> nn.Module:
    with torch.device("meta"):
        empty = make_coder(coder.spec, nn.ReLU(), dense=coder.enc is not None)
    empty = empty.to_empty(device="cpu").double()
    empty.load_state_dict(coder.state_dict())
    return empty


TRAVELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half and back": lambda coder: coder.half().double(),
    "copied": copy.deepcopy,
    "pickled": saved,
    "from meta": reloaded,
}


@pytest.mark.parametrize("travel", TRAVELS.values(), ids=TRAVELS)
@pytest.mark.parametrize("dense", [False, True])
def test_it_stays_exact_wherever_it_goes(travel: Callable[[nn.Module], nn.Module], dense: bool) -> None:
    """Means of threes in float64: 1/√3 rounded to half precision on the way would be off by 1e-4."""
    x = torch.rand(2, 12, 3, 3, dtype=torch.float64)
    expected = (
        F.avg_pool1d(x.flatten(2).transpose(1, 2), 3).repeat_interleave(3, 2).transpose(1, 2).unflatten(2, (3, 3))
    )
    coder = travel(make_coder(group_average(4), nn.ReLU(), dense=dense, dtype=torch.float64))
    assert type(coder) is ClosedFormCoder
    torch.testing.assert_close(coder(x), expected, rtol=1e-15, atol=1e-15)


def network(pretext: str, **options: object) -> nn.Module:
    return unskip.plainify(cifar_resnet(8), pretext=pretext, hidden={16: 8, 32: 16, 64: 32}, **options)


def test_the_state_dict_names_the_form_and_holds_no_weight() -> None:
    state = network("group_average").state_dict()
    found = {key: bytes(value.tolist()).decode() for key, value in state.items() if "coder" in key}
    assert found == {
        "layer1.0.coder._extra_state": "group_average, 16 -> 8 -> 16",
        "layer2.0.coder.target._extra_state": "group_average, 32 -> 16 -> 32",
        "layer3.0.coder.target._extra_state": "group_average, 64 -> 32 -> 64",
    }


@pytest.mark.parametrize(
    ("built", "loaded", "says"),
    [
        ({"pretext": "identity"}, {"pretext": "group_average"},
         "'layer1.0.coder' is 'identity, 16 -> 8 -> 16', and the state dict is of 'group_average, 16 -> 8 -> 16'."),
        ({"pretext": "identity"}, {"pretext": "identity", "ratio": 0.25}, "state dict is of 'identity, 16 -> 4 -> 16'"),
        ({"pretext": "identity"}, {"pretext": "random"},
         "'layer1.0.coder' is 'identity, 16 -> 8 -> 16', and the state dict is of 'a fitted coder'. Build"),
        ({"pretext": "random"}, {"pretext": "identity"},
         "'layer1.0.coder' is 'a fitted coder', and the state dict is of 'identity, 16 -> 8 -> 16'. Build"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_another_form_are_refused(built: dict, loaded: dict, says: str, strict: bool) -> None:
    with pytest.raises(RuntimeError, match=re.escape(says)):
        network(**built).load_state_dict(network(**loaded).state_dict(), strict=strict)


@pytest.mark.parametrize("pretext", ["group_average", "identity"])
def test_matrices_are_no_closed_form(pretext: str) -> None:
    """Numbers that happen to be those of the form don't make a state dict one of it: nothing looks at them."""
    model = network(pretext)
    state = model.state_dict()
    del state["layer1.0.coder._extra_state"]
    state |= {f"layer1.0.coder.{name}": matrix for name, matrix in model.layer1[0].coder.matrices().items()}
    with pytest.raises(RuntimeError, match="the state dict is of 'a fitted coder'"):
        model.load_state_dict(state)


@pytest.mark.parametrize("travel", [*TRAVELS.values()][:3], ids=[*TRAVELS][:3])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("channels", "dense"), [(6, False), (6, True), (7, False)])
def test_a_transition_stays_exact_wherever_it_goes(
    travel: Callable[[nn.Module], nn.Module], channels: int, paired: bool, dense: bool
) -> None:
    spec = group_average(6, paired=paired)
    factory = {"in_channels": channels, "limit": 6, "stride": 2, "dense": dense, "dtype": torch.float64}
    coder, _ = CoderBank().take_transition(spec, nn.ReLU(), **factory)
    x = torch.randn(2, channels, 5, 4, dtype=torch.float64)
    expected = coder.to_ordinary()(x)
    torch.testing.assert_close(coder(x), expected, rtol=1e-12, atol=1e-12)
    moved = travel(coder)
    assert type(moved) is ClosedFormTransition
    torch.testing.assert_close(moved(x), expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_fast_fold_keeps_the_form(dtype: torch.dtype) -> None:
    model = network("group_average").to(dtype).eval()
    folded = unskip.fold(model, "fast")
    forms = [[m.form() for m in net.modules() if isinstance(m, ClosedFormCoder)] for net in (model, folded)]
    assert forms[0] == forms[1] == [f"group_average, {c} -> {c // 2} -> {c}" for c in (16, 32, 64)]
    assert not any("enc" in key or "dec" in key for key in folded.state_dict())


def test_a_fitted_coder_stores_its_weights() -> None:
    coder = make_coder(CoderSpec(channels=8, code=4, pretext="random", act="ReLU()"), nn.ReLU())
    assert type(coder) is FittedCoder
    assert list(coder.state_dict()) == ["enc", "dec"]
    x = torch.randn(2, 8, 3, 3)
    torch.testing.assert_close(coder.to_ordinary()(x), coder(x))
    assert not any(p.requires_grad for p in coder.to_ordinary().parameters())
