"""PNNH block by block: what it reads, what it carries, how wide it is, how it starts."""

import math

import pytest
import timm
import torch
import torchvision
from torch import nn

import unskip
from unskip.coders import Coder, SharedCoder, TransitionCoder
from unskip.methods import PNNH, PNNHBlock, method_names
from unskip.methods.pnnh import PNNHPaper, learner_width
from unskip.models.cifar import cifar_resnet, wide_resnet


def blocks(network: nn.Module) -> list[PNNHBlock]:
    return [module for module in network.modules() if isinstance(module, PNNHBlock)]


@torch.no_grad()
def test_the_definition() -> None:
    """y = relu(W_2 relu(bn(W_1 x)) + W_dec relu(W_enc x)), written out with PyTorch's functions."""
    from torch.nn import functional as F

    block = blocks(unskip.plainify(cifar_resnet(14)))[1].double()
    x = torch.rand(4, 16, 8, 8, dtype=torch.float64)
    hidden = F.conv2d(x, block.learner.conv1.weight, padding=1)
    hidden = (hidden - hidden.mean((0, 2, 3), keepdim=True)) / (
        hidden.var((0, 2, 3), False, keepdim=True) + 1e-5
    ).sqrt()
    learner = F.conv2d(hidden.relu(), block.learner.conv2.weight, padding=1)
    pairs = x.view(4, 8, 2, 8, 8).mean(2).repeat_interleave(2, dim=1)  # the pair average in words
    torch.testing.assert_close(block(x), (learner + pairs).relu())


@pytest.mark.parametrize(
    ("network", "index", "hidden", "code"),
    [
        (lambda: cifar_resnet(14), 1, 8, 8),  # vanilla: H = C, C_B = C/2
        (lambda: timm.create_model("resnet26"), 1, 32, 32),  # bottleneck: H = C_low, C_B = C_low/2
        (lambda: torchvision.models.mobilenet_v2(), 1, 128, 12),  # inverted: H = C_high = 144, C_B = C/2; 132 rounded
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1), 0, 768 - 96, 96),  # MLP: H = 4C, C_B = C/2
    ],
    ids=["vanilla", "bottleneck", "inverted", "mlp"],
)
def test_widths(network: object, index: int, hidden: int, code: int) -> None:
    block = [b for b in blocks(unskip.plainify(network())) if not isinstance(b.coder, TransitionCoder)][
        index - (index > 0)
    ]
    assert block.learner[0].weight.shape[0] == hidden
    coder = block.coder.coder if isinstance(block.coder, SharedCoder) else block.coder
    assert coder.matrices()["enc"].shape[0] == code


def test_widths_of_inverted_bottlenecks_are_multiples_of_8() -> None:
    """Downwards, where that is at most a tenth; all three layers agree on it. MobileNet-V2's, and narrow blocks."""
    learners = [block.learner for block in blocks(unskip.create_model("pnnh_mobilenetv2"))]
    widths = [80, 128, 128, 176, 176, 160, 352, 352, 352, 336, 528, 528, 496, 880, 880, 800]
    assert [learner.conv1.out_channels for learner in learners] == widths
    assert all(
        learner.conv1.out_channels == learner.conv2.groups == learner.conv3.in_channels == learner.norm2.num_features
        for learner in learners
    )

    def width(hidden: int, code: int, family: str = "inverted") -> int:
        return learner_width(family, hidden, code)

    assert [width(144, 12), width(96, 8), width(20, 3), width(12, 3), width(16, 8)] == [128, 88, 16, 9, 8]
    assert [width(144, 12, family) for family in ("vanilla", "bottleneck", "mlp")] == [132] * 3


@torch.no_grad()
@pytest.mark.parametrize("channels", [3, 5, 7, 10, 11])
def test_no_more_than_half_of_the_channels_are_carried(channels: int) -> None:
    assert unskip.nn.PNNHBlock(channels).coder.spec.code == channels // 2
    assert unskip.nn.PNNHBlock(channels, 2 * channels, stride=2).coder.spec.code == channels


def test_learners_of_a_multiple_of_the_width() -> None:
    net = unskip.plainify(cifar_resnet(8), "pnnh", hidden=0.25)
    widths = [block.learner.conv1.out_channels for block in net.modules() if isinstance(block, PNNHBlock)]
    assert widths == [4, 8, 16]


def test_a_coded_transition_writes_what_the_next_coder_reads() -> None:
    """Every input channel survives: pooled, it comes out of the next coder unchanged."""
    network = unskip.plainify(cifar_resnet(14)).double()
    transition, following = network.layer2[0], network.layer2[1]
    x = torch.rand(2, 16, 8, 8, dtype=torch.float64)
    written = transition.coder(x)
    assert written.shape == (2, 32, 4, 4)
    torch.testing.assert_close(following.coder(written.relu()), written)
    pooled = torch.nn.functional.avg_pool2d(x, 2)
    torch.testing.assert_close(written.view(2, 16, 2, 4, 4), (pooled / math.sqrt(2))[:, :, None].expand(2, 16, 2, 4, 4))


@torch.no_grad()
@pytest.mark.parametrize("pretext", ["identity", "rectified_normal", "uniform", "random"])
def test_a_coded_transition_suits_its_coder(pretext: str) -> None:
    """What it writes passes the next coder about as well as what any other block reads, and at the same scale."""
    network = unskip.plainify(cifar_resnet(14), pretext=pretext).double()
    x = torch.randn(4, 16, 8, 8, dtype=torch.float64).relu()
    written = network.layer2[0].coder(x)
    typical = torch.randn(4, 32, 8, 8, dtype=torch.float64).relu()
    following = network.layer2[1].coder

    def loss(x: torch.Tensor) -> float:
        return ((following(x) - x).norm() / x.norm()).item()

    once = following(typical).relu()
    assert loss(written.relu()) < 1.25 * loss(once) + 1e-9
    if pretext != "random":
        assert 0.2 < written.std() / torch.nn.functional.avg_pool2d(x, 2).std() < 1.2
    if pretext == "identity":
        torch.testing.assert_close(written[:, :16], torch.nn.functional.avg_pool2d(x, 2))


def test_a_coded_transition_fits_odd_sizes() -> None:
    network = unskip.plainify(cifar_resnet(8))
    assert network(torch.randn(2, 3, 17, 21)).shape == (2, 10)


@torch.no_grad()
def test_whole_transitions_are_the_block_without_its_shortcut() -> None:
    residual = cifar_resnet(14).eval()
    network = unskip.plainify(residual, transition="whole")
    x = torch.rand(2, 16, 8, 8)
    old = residual.layer2[0]
    expected = old.bn2(old.conv2(old.bn1(old.conv1(x)).relu())).relu()
    torch.testing.assert_close(network.layer2[0](x), expected)


@torch.no_grad()
def test_pre_activation_blocks_read_the_activated_input() -> None:
    """Raw x of a WRN block has both signs; coder and learner read relu(norm(x))."""
    block = blocks(unskip.plainify(wide_resnet(16, 1)))[1].double()
    x = torch.randn(8, 16, 4, 4, dtype=torch.float64)
    read = block.pre(x)
    assert read.min() >= 0
    torch.testing.assert_close(block(x), block.learner(read) + block.coder(read))


@torch.no_grad()
def test_linear_outputs_keep_their_sign_or_lose_it_as_asked() -> None:
    paired = unskip.plainify(torchvision.models.mobilenet_v2(), signed="paired").eval()
    rectified = unskip.plainify(torchvision.models.mobilenet_v2(), signed="rectify").eval()
    outputs: dict[str, torch.Tensor] = {}
    for name, network in (("paired", paired), ("rectified", rectified)):
        network.features[3].register_forward_hook(lambda m, i, o, name=name: outputs.__setitem__(name, o))
        network(torch.randn(1, 3, 64, 64))
    assert outputs["paired"].min() < 0
    assert outputs["rectified"].min() >= 0
    for block in rectified.features[1:-1]:
        assert any(isinstance(m, nn.ReLU6) for m in list(block.children())[-1:]), "also what a transition writes"


@torch.no_grad()
def test_mlp_reads_the_norm_and_has_no_activation_after_the_sum() -> None:
    block = blocks(unskip.plainify(timm.create_model("vit_tiny_patch16_224", depth=1)))[0]
    x = 3 * torch.randn(2, 4, 192) + 1
    read = block.pre(x)
    torch.testing.assert_close(read.mean(-1), torch.zeros(2, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(block(x), block.learner(read) + block.coder(read))
    assert block.learner.conv2.weight.std().item() == pytest.approx(0.3 * math.sqrt(2 / (768 - 96)), rel=0.05)
    # The coder is a good one for normal inputs: it keeps half of the variance.
    z = torch.randn(5000, 192)
    assert (block.coder(z) - z).square().mean() < 0.52


def test_no_coder_at_all() -> None:
    network = unskip.plainify(cifar_resnet(8), pretext="none")
    assert not any(isinstance(module, Coder) for module in network.modules())
    assert blocks(network)[0].learner.conv1.out_channels == 8


def test_scale_and_norm_options() -> None:
    base, scaled, both = (
        blocks(unskip.plainify(cifar_resnet(8), **options))[0] for options in ({"scale": 1}, {}, {"norm": "both"})
    )
    he = math.sqrt(2 / (8 * 9))
    assert base.learner.conv2.weight.std().item() == pytest.approx(he, rel=0.1)
    assert scaled.learner.conv2.weight.std().item() == pytest.approx(0.3 * he, rel=0.1)
    assert [name for name, _ in base.learner.named_children()] == ["conv1", "norm1", "act1", "conv2"]
    assert [name for name, _ in both.learner.named_children()] == ["conv1", "norm1", "act1", "conv2", "norm2"]


def test_the_papers_setting_has_its_own_name() -> None:
    paper = PNNHPaper()
    assert (paper.pretext, paper.scale, paper.transition, paper.norm, paper.ratio) == (
        "rectified_normal",
        1.0,
        "whole",
        "first",
        0.5,
    )
    assert {"plain", "pnnh", "pnnh_paper", "residual_half"} <= set(method_names())


def test_drop_path_moves_to_the_learner() -> None:
    network = unskip.plainify(timm.create_model("resnet18", drop_path_rate=0.4))
    assert blocks(network)[-1].drop_path.drop_prob == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ratio": 1.0}, "ratio=1.0 .* 'residual_half'"),
        ({"ratio": 0}, "ratio=0 "),
        ({"pretext": "rectified"}, "pretext='rectified' is not known"),
        ({"norm": "second"}, "norm='second'"),
        ({"transition": "half"}, "transition='half'"),
        ({"signed": "abs"}, "signed='abs'"),
        ({"scale": -1}, "scale=-1"),
        ({"scale": float("inf")}, "scale=inf must be a finite number"),
        ({"ratio": "0.5"}, "ratio='0.5' must be a finite number"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
    ],
)
def test_wrong_options_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PNNH(**options)


@torch.no_grad()
def test_residual_half_keeps_the_shortcut() -> None:
    residual = wide_resnet(10, 1)
    network = unskip.plainify(residual, "residual_half", scale=0.0)
    x = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(network.layer1[0](x), x)
    assert network.layer1[0].learner.conv1.out_channels == 8
    post = unskip.plainify(cifar_resnet(8), "residual_half", scale=0.0)
    torch.testing.assert_close(post.layer1[0](x.relu()), x.relu())


def test_residual_half_takes_layers_on_the_last_axis() -> None:
    model = timm.create_model("convnext_atto", num_classes=10, depths=(1, 1, 1, 1), dims=(8, 8, 8, 8))
    half = unskip.plainify(model, "residual_half")
    assert half.surgery.kept == {"block": 4}
    assert half(torch.randn(2, 3, 32, 32)).shape == (2, 10)
