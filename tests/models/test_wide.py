"""The wide and centred network and the norm before pooling, against the networks that were measured (cifar_gap)."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.coders import Coder, CoderSpec, make_coder
from unskip.methods import PNNH, PartialConv2d
from unskip.models.cifar import cifar_resnet
from unskip.models.named import WIDTHS
from unskip.ship.tracing import trace

FOLDER = Path(__file__).parents[2] / "benchmarks" / "cifar_gap"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cifar_gap_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    return script("networks")


@pytest.fixture(scope="module")
def to_library() -> ModuleType:
    return script("to_library")


def trained_like(network: nn.Module) -> nn.Module:
    """Gains, biases and statistics that are not those of a fresh norm."""
    with torch.no_grad():
        for module in network.modules():
            if hasattr(module, "mean") and hasattr(module, "var"):
                module.mean.normal_(0, 0.2)
                module.var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    return network


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def exact_transitions(measured: ModuleType, network: nn.Module, config: Any) -> None:
    """They were measured with the fixed maps of transitions in bfloat16, 0.707 for 1/sqrt(2); here they are exact."""
    for block in network.blocks:
        if block.matrix is not None and block.stride != 1:
            cin, cout = block.matrix.shape[1], block.conv2.out_channels
            if config.path == "fitted":
                enc, block.decoder = measured.fitted_coder(config.coder, cout)
                exact = measured.fitted_transition(enc, cin)
            else:
                exact = measured.transition_matrix(config, cin, cout)
            torch.testing.assert_close(block.matrix.double()[:, :, 0, 0], exact, rtol=4e-3, atol=1e-6)
            block.matrix = exact[:, :, None, None]


def forward(measured: nn.Module, x: Tensor) -> Tensor:
    """As its own, which takes the last mean in float32."""
    h = measured.stem_norm(measured.stem(x)).relu()
    for block in measured.blocks:
        h = block(h)
    if measured.head_norm is not None:
        h = measured.head_norm(h)
    return measured.head(h.mean((2, 3)))


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


CENTRED = {"path": "half", "centred": True, "head_norm": True}
PAIRS = {"pretext": "group_average"}
TWICE = {"widths": (32, 64, 128), "hidden": {32: 8, 64: 16, 128: 31}}


@pytest.mark.parametrize(
    ("name", "options", "config"),
    [
        ("pnnh_resnet110_wide", {}, {**CENTRED, "widths": WIDTHS, "hidden": (8, 12, 19)}),
        ("pnnh_resnet110_wide", TWICE, {**CENTRED, "widths": (32, 64, 128), "hidden": (8, 16, 31)}),
        ("pnnh_resnet20", {}, {"blocks": 3, "head_norm": True, "path": "half"}),
        ("pnnh_resnet20", {"transient": "centre", "hidden": {16: 15, 32: 29, 64: 57}},
         {**CENTRED, "blocks": 3, "hidden": (15, 29, 57)}),
        ("pnnh_resnet20", PAIRS, {"blocks": 3, "head_norm": True}),
        ("pnnh_resnet20", {**PAIRS, "head_norm": False}, {"blocks": 3}),
        ("pnnh_resnet20", {**PAIRS, "widths": (32, 64, 128), "hidden": {32: 8, 64: 8, 128: 16}},
         {"blocks": 3, "widths": (32, 64, 128), "hidden": (8, 8, 16), "head_norm": True}),
    ],
    ids=["centred, 3x", "centred, 2x", "He's widths", "centred", "pairs", "pairs, without head norm", "pairs, wide"],
)  # fmt: skip
@pytest.mark.usefixtures("float64")
def test_it_is_the_network_that_was_measured(
    measured: ModuleType, to_library: ModuleType, name: str, options: dict[str, Any], config: dict[str, Any]
) -> None:
    theirs = measured.Network(measured.NetworkConfig(**config), seed=3)
    trained_like(theirs).eval()
    exact_transitions(measured, theirs, measured.NetworkConfig(**config))
    ours = unskip.create_model(name, **options).eval()
    to_library.load(ours, theirs.state_dict())
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), forward(theirs, x), rtol=1e-10, atol=1e-10)
    assert count(ours) == measured.trained_parameters(theirs)


@pytest.mark.parametrize("method", ["pnnh_paper", "pnnh"])
@pytest.mark.parametrize("pretext", ["random", "none", "identity"])
@pytest.mark.usefixtures("float64")
def test_the_rows_of_table_4_are_the_library_s(
    measured: ModuleType, to_library: ModuleType, method: str, pretext: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paper's literal setting and ours; a coder that is no closed form, none at all, and Eq. 5."""
    ours = unskip.plainify(cifar_resnet(20), method, pretext=pretext).eval()
    coders = {m.dec.shape[0]: m for m in ours.modules() if isinstance(m, Coder)}
    monkeypatch.setattr(measured, "fitted_coder", lambda name, channels: (coders[channels].enc, coders[channels].dec))
    path = {"random": {"path": "fitted", "coder": "random"}, "identity": {"path": "half"}}.get(
        pretext, {"path": "none"}
    )
    paper = {"transition": "whole", "scale": 1.0} if method == "pnnh_paper" else {"head_norm": True}
    config = measured.NetworkConfig(blocks=3, **path, **paper)
    theirs = measured.Network(config, seed=3)
    trained_like(theirs).eval()
    exact_transitions(measured, theirs, config)
    to_library.load(ours, theirs.state_dict())
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), forward(theirs, x), rtol=1e-10, atol=1e-10)
    assert count(ours) == measured.trained_parameters(theirs)


def test_coders_that_travel_are_those_that_the_library_makes(measured: ModuleType) -> None:
    for channels in (16, 32, 64):
        spec = CoderSpec(channels=channels, code=channels // 2, pretext="random", act="ReLU()", kernel=3)
        coder = make_coder(spec, nn.ReLU())
        for stored, made in zip(measured.fitted_coder("random", channels), (coder.enc, coder.dec), strict=True):
            torch.testing.assert_close(stored, made.bfloat16().float(), rtol=0, atol=0)
    assert {name.rsplit(".", 2)[0] for name in measured.fitted_coders()} == {
        "random", "random_1", *(f"{t}{s}" for t in ("rectified_normal", "normal", "uniform") for s in ("", "_start"))
    }  # fmt: skip


def test_parameters_and_the_budget() -> None:
    """The counts of the log (benchmarks/cifar_gap/README.md), and at most 0.55 of He's parameters at every depth."""
    with torch.device("meta"):
        assert count(unskip.create_model("pnnh_resnet110_wide")) == 926_230
        assert count(unskip.create_model("pnnh_resnet110_wide", **TWICE)) == 936_614
        assert count(unskip.create_model("pnnh_resnet110")) == 862_522 + 128
        assert count(cifar_resnet(110)) == 1_727_962
        for depth in (20, 32, 44, 56, 110):
            wide = unskip.create_model(f"pnnh_resnet{depth}_wide")
            assert 0.53 < count(wide) / count(cifar_resnet(depth)) <= 0.55


@torch.no_grad()
@pytest.mark.parametrize("side", ["reads", "writes"])
def test_the_centre_restriction_is_real(side: str) -> None:
    """As two convolutions by PyTorch's functions; stored are the taps that there are and no others."""
    like = nn.Conv2d(6, 10, 3, stride=2, padding=1, bias=False)
    conv = PartialConv2d(like, 4, side=side).double()  # type: ignore[arg-type]
    x = torch.randn(2, 6, 9, 8, dtype=torch.float64)
    if side == "reads":
        expected = F.conv2d(x[:, :4], conv.weight, stride=2, padding=1) + F.conv2d(x[:, 4:], conv.centre, stride=2)
        assert count(conv) == 10 * (4 * 9 + 2)
    else:
        parts = F.conv2d(x, conv.weight, stride=2, padding=1), F.conv2d(x, conv.centre, stride=2)
        expected = torch.cat(parts, 1)
        assert count(conv) == 6 * (4 * 9 + 6)
    torch.testing.assert_close(conv(x), expected, rtol=1e-12, atol=1e-12)
    plain = conv.plain()
    assert type(plain) is nn.Conv2d
    torch.testing.assert_close(plain(x), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="full=10 must be at least 1 and less than"):
        PartialConv2d(like, 10, side=side)  # type: ignore[arg-type]


def test_it_starts_at_hes_scale_over_the_fan_in_that_there_is() -> None:
    """As the measured one: what is carried at 0.3 of He's, what is not at He's."""
    block = unskip.create_model("pnnh_resnet20_wide").layer3[1]
    first, last = block.learner.conv1, block.learner.conv2
    h = first.out_channels
    fan = 9 * 96 + 96
    for weight, std in (
        (first.weight, (2 / fan) ** 0.5),
        (first.centre, (2 / fan) ** 0.5),
        (last.weight, 0.3 * (2 / (9 * h)) ** 0.5),
        (last.centre, (2 / h) ** 0.5),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: PNNH(transient="centre"), "transient='centre' needs pretext='identity'.* not pretext='auto'"),
        (lambda: PNNH(transient="middle"), "transient='middle' is not known"),
        (lambda: PNNH(hidden={32: 0}), r"hidden=\{32: 0\} must give the learner's width"),
        (lambda: PNNH(hidden={32: 1.5}), "must give the learner's width"),
        (lambda: PNNH(hidden=8), "hidden=8 must give"),  # type: ignore[arg-type]
        (lambda: PNNH(head_norm="yes"), "head_norm='yes' must be true, false or None"),  # type: ignore[arg-type]
        (lambda: unskip.create_model("pnnh_resnet20_wide", hidden={48: 8}), "says nothing about blocks of width 96"),
        (lambda: unskip.create_model("pnnh_resnet18", head_norm=True), "ResNet has no place for a norm before its"),
        (lambda: unskip.create_model("resnet20", widths=(16, 32)), r"widths=\(16, 32\) must be three whole numbers"),
        (
            lambda: unskip.create_model("pnnh_resnet50", pretext="identity", transient="centre"),
            "transient='centre' is for blocks of two k x k convolutions, and it is bottleneck",
        ),
    ],
)
def test_wrong_options_are_refused(build: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()


def test_options_from_a_recipe_have_lists_and_text_keys() -> None:
    network = unskip.create_model("pnnh_resnet20_wide", widths=[16, 32, 64], hidden={"16": 4, "32": 8, "64": 9})
    assert [network.layer3[1].learner.conv1.out_channels, network.layer3[1].learner.conv2.out_channels] == [9, 64]


@torch.no_grad()
def test_the_norm_before_pooling_is_where_it_is_wanted() -> None:
    """On for `pnnh` on CIFAR networks, off in the paper's setting and for residual networks, elsewhere none."""

    def has(network: nn.Module) -> bool:
        return isinstance(network.norm, nn.BatchNorm2d)

    residual = cifar_resnet(8)
    assert not has(residual)
    assert has(cifar_resnet(8, head_norm=True))
    assert has(unskip.plainify(residual))
    assert not has(residual), "the given network stays untouched"
    assert not has(unskip.plainify(residual, head_norm=False))
    assert not has(unskip.plainify(residual, "pnnh_paper"))
    assert has(unskip.plainify(residual, "pnnh_paper", head_norm=True))
    assert not has(unskip.plainify(residual, "plain"))
    assert has(unskip.plainify(residual, "residual_half"))
    assert has(unskip.create_model("resnet20", head_norm=True))
    assert not has(unskip.create_model("pnnh_resnet20", head_norm=False))
    network = unskip.plainify(residual).eval()
    x = torch.randn(2, 3, 16, 16)
    steps = [step.function for step in trace(network, x)]
    assert steps[-3:] == ["batch_norm", "mean", "linear"]


@pytest.mark.parametrize("form", ["dense", "fast"])
@pytest.mark.parametrize("name", ["pnnh_resnet20_wide", "pnnh_resnet20"])
def test_fold_absorbs_the_norm_and_the_centred_layers(name: str, form: str) -> None:
    network = unskip.create_model(name)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    network = network.double().eval()
    folded = unskip.fold(network, form)  # type: ignore[arg-type]
    assert not any(isinstance(m, nn.BatchNorm2d | PartialConv2d) for m in folded.modules())
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), network(x), rtol=1e-9, atol=1e-9)
    assert folded.fc.weight.shape == network.fc.weight.shape  # the norm costs nothing any more
