"""Method `seq`: its blocks are those of Hu, Figure 3 and B.2, on anybody's ResNet."""

import copy
import itertools

import pytest
import timm
import torch
import torchvision
import torchvision.models.resnet as tv
from torch import Tensor, nn

import unskip
from tests.models.test_plainness import additions, graph
from unskip.methods.seq import SeqBlock, TiedConv
from unskip.models.cifar import cifar_resnet, wide_resnet

TINY = {"layers": (2, 2, 1, 1), "channels": (8, 16, 32, 64), "num_classes": 10}


def tiny(block: type[nn.Module] = timm.models.resnet.BasicBlock, **kwargs: object) -> nn.Module:
    """timm's ResNet, thin: width 8 in the first stage, and 4 times that between bottlenecks."""
    return timm.models.resnet.ResNet(block, **{**TINY, **kwargs})


def bottleneck(**kwargs: object) -> nn.Module:
    return tiny(timm.models.resnet.Bottleneck, base_width=64, **kwargs)


def blocks(network: nn.Module) -> list[SeqBlock]:
    return [module for module in network.modules() if isinstance(module, SeqBlock)]


def rows(block: nn.Module) -> list[str]:
    """A block as Figure 3 writes it, with what stands between the convolutions."""
    words = []
    for module in block:
        if isinstance(module, nn.Conv2d):
            words.append(f"{module.kernel_size[0]}x{module.kernel_size[1]} {module.in_channels}->{module.out_channels}")
        else:
            words.append({nn.ReLU: "ReLU", nn.BatchNorm2d: "BN", TiedConv: "tied"}[type(module)])
    return words


def train_step(network: nn.Module, x: Tensor) -> None:
    network.train()
    network(x).square().mean().backward()
    for path, parameter in network.named_parameters():
        assert parameter.grad is not None, path
        assert torch.isfinite(parameter.grad).all(), path
    torch.optim.SGD(network.parameters(), lr=0.01).step()
    assert torch.isfinite(network(x)).all()


def test_seq_basic_is_figure_3() -> None:
    network = unskip.plainify(timm.create_model("resnet18"), "seq")
    assert rows(network.layer1[0]) == ["3x3 64->128", "ReLU", "1x1 128->64", "BN"]
    assert rows(network.layer2[0]) == ["3x3 64->256", "ReLU", "1x1 256->128", "BN"]  # strides and widens
    assert network.layer2[0].conv1.stride == (2, 2)
    assert len(blocks(network)) == 8


def test_seq_bottle_is_figure_3_and_the_three_positions_are_table_3c() -> None:
    def first(**options: str) -> list[str]:
        with torch.device("meta"):
            return rows(unskip.create_model("seqnet50", **options).layer1[0])

    pair = ["1x1 64->256", "ReLU", "1x1 256->64", "BN"]
    assert first() == ["3x3 64->128", "ReLU", "1x1 128->64", "BN", *pair]
    assert first(position="second") == ["1x1 64->128", "ReLU", "3x3 128->64", "BN", *pair]
    assert first(position="third") == [*pair, "3x3 64->128", "ReLU", "1x1 128->64", "BN"]


@pytest.mark.parametrize("position", ["first", "second", "third"])
def test_the_3x3_strides_and_its_pair_widens_wherever_it_stands(position: str) -> None:
    network = unskip.plainify(tiny(), "seq_bottle", position=position)
    block = network.layer2[0]
    for name, module in block.named_children():
        if isinstance(module, nn.Conv2d):
            assert module.stride == ((2, 2) if module.kernel_size == (3, 3) else (1, 1)), name
    assert block(torch.randn(2, 8, 8, 8)).shape == (2, 16, 4, 4)
    train_step(network, torch.randn(4, 3, 32, 32))


@pytest.mark.parametrize("init", ["R", "O", "L"])
def test_at_initialisation_only_centres_have_weights_and_m_is_w_transposed(init: str) -> None:
    block = unskip.plainify(tiny(), "seq_bottle", init=init).layer1[1]
    for wide, narrow in ((block.conv1, block.conv2), (block.conv3, block.conv4)):
        c = wide.kernel_size[0] // 2
        W, M = wide.weight[:, :, c, c], narrow.weight[:, :, 0, 0]
        assert torch.count_nonzero(wide.weight) == torch.count_nonzero(W)
        torch.testing.assert_close(M * (2**0.5 if init == "L" else 1), W.T)


@torch.no_grad()
def test_l_inits_block_is_exactly_linear_before_its_norm() -> None:
    """In transitions too. R-Init's and O-Init's are not."""

    def error(init: str, layer: str) -> float:
        block = unskip.plainify(tiny(), "seq", init=init).double().get_submodule(layer)[0]
        before = nn.Sequential(*list(block)[:-1])
        x, y = torch.randn(2, 2, block.conv1.in_channels, 6, 6, dtype=torch.float64)
        expected = 0.3 * before(x) - 1.7 * before(y)
        return ((before(0.3 * x - 1.7 * y) - expected).norm() / expected.norm()).item()

    assert max(error("L", "layer1"), error("L", "layer2")) < 1e-14
    assert min(error("R", "layer1"), error("O", "layer1")) > 0.05


@pytest.mark.parametrize(
    ("tie", "position", "tied"),
    [
        ("none", "first", set()),
        ("conv2", "first", {"conv2"}),
        ("conv4", "first", {"conv4"}),
        ("both", "first", {"conv2", "conv4"}),
        ("both", "second", {"conv1", "conv4"}),  # the 1x1 reads the centre of the 3x3
        ("both", "third", {"conv2", "conv4"}),
    ],
)
def test_tied_pairs_are_one_parameter(tie: str, position: str, tied: set[str]) -> None:
    network = unskip.plainify(tiny(), "seq_bottle", tie=tie, position=position, pre_relu="bias")
    x = torch.randn(4, 3, 32, 32)
    train_step(network, x)
    keeping = network.layer2[1]
    assert {name for name, module in keeping.named_children() if isinstance(module, TiedConv)} == tied
    for a, b in (("conv1", "conv2"), ("conv3", "conv4")):
        wide, narrow = (keeping.get_submodule(name) for name in (a, b))
        c, e = wide.weight.shape[-1] // 2, narrow.weight.shape[-1] // 2
        same = torch.equal(wide.weight[:, :, c, c], narrow.weight[:, :, e, e].T)
        assert same == bool({a, b} & tied), "tied pairs stay transposes of each other, others learn apart"
    changing = {name for name, module in network.layer2[0].named_children() if isinstance(module, TiedConv)}
    assert not changing & ({"conv3", "conv4"} if position == "third" else {"conv1", "conv2"})
    assert all(parameter.grad is not None for parameter in network.parameters())

    # A copy has its own weights, tied among themselves.
    other = copy.deepcopy(network).eval()
    y = network.eval()(x)
    assert torch.equal(other(x), y)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    assert torch.equal(network(x), y)
    assert not torch.equal(other(x), y)


@torch.no_grad()
def test_a_traced_tied_pair_reads_the_weight_and_keeps_no_copy() -> None:
    block = unskip.plainify(tiny(), "seq_bottle", tie="both").layer1[1].eval()
    x = torch.randn(2, 8, 5, 5)
    traced = torch.fx.symbolic_trace(block)
    assert torch.equal(traced(x), block(x))
    block.conv1.weight.mul_(2)
    assert torch.equal(traced(x), block(x))


@pytest.mark.parametrize(("pre_relu", "more"), [("none", 0), ("bias", 1), ("norm", 2)])
def test_bias_or_norm_before_relu(pre_relu: str, more: int) -> None:
    network = unskip.plainify(tiny(), "seq_bottle", pre_relu=pre_relu)
    hidden = sum(b.conv1.out_channels + b.conv3.out_channels for b in blocks(network))
    base = unskip.plainify(tiny(), "seq_bottle")
    count = [sum(p.numel() for p in net.parameters()) for net in (network, base)]
    assert count[0] - count[1] == more * hidden
    assert rows(network.layer1[1])[:3] == ["3x3 8->16", *["BN"] * (pre_relu == "norm"), "ReLU", "1x1 16->8"][:3]
    train_step(network, torch.randn(4, 3, 32, 32))


RESNETS = {
    "timm basic": tiny,
    "timm bottleneck": bottleneck,
    "timm d": lambda: tiny(stem_type="deep", avg_down=True),
    "timm GroupNorm": lambda: tiny(norm_layer=timm.layers.GroupNorm1),
    "timm dilated": lambda: tiny(output_stride=8),
    "torchvision basic": lambda: torchvision.models.ResNet(tv.BasicBlock, [2, 1, 1, 1], num_classes=10),
    "torchvision bottleneck": lambda: torchvision.models.ResNet(tv.Bottleneck, [2, 1, 1, 1], num_classes=10),
    "unskip CIFAR": lambda: cifar_resnet(8),
    "unskip WRN": lambda: wide_resnet(10, 2),
}


@pytest.mark.parametrize("name", RESNETS)
def test_any_resnet(name: str) -> None:
    residual = RESNETS[name]()
    network = unskip.plainify(residual, "seq")
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert network.eval()(x).shape == residual.eval()(x).shape
    train_step(network, x)
    assert not additions(graph(network, 32))


def test_torchvisions_and_timms_resnets_become_the_same_network() -> None:
    shapes = []
    with torch.device("meta"):
        for residual in (timm.create_model("resnet34"), torchvision.models.resnet34()):
            shapes.append([p.shape for p in unskip.plainify(residual, "seq").parameters()])
        shapes.append([p.shape for p in unskip.create_model("seqnet34").parameters()])
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("init", ["R", "O"])
def test_a_bottleneck_is_seq_bottle_cut_behind_conv3(init: str) -> None:
    """Conv4 begins the next block, as the transpose of Conv3 that ends this one; in a transition, with a surplus."""
    network = unskip.plainify(bottleneck(), "seq", init=init)
    d = network.layer1[1].conv1.in_channels
    assert rows(network.layer1[1]) == [
        f"1x1 {4 * d}->{d}", "BN", f"3x3 {d}->{2 * d}", "ReLU", f"1x1 {2 * d}->{d}", "BN", f"1x1 {d}->{4 * d}", "ReLU"
    ]  # fmt: skip
    chain = blocks(network)
    for before, after in itertools.pairwise(chain):
        W, M = before.conv3.weight[:, :, 0, 0], after.conv4.weight[:, :, 0, 0]
        assert torch.equal(M[: W.shape[1]], W.T)
    assert not torch.equal(chain[0].conv1.weight, chain[1].conv1.weight), "the inner pairs are drawn for each block"
    other = unskip.plainify(bottleneck(), "seq", init=init, seed=1)
    assert not torch.equal(blocks(other)[0].conv3.weight, chain[0].conv3.weight)


def test_a_cut_bottleneck_costs_what_seq_bottle_costs() -> None:
    with torch.device("meta"):
        whole, cut = (
            sum(p.numel() for b in blocks(net) for name, p in b.named_parameters() if "conv" in name)
            for net in (unskip.create_model("seqnet50"), unskip.plainify(timm.create_model("resnet50"), "seq"))
        )
    # The same row of layers but for its ends: each stage begins at its own width instead of the one before.
    assert 1 < cut / whole < 1.08


REFUSED = [
    (lambda: timm.create_model("mobilenetv2_050"), {}, "of the family 'inverted'"),
    (lambda: torchvision.models.mobilenet_v2(), {}, "of the family 'inverted'"),
    (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32), {}, "of the family 'mlp'"),
    (lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), img_size=32), {}, "'mlp'"),
    (lambda: bottleneck(cardinality=2), {}, "has 2 groups"),
    (lambda: tiny(act_layer=nn.SiLU), {}, "activation SiLU is not ReLU"),
    (lambda: tiny(block_args={"attn_layer": "se"}), {}, "SEModule"),
    (tiny, {"tie": "conv4"}, "SeqBasic has no Conv4 to tie, as tie='conv4' asks"),
    (tiny, {"position": "third"}, "SeqBasic has no place for position='third'"),
    (bottleneck, {"init": "L"}, "init='L', tie='none', position='first' do not allow"),
    (bottleneck, {"tie": "both"}, "the seqnet networks have all of them"),
    (bottleneck, {"position": "third"}, "position='third' do not allow"),
]


@pytest.mark.parametrize(("build", "options", "why"), REFUSED)
def test_refused_with_a_sentence(build: object, options: dict, why: str) -> None:
    with pytest.raises(
        ValueError, match=r"method 'seq' can't make block '[\w.]+' of \w+ skip-free: .*strict"
    ) as refusal:
        unskip.plainify(build(), "seq", **options)  # type: ignore[operator]
    assert why in str(refusal.value)


@pytest.mark.parametrize(
    ("option", "value"), [("init", "He"), ("tie", "conv1"), ("pre_relu", True), ("position", 2), ("seed", 0.5)]
)
def test_wrong_options_name_what_there_is(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"seq: {option}={value!r} (is not known. Known: |must be a whole number)"):
        unskip.plainify(tiny(), "seq", **{option: value})


@pytest.mark.full
def test_gradients_of_a_thousand_layers_are_flat_with_l_init() -> None:
    """And the network trains a step. With R-Init they grow by 1e25 (tests/models/test_every_method.py)."""
    network = unskip.plainify(cifar_resnet(1004), "seq", init="L")
    train_step(network, torch.randn(8, 3, 8, 8))
    first, last = (network.get_submodule(name).conv1.weight.grad.norm() for name in ("layer1.0", "layer3.166"))
    assert 0.1 < first / last < 10
