"""The wide and centred network and the norm before pooling, against their formulas in plain PyTorch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.coders import Coder, CoderSpec, make_coder
from unskip.methods import PNNH
from unskip.methods.partial import PartialConv2d
from unskip.models.cifar import cifar_resnet
from unskip.models.named import WIDTHS
from unskip.surgery.tracing import trace

Carry = Callable[[Tensor, int], Tensor]  # a block's input and its output width to what the coder carries


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def randomise_norms(model: nn.Module) -> nn.Module:
    """The model with gains, biases and running statistics that differ from those of a fresh norm."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    return model


# ---------------------------------------------------------------- what a coder carries, by its formula


def mixed(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.einsum("oc,bchw->bohw", matrix, x)


def averaged_to(x: Tensor, code: int) -> Tensor:
    """The input of a transition, 2x2 means, on `code` channels: padded with zeros, or pairs over sqrt 2 if too wide."""
    x = F.avg_pool2d(x, 2)
    if x.shape[1] > code:
        x = (x[:, ::2] + x[:, 1::2]) / 2**0.5
    return F.pad(x, (0, 0, 0, 0, 0, code - x.shape[1]))


def carry_first_half(x: Tensor, width: int) -> Tensor:
    """Eq. 5: the first half of the channels, and zeros."""
    code = x[:, : width // 2] if x.shape[1] == width else averaged_to(x, width // 2)
    return F.pad(code, (0, 0, 0, 0, 0, width - code.shape[1]))


def carry_pairs(x: Tensor, width: int) -> Tensor:
    """Both channels of a pair receive the pair's mean; a transition writes its code over sqrt 2 into both."""
    code = (x[:, ::2] + x[:, 1::2]) / 2 if x.shape[1] == width else averaged_to(x, width // 2) / 2**0.5
    return code.repeat_interleave(2, 1)


def carry_nothing(x: Tensor, width: int) -> Tensor:
    return torch.zeros(())


def carry_by(model: nn.Module) -> Carry:
    """dec * relu(enc * x) with the weights of the model's coders; a transition reads the centre of the kernel."""
    coders = [module.matrices() for module in model.modules() if isinstance(module, Coder)]
    weights = {len(matrices["dec"]): (matrices["enc"], matrices["dec"]) for matrices in coders}

    def carry(x: Tensor, width: int) -> Tensor:
        enc, dec = weights[width]
        if x.shape[1] == width:
            code = F.conv2d(x, enc, padding=1)
        else:
            each = width // x.shape[1]  # a channel is spread over those that take its place
            code = mixed(F.avg_pool2d(x, 2).repeat_interleave(each, 1) / each**0.5, enc[:, :, 1, 1])
        return F.conv2d(code.relu(), dec, padding=1)

    return carry


# ---------------------------------------------------------------- the network, from its weights


class Weights:
    """A model's weights by name. `unused` are the parameters that nobody has asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.state = model.state_dict()
        self.unused = {name for name, _ in model.named_parameters()}

    def __call__(self, name: str) -> Tensor:
        self.unused.discard(name)
        return self.state[name]

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean, var, gain, bias = (
            self(f"{name}.{part}")[:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return gain * (x - mean) / (var + 1e-5).sqrt() + bias


def kernel(weights: Weights, name: str, centred: str) -> Tensor:
    """The dense 3x3 kernel; what a centred convolution has besides is a centre tap and zeros around it."""
    full = weights(f"{name}.weight")
    if f"{name}.centre" not in weights:
        return full
    centre = F.pad(weights(f"{name}.centre"), (1, 1, 1, 1))
    return torch.cat([full, centre], 1 if centred == "inputs" else 0)


def reference(model: nn.Module, depth: int, carry: Carry, x: Tensor) -> Tensor:
    """y = relu(W_2 * relu(norm(W_1 * x)) + coder(x)) block by block, a norm before pooling where the model has one."""
    w = Weights(model)
    h = w.norm("bn1", F.conv2d(x, w("conv1.weight"), padding=1)).relu()
    for stage in (1, 2, 3):
        for index in range((depth - 2) // 6):
            block = f"layer{stage}.{index}"
            stride = 2 if stage > 1 and index == 0 else 1
            if f"{block}.0.weight" in w:  # a whole transition: both norms, full width, no coder
                first = w.norm(f"{block}.1", F.conv2d(h, w(f"{block}.0.weight"), stride=stride, padding=1)).relu()
                h = w.norm(f"{block}.4", F.conv2d(first, w(f"{block}.3.weight"), padding=1)).relu()
                continue
            w_1 = kernel(w, f"{block}.learner.conv1", centred="inputs")
            w_2 = kernel(w, f"{block}.learner.conv2", centred="outputs")
            hidden = w.norm(f"{block}.learner.norm1", F.conv2d(h, w_1, stride=stride, padding=1)).relu()
            h = (F.conv2d(hidden, w_2, padding=1) + carry(h, len(w_2))).relu()
    if "norm.weight" in w:
        h = w.norm("norm", h)
    logits = h.mean((2, 3)) @ w("fc.weight").T + w("fc.bias")
    assert not w.unused, "the model has parameters that the formulas do not have"
    return logits


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


PAIRS = {"pretext": "group_average"}
TWICE = {"widths": (32, 64, 128), "hidden": {32: 8, 64: 16, 128: 31}}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options", "carry", "shape"),
    [
        ("pnnh_resnet110_wide", {}, carry_first_half, (WIDTHS, (8, 12, 19))),
        ("pnnh_resnet110_wide", TWICE, carry_first_half, ((32, 64, 128), (8, 16, 31))),
        ("pnnh_resnet20", {}, carry_first_half, ((16, 32, 64), (8, 16, 32))),
        ("pnnh_resnet20", {"uncarried": "1x1", "hidden": {16: 15, 32: 29, 64: 57}}, carry_first_half,
         ((16, 32, 64), (15, 29, 57))),
        ("pnnh_resnet20", PAIRS, carry_pairs, ((16, 32, 64), (8, 16, 32))),
        ("pnnh_resnet20", {**PAIRS, "head_norm": False}, carry_pairs, ((16, 32, 64), (8, 16, 32))),
        ("pnnh_resnet20", {**PAIRS, "widths": (32, 64, 128), "hidden": {32: 8, 64: 8, 128: 16}}, carry_pairs,
         ((32, 64, 128), (8, 8, 16))),
    ],
    ids=["centred, 3x", "centred, 2x", "He's widths", "centred", "pairs", "pairs, without head norm", "pairs, wide"],
)  # fmt: skip
@pytest.mark.usefixtures("float64")
def test_the_names_compute_their_formulas(
    name: str, options: dict[str, Any], carry: Carry, shape: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    torch.manual_seed(3)
    model = randomise_norms(unskip.create_model(name, **options)).eval()
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(
        model(x), reference(model, 110 if "110" in name else 20, carry, x), rtol=1e-10, atol=1e-10
    )
    stages = [model.get_submodule(f"layer{stage}.1.learner") for stage in (1, 2, 3)]
    assert (tuple(s.conv2.out_channels for s in stages), tuple(s.conv1.out_channels for s in stages)) == shape


@torch.no_grad()
@pytest.mark.parametrize("method", ["pnnh_paper", "pnnh"])
@pytest.mark.parametrize("pretext", ["random", "none", "identity"])
@pytest.mark.usefixtures("float64")
def test_the_rows_of_table_4_compute_their_formulas(method: str, pretext: str) -> None:
    """The paper's literal setting and ours; a coder that is no closed form, none at all, and Eq. 5."""
    torch.manual_seed(3)
    model = randomise_norms(unskip.plainify(cifar_resnet(20), method, pretext=pretext)).eval()
    carry = {"random": carry_by(model), "none": carry_nothing, "identity": carry_first_half}[pretext]
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(x), reference(model, 20, carry, x), rtol=1e-10, atol=1e-10)
    assert isinstance(model.norm, nn.Identity) == (method == "pnnh_paper")


@pytest.mark.parametrize(
    ("channels", "first", "last"),
    [(16, -0.271484375, 0.08544921875), (32, -0.1923828125, -0.162109375), (64, -0.1357421875, 0.0003376007080078125)],
)
def test_random_coders_are_those_of_the_record(channels: int, first: float, last: float) -> None:
    """The first weight of the encoder and the last of the decoder, in bfloat16, of Table 4's rows that were trained."""
    spec = CoderSpec(channels=channels, code=channels // 2, pretext="random", act="ReLU()", kernel=3)
    coder = make_coder(spec, nn.ReLU())
    assert coder.enc.bfloat16().flatten()[0].item() == first
    assert coder.dec.bfloat16().flatten()[-1].item() == last


def test_parameters_and_the_budget() -> None:
    """The counts of benchmarks/records/cifar-gap-log.md, and at most 0.55 of He's parameters at every depth."""
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
    plain = conv.to_ordinary()
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
        (lambda: PNNH(uncarried="1x1"), "uncarried='1x1' needs pretext='identity'.* not pretext='auto'"),
        (lambda: PNNH(uncarried="3x3"), "uncarried='3x3' is not known"),
        (lambda: PNNH(hidden={32: 0}), r"hidden=\{32: 0\} must give the learner's width"),
        (lambda: PNNH(hidden={32: 1.5}), "must give the learner's width"),
        (lambda: PNNH(hidden=8), "hidden=8 must give"),  # type: ignore[arg-type]
        (lambda: PNNH(head_norm="yes"), "head_norm='yes' must be true, false or None"),  # type: ignore[arg-type]
        (lambda: unskip.create_model("pnnh_resnet20_wide", hidden={48: 8}), "says nothing about blocks of width 96"),
        (lambda: unskip.create_model("resnet20", widths=(16, 32)), r"widths=\(16, 32\) must be three whole numbers"),
        (
            lambda: unskip.create_model("pnnh_resnet50", pretext="identity", uncarried="1x1"),
            "uncarried='1x1' is for blocks of two k x k convolutions, and it is bottleneck",
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
    network = randomise_norms(unskip.create_model(name)).double().eval()
    folded = unskip.fold(network, form)  # type: ignore[arg-type]
    assert not any(isinstance(m, nn.BatchNorm2d | PartialConv2d) for m in folded.modules())
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), network(x), rtol=1e-9, atol=1e-9)
    assert folded.fc.weight.shape == network.fc.weight.shape  # the norm costs nothing any more
