"""Dirac parameterisation: the formula, written out otherwise, and the exact fold."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.feature_extraction import create_feature_extractor

import unskip
from unskip.methods import stacked
from unskip.methods.dirac import DiracConv2d, DiracLinear
from unskip.models import ENTRIES, about
from unskip.models.cifar import cifar_resnet

LAYERS = {
    "3x3": nn.Conv2d(6, 6, 3, padding=1, bias=False),
    "wider, strided, bias": nn.Conv2d(6, 15, 3, stride=2, padding=1),
    "narrower": nn.Conv2d(6, 4, 1),
    "grouped": nn.Conv2d(6, 12, 3, padding=1, groups=3),
    "depthwise, dilated": nn.Conv2d(6, 6, 5, padding=4, dilation=2, groups=6),
    "linear": nn.Linear(6, 9),
}


def dirac_layer(name: str) -> DiracConv2d | DiracLinear:
    like = LAYERS[name].double()
    layer = DiracLinear(like, 1.0, 0.1) if isinstance(like, nn.Linear) else DiracConv2d(like, 1.0, 0.1)
    for parameter in (layer.a, layer.b, *([] if layer.bias is None else [layer.bias])):
        nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_the_formula(name: str) -> None:
    """a times the input, channel by channel, plus b times what the normalised filters make of it."""
    layer, like = dirac_layer(name), LAYERS[name]
    x = torch.randn(2, 6, dtype=torch.float64) if isinstance(like, nn.Linear) else torch.randn(2, 6, 9, 8).double()
    out = layer.weight.shape[0]
    filters = torch.stack([w / w.square().sum().sqrt() for w in layer.weight])
    groups = getattr(like, "groups", 1)
    ins, outs = 6 // groups, out // groups
    source = [ins * (o // outs) + (o % outs) % ins for o in range(out)]
    if isinstance(like, nn.Linear):
        expected = layer.a * x[:, source] + layer.b * F.linear(x, filters) + layer.bias
    else:
        s = like.stride[0]
        learned = F.conv2d(x, filters, None, like.stride, like.padding, like.dilation, groups)
        bias = 0 if layer.bias is None else layer.bias.view(-1, 1, 1)
        expected = layer.a.view(-1, 1, 1) * x[:, source, ::s, ::s] + layer.b.view(-1, 1, 1) * learned + bias
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_it_folds_exactly(name: str) -> None:
    layer, like = dirac_layer(name), LAYERS[name]
    plain = layer.to_ordinary()
    assert type(plain) is type(like)
    assert {key: tuple(t.shape) for key, t in plain.state_dict().items()} == {
        key: tuple(t.shape) for key, t in like.state_dict().items()
    }
    x = torch.randn(2, 6, dtype=torch.float64) if isinstance(like, nn.Linear) else torch.randn(2, 6, 9, 8).double()
    assert (plain(x) - layer(x)).abs().max() <= 1e-12


@pytest.mark.parametrize("build", [lambda: cifar_resnet(8), lambda: timm.create_model("resnet26")])
@torch.no_grad()
def test_a_whole_network_folds(build: object) -> None:
    network = unskip.plainify(build(), "dirac").double().eval()
    for layer in network.modules():
        if isinstance(layer, DiracConv2d):
            nn.init.normal_(layer.a, 1, 0.1)
            nn.init.normal_(layer.b, 1, 0.1)
    plain = stacked(network)
    assert not any(isinstance(module, DiracConv2d) for module in plain.modules())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected, actual = network(x), plain(x)
    assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_it_starts_near_the_identity_and_all_of_it_is_trained() -> None:
    network = unskip.plainify(cifar_resnet(14), "dirac")
    conv = network.layer1[1][0]
    assert isinstance(conv, DiracConv2d)
    x = torch.randn(4, 16, 12, 12)
    near = (conv(x) - x).norm() / x.norm()
    assert 0.05 < near < 0.2  # b W_norm x has deviation 0.1 for white x
    names = {name for name, p in conv.named_parameters() if p.requires_grad}
    assert names == {"weight", "a", "b"}
    undecayed = {
        id(p) for group in unskip.param_groups(network, 0.1) if not group["weight_decay"] for p in group["params"]
    }
    assert {id(conv.a), id(conv.b)} <= undecayed


@pytest.mark.parametrize(("name", "digits"), [("dirac_resnet34", 1), ("dirac_wrn28_5", 1)])
def test_parameters_as_printed(name: str, digits: int) -> None:
    """Zhang et al. 2024, Tables 1 and 2: DiracNet-34 21.6 M, DiracNet-28-5 9.1 M."""
    assert round(about(name).trained / 1e6, digits) == ENTRIES[name].paper_params


def test_the_wide_one_is_within_a_percent_of_the_print() -> None:
    """36.5 M is what WRN-28-10 has with its shortcuts; without them there are 36.2."""
    assert about("dirac_wrn28_10").trained / 1e6 == pytest.approx(36.5, rel=0.01)


@pytest.mark.parametrize("option", [{"a": "one"}, {"b": float("nan")}])
def test_wrong_options(option: dict) -> None:
    with pytest.raises(ValueError, match=f"dirac: {next(iter(option))}=.* must be a finite number"):
        unskip.plainify(cifar_resnet(8), "dirac", **option)


def test_torchvisions_feature_extractor_traces_it_and_trains_its_weights() -> None:
    network = unskip.plainify(cifar_resnet(8), "dirac")
    features = create_feature_extractor(network, ["layer2"])
    x = torch.randn(2, 3, 16, 16)
    y = features(x)["layer2"]
    y.sum().backward()
    assert network.layer1[0][0].a.grad.any()
    with torch.no_grad():
        network.layer1[0][0].a.mul_(2)  # no copy of the weight was kept
    assert not torch.equal(features(x)["layer2"], y)


def test_tied_convolutions_are_refused() -> None:
    """A tied layer reads the weight of a convolution that would be gone."""
    with torch.device("meta"):
        network = unskip.create_model("skip_seqnet50", tie="conv2")
        assert unskip.plainify(unskip.create_model("skip_seqnet50"), "dirac").surgery.replaced
    with pytest.raises(ValueError, match=r"its tied convolution has no weight of its own .*; tie='none' has"):
        unskip.plainify(network, "dirac")


@pytest.mark.parametrize(
    "like",
    [
        nn.Conv2d(4, 4, 2),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, (1, 3), padding=(0, 1)),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    ],
    ids=["even", "not padded", "not square", "circular"],
)
def test_layers_that_have_no_identity_are_refused(like: nn.Conv2d) -> None:
    with pytest.raises(ValueError, match="must be a square, odd convolution with 'same' zero padding"):
        DiracConv2d(like, 1.0, 0.1)
