"""Simplified networks against the figures of Yu and Tomasi 2019, and T' against whole kernels with zeros."""

import math

import pytest
import torch
from torch import Tensor, nn

import unskip
from tests.models.test_plainness import additions, graph
from unskip.models import dominant_paths, to_plain
from unskip.models.simplified import (
    DominantBlock,
    SimplifiedBlock,
    SimplifiedNet,
    simplified_blocks,
    simplified_net,
)
from unskip.train import ShiftedDecay, identity_shift

DEPTHS = (20, 32, 44)


def weights(net: nn.Module) -> Tensor:
    """All weights without biases, as Table 3 counts them."""
    return torch.cat([p.detach().flatten() for p in net.parameters() if p.ndim > 1])


def id_entries(net: nn.Module) -> Tensor:
    return torch.cat([block.conv.weight.detach()[block.rho() == 1] for block in simplified_blocks(net)])


@pytest.mark.parametrize("form", ["plain", "resnet"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_depth_is_the_number_of_layers_and_both_forms_are_as_large(depth: int, form: str) -> None:
    """Section A: L = 3N + 2; the first N + 1 convolutions have 16 filters; 'the number of weights of both equals'."""
    net = unskip.create_model(f"simplified_{form}{depth}")
    layers = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    n = depth // 3
    assert len(layers) == depth
    assert [layer.out_channels for layer in layers[:-1]] == [16] * (n + 1) + [32] * n + [64] * n
    # 9 taps: stem, N blocks of 16, one of 16 -> 32, N - 1 of 32, one of 32 -> 64, N - 1 of 64; biases; the classifier
    kernels = 3 * 16 + n * 16**2 + 16 * 32 + (n - 1) * 32**2 + 32 * 64 + (n - 1) * 64**2
    biases = 16 + n * (16 + 32 + 64)
    assert sum(p.numel() for p in net.parameters()) == 9 * kernels + biases + 65 * 10
    assert net.layer3(net.layer2(torch.zeros(1, 16, 32, 32))).shape == (1, 64, 8, 8)
    assert net.skip_free == (form == "plain")


# Table 4, before training: weight regularization of the plain and the residual network. It is lambda / 2 ||w||^2 / 128
# with lambda = 1e-4: Figure 10 has 1564 iterations in 4 epochs, batches of 128.
TABLE_4 = {20: (5.393e-4, 2.014e-6), 32: (8.878e-4, 2.559e-6), 44: (1.238e-3, 3.118e-6)}


@pytest.mark.parametrize("depth", DEPTHS)
def test_weight_decay_before_training_is_table_4s(depth: int) -> None:
    """Holds the number and size of the kernels, both initialisations (the stem's too) and the shift to the print."""
    assert math.ceil(50_000 / 128) * 4 == 1564
    for form, printed, within in zip(("plain", "resnet"), TABLE_4[depth], (0.006, 0.06), strict=True):
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            net = unskip.create_model(f"simplified_{form}{depth}")
            shift = {name: torch.zeros_like(p) for name, p in net.named_parameters() if p.ndim > 1}
            found.append(ShiftedDecay(1e-4, shift)(net).item() / 128)
            if form == "resnet":  # T-image: the same penalty, measured from the identity
                plain = to_plain(net)
                assert ShiftedDecay(1e-4, identity_shift(plain))(plain).item() / 128 == pytest.approx(
                    found[-1], rel=1e-4
                )
        assert sum(found) / len(found) == pytest.approx(printed, rel=within), form


@pytest.mark.parametrize(
    ("form", "mean", "std", "mass", "large", "mass_id"),
    [("plain", 0.0, 0.070, 25_000, 420, 67), ("resnet", 0.0023, 0.048, 2010, 1100, 1100)],
)
def test_weights_before_training_are_table_3s(
    form: str, mean: float, std: float, mass: float, large: float, mass_id: float
) -> None:
    """Table 3, two digits: p_0 (KWI) and t_0 = T(r_0) (HMWI) of the 32-layer networks. The mean counts the weights.

    The print has 1900 for the mass of t_0, where HMWI as printed gives 1072 ID entries of 1, sqrt(2 / pi) for each of
    the 1136 output channels of all convolutions, and the classifier's weights, together 2010.
    """
    net = unskip.create_model(f"simplified_{form}32")
    net = net if form == "plain" else to_plain(net)
    w = weights(net)
    assert w.mean().item() == pytest.approx(mean, abs=3e-4 if form == "plain" else 5e-5)
    assert w.std().item() == pytest.approx(std, abs=5e-4)
    assert w.abs().sum().item() == pytest.approx(mass, rel=0.01)
    assert w[w.abs() >= 0.25].abs().sum().item() == pytest.approx(large, rel=0.08)
    assert id_entries(net).abs().sum().item() == pytest.approx(mass_id, rel=0.05)


@pytest.mark.parametrize("init", ["kwi", "hmwi"])
def test_the_initialisation_belongs_to_the_function(init: str) -> None:
    x = torch.randn(4, 3, 16, 16)
    outputs = []
    for residual in (False, True):
        torch.manual_seed(3)
        net = simplified_net(11, residual=residual, init=init)
        outputs.append(net(x))
        drawn = net.layer3[1].conv.weight.detach().clone()
        if residual and init == "kwi":
            drawn += net.layer3[1].rho()
        if not residual and init == "hmwi":
            drawn -= net.layer3[1].rho()
        S = 64 * 9
        assert drawn.std().item() == pytest.approx(math.sqrt(2 / S) if init == "kwi" else 1 / S, rel=0.03)
        assert not net.layer3[1].conv.bias.any()
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_transition_adds_every_second_pixel_and_zeros() -> None:
    block = SimplifiedBlock(16, 32, 2, residual=True)
    x = torch.rand(2, 16, 8, 8)
    nn.init.zeros_(block.conv.weight)
    nn.init.zeros_(block.conv.bias)
    y = block(x)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert not y[:, 16:].any()


def whole_kernel(block: SimplifiedBlock, lower: str) -> nn.Conv2d:
    """T' of D.3 as the paper writes it: a whole kernel, zero but for the diagonals of T_s or of both halves of T_r."""
    conv = nn.Conv2d(block.conv.in_channels, block.conv.out_channels, 3, block.conv.stride, 1).double()
    n = block.conv.in_channels
    r = block.conv.weight - (block.rho() if block.skip is None else 0)
    with torch.no_grad():
        conv.weight.zero_()
        conv.bias.copy_(block.conv.bias)
        for c in range(block.conv.out_channels):
            if c >= n and lower == "dense":
                conv.weight[c] = r[c]
            else:
                conv.weight[c, c % n] = r[c, c % n]
                conv.weight[c, c % n, 1, 1] += 1
    return conv


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("lower", ["diagonal", "dense"])
@torch.no_grad()
def test_dominant_paths_are_whole_kernels_with_zeros(lower: str, residual: bool) -> None:
    net = simplified_net(8, residual=residual).double()
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    expected = net.act1(net.conv1(x))
    for block in simplified_blocks(net):
        nn.init.normal_(block.conv.bias, std=0.1)
        expected = whole_kernel(block, lower)(expected).relu()
    dominant = dominant_paths(net, lower=lower)
    torch.testing.assert_close(dominant.forward_features(x), expected, rtol=0, atol=1e-13)
    assert dominant.skip_free == net.skip_free == (not residual)
    assert all(isinstance(block, DominantBlock) for block in simplified_blocks(dominant))
    assert all(isinstance(block, SimplifiedBlock) for block in simplified_blocks(net)), "the given network is untouched"


def test_a_gradient_stays_on_its_path() -> None:
    """D.2: a final channel i of T' is reached from channel i mod 16 of the stem and from no other."""
    net = unskip.create_model("simplified_dominant20")
    a = net.act1(net.conv1(torch.randn(1, 3, 16, 16))).detach().requires_grad_()
    final = net.layer3(net.layer2(net.layer1(a))).mean((0, 2, 3))
    for i in (0, 17, 50):
        (gradient,) = torch.autograd.grad(final[i], a, retain_graph=True)
        assert set(gradient.abs().sum((0, 2, 3)).nonzero().flatten().tolist()) == {i % 16}


@pytest.mark.parametrize(("name", "skips"), [("plain20", 0), ("dominant20", 0), ("resnet20", 18)])
def test_the_traced_graph_adds_only_where_there_is_a_skip(name: str, skips: int) -> None:
    assert len(additions(graph(unskip.create_model(f"simplified_{name}"), 32))) == skips


def test_dominant_networks_are_small() -> None:
    """9 taps and a bias for each channel of each block; with lower='dense' two whole n x n kernels more."""
    count = {
        lower: sum(p.numel() for p in unskip.create_model("simplified_dominant20", lower=lower).parameters())
        for lower in ("diagonal", "dense")
    }
    assert count["diagonal"] == (27 + 1) * 16 + 6 * (16 + 32 + 64) * 10 + 650
    assert count["dense"] - count["diagonal"] == 9 * (16**2 - 16 + 32**2 - 32)


def test_plainify_knows_the_blocks() -> None:
    net = simplified_net(8, residual=True)
    plain = unskip.plainify(net, "plain")
    assert len(plain.surgery.replaced) == 6
    with pytest.raises(ValueError, match="does not have one activation between each two convolutions"):
        unskip.plainify(net, "pnnh")
    with pytest.raises(ValueError, match="it is plain already"):
        unskip.plainify(simplified_net(8, residual=False), "plain")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: simplified_net(21, residual=True), r"depth=21 must be 3N \+ 2"),
        (lambda: SimplifiedNet(blocks=0, residual=True), "SimplifiedNet: blocks=0 must be at least 1"),
        (lambda: unskip.create_model("simplified_plain20", init="he"), "init='he' must be 'kwi'"),
        (lambda: unskip.create_model("simplified_plain20", inti="kwi"), "no argument 'inti'. Did you mean 'init'"),
        (lambda: unskip.create_model("simplified_dominant20", lower="no"), "lower='no' must be 'diagonal' or 'dense'"),
        (
            lambda: unskip.create_model("simplified_dominant20", init="kwi"),
            "'simplified_dominant20' has no argument 'init'",
        ),
        (lambda: dominant_paths(None), "NoneType has no block of a simplified network"),
        (lambda: dominant_paths(nn.Linear(2, 2)), "Linear has no block of a simplified network"),
        (lambda: dominant_paths(unskip.create_model("simplified_dominant20")), "has only its dominant paths already"),
    ],
)
def test_wrong_arguments(build: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()
