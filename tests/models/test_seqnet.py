"""SeqNet's networks: what Hu says of them, counted, simulated and trained a little."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.methods.seq import Seq, TiedConv
from unskip.train import Orthogonal, load_recipe
from unskip.train.optim import make_optimizer

WIDTHS = (64, 128, 256, 512)
DEPTHS = {"seqnet18": (2, 2, 2, 2), "seqnet34": (3, 4, 6, 3), "seqnet50": (3, 4, 6, 3), "seqnet101": (3, 4, 23, 3)}


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def by_hand(name: str) -> int:
    """The sum over Figure 3's blocks, the first of a stage reading half the width."""
    total = 3 * 64 * 49 + 2 * 64 + 512 * 1000 + 1000  # stem, its norm, classifier
    for stage, (d, blocks) in enumerate(zip(WIDTHS, DEPTHS[name], strict=True)):
        pair = 9 * d * 2 * d + 2 * d * d + 2 * d  # 3x3 d -> 2d, 1x1 2d -> d, norm
        total += blocks * pair - (9 * d // 2 * 2 * d if stage else 0)
        if name in ("seqnet50", "seqnet101"):
            total += blocks * (2 * 4 * d * d + 2 * d)  # 1x1 d -> 4d, 1x1 4d -> d, norm
    return total


@pytest.mark.parametrize("name", DEPTHS)
def test_parameters(name: str) -> None:
    with torch.device("meta"):
        network = unskip.create_model(name)
    assert parameters(network) == by_hand(name)
    assert [len(network.get_submodule(f"layer{i}")) for i in range(1, 5)] == list(DEPTHS[name])
    if name == "seqnet50":
        assert round(parameters(network) / 1e6, 2) == 32.65


def test_tying_saves_the_second_weight_of_each_pair_that_keeps_its_width() -> None:
    with torch.device("meta"):
        untied = parameters(unskip.create_model("seqnet50"))
        conv2 = parameters(unskip.create_model("seqnet50", tie="conv2"))
        both = parameters(unskip.create_model("seqnet50", tie="both"))
    keeping = zip(WIDTHS, (3, 3, 5, 2), strict=True)  # blocks but the three that widen
    assert untied - conv2 == sum(blocks * 2 * d * d for d, blocks in keeping)
    assert conv2 - both == sum(blocks * 4 * d * d for d, blocks in zip(WIDTHS, (3, 4, 6, 3), strict=True))


@pytest.mark.parametrize("tie", ["none", pytest.param("conv2", marks=pytest.mark.full)])
@torch.no_grad()
def test_skip_seqnet_without_its_skips_is_seqnet(tie: str) -> None:
    residual = unskip.create_model("skip_seqnet50", tie=tie).eval()
    assert len([m for m in residual.modules() if type(m).__name__ == "SkipSeqBlock"]) == 16
    plain = unskip.plainify(residual, "plain")
    seqnet = unskip.create_model("seqnet50", tie=tie).eval()
    seqnet.load_state_dict(dict(zip(seqnet.state_dict(), plain.state_dict().values(), strict=True)))
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(plain(x), seqnet(x))
    block = residual.layer1[1]
    x = torch.randn(1, 64, 8, 8)
    torch.testing.assert_close(block(x), x + block.block(x))


def test_options_reach_every_name() -> None:
    for name in ("seqnet50", "skip_seqnet50", "cifar_seqnet20", "seqnet_mlp"):
        with torch.device("meta"):
            network = unskip.create_model(name, tie="conv2", pre_relu="norm", init="O")
        assert any(isinstance(module, TiedConv) for module in network.modules()), name
        with pytest.raises(ValueError, match=r"init='H' is not known. Known: R, O, L"):
            unskip.create_model(name, init="H")
        with pytest.raises(ValueError, match=f"'{name}' has no argument 'ties'. Did you mean 'tie'"):
            unskip.create_model(name, ties="conv2")


# Section 4.2, fully connected.


def test_mlp_is_a_row_of_pairs() -> None:
    network = unskip.create_model("seqnet_mlp", depth=6, width=12, k=3, num_classes=4, img_size=5, in_chans=2)
    first, *pairs = network.stage1
    assert first.transform.weight.shape == (12, 50)
    assert len(pairs) == 2
    for pair in pairs:
        assert [type(m) for m in pair] == [nn.Linear, nn.ReLU, nn.Linear, nn.BatchNorm1d]
        assert torch.equal(pair.conv2.weight, pair.conv1.weight.T)
        assert pair.conv1.weight.shape == (36, 12)
    assert network(torch.randn(8, 2, 5, 5)).shape == (8, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 7}, "depth=7 must be even"),
        ({"depth": 2}, "depth=2 must be a whole number of at least 4"),
        ({"k": 1}, "k=1 must be a whole number of at least 2"),
        ({"k": 3, "init": "L"}, "k=3 must be even for init='L'"),
        ({"in_chans": 0}, "in_chans=0 must be a whole number of at least 1"),
        ({"tie": "both"}, "seqnet_mlp: a pair of fully-connected layers has no Conv4 to tie"),
    ],
)
def test_mlp_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unskip.create_model("seqnet_mlp", **options)


def loss_after(network: nn.Module, steps: int = 60) -> float:
    """Training loss on digits at the end, a mean over the last five batches of 128."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:1408, None] / 8 - 1
    y = torch.tensor(digits.target)[:1408]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        batch = torch.arange(step * 128, step * 128 + 128) % len(x)
        loss = F.cross_entropy(network(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-5:]) / 5


def test_a_50_layer_mlp_learns_digits_where_a_plain_one_does_not() -> None:
    assert loss_after(unskip.create_model("seqnet_mlp", depth=50, width=64, img_size=8)) < 0.8
    # The mean of three: how far a plain network gets by chance depends on the CPU's rounding.
    plain = [nn.Sequential(nn.Flatten(), plain_mlp(64, 49), nn.Linear(64, 10)) for _ in range(3)]
    assert sum(map(loss_after, plain)) / 3 > 1.9


# Section 2.1 and Figure 6: gradients grow by a factor for each layer.


def growth(make: Callable[[], nn.Module], repeats: int, d: int = 256, batch: int = 128) -> float:
    """Growth of the gradient norm from one linear layer to the one before, geometric mean over layers and repeats."""
    norms = []
    for _ in range(repeats):
        network = make()
        linears = [m for m in network.modules() if isinstance(m, nn.Linear)]
        network(torch.randn(batch, d)).backward(torch.randn(batch, d) / math.sqrt(d))
        norms.append([m.weight.grad.norm().item() for m in linears])
    mean = np.mean(norms, axis=0)
    # Not from the very last layer, whose input is not yet that of a deep network, nor from the first, which reads x.
    return float((mean[1] / mean[-1]) ** (1 / (len(mean) - 2)))


def plain_mlp(d: int = 256, layers: int = 20) -> nn.Module:
    """PlainNet20 of section 2.1."""
    stack = nn.Sequential()
    for _ in range(layers):
        linear = nn.Linear(d, d, bias=False)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / d))
        stack.extend([linear, nn.BatchNorm1d(d), nn.ReLU()])
    return stack


def test_gradients_of_the_plain_mlp_grow_by_1_211_a_layer() -> None:
    assert growth(plain_mlp, 24) == pytest.approx(math.sqrt(math.pi / (math.pi - 1)), rel=0.02)  # 1.2112


def test_gradients_of_the_fully_connected_seqnet_hardly_grow() -> None:
    """Proposition 4.1 for k = 2: R_b / R_f = (1 + 1) / (1 + 1 - 1/pi) for a pair of two layers, 1.044 a layer."""

    def pairs() -> nn.Module:
        return nn.Sequential(*[Seq().linear(256, 2) for _ in range(10)])

    rate = growth(pairs, 12)
    assert rate < 1.08
    assert rate == pytest.approx((2 / (2 - 1 / math.pi)) ** 0.25, rel=0.02)


# Figure 4, left: gradients of 50-layer networks at initialisation, on real images.


def digit_images(count: int, side: int) -> Tensor:
    pixels = torch.tensor(load_digits().images[:count], dtype=torch.float32)[:, None]
    return F.interpolate(pixels, size=(side, side), mode="bilinear").expand(-1, 3, -1, -1)


def photo_images(count: int, side: int) -> Tensor:
    """Crops of scikit-learn's two photographs, at half their size."""
    photos = torch.tensor(np.stack(load_sample_images().images), dtype=torch.float32).permute(0, 3, 1, 2)
    photos = F.interpolate(photos, scale_factor=0.5, mode="area")
    corners = torch.rand(count, 2, generator=torch.Generator().manual_seed(0))
    height, width = photos.shape[2] - side, photos.shape[3] - side
    places = [(int(a * height), int(b * width)) for a, b in corners.tolist()]
    return torch.stack([photos[i % 2, :, top : top + side, left : left + side] for i, (top, left) in enumerate(places)])


def first_over_last(network: nn.Module, images: Tensor) -> float:
    """The geometric mean of a block's convolution gradients, of the first block over the last."""
    images = (images - images.mean()) / images.std()
    labels = torch.arange(len(images)) % 10
    F.cross_entropy(network.train()(images), labels).backward()
    norms = []
    for block in (network.layer1[0], network.layer4[-1]):
        convs = [m for name, m in block.named_modules() if isinstance(m, nn.Conv2d) and "downsample" not in name]
        norms.append(torch.stack([conv.weight.grad.norm() for conv in convs]).log().mean().exp())
    return (norms[0] / norms[1]).item()


@pytest.mark.full
@pytest.mark.parametrize("images", [digit_images, photo_images])
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_at_initialisation(images: Callable[[int, int], Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    x = images(16, 64)
    seqnet = first_over_last(unskip.create_model("seqnet50"), x)
    resnet = first_over_last(timm.create_model("resnet50", zero_init_last=False), x)  # every norm scale 1
    plain = first_over_last(unskip.create_model("plain_resnet50"), x)
    plainified = first_over_last(unskip.plainify(timm.create_model("resnet50"), "seq"), x)
    assert seqnet < 10
    assert resnet < 50
    assert plain > 200
    assert plain / seqnet > 50
    assert plainified < 10


def test_gradients_of_seqnet50_and_its_plain_rival() -> None:
    """The quick one of the above."""
    x = photo_images(8, 64)
    seqnet = first_over_last(unskip.create_model("seqnet50"), x)
    plain = first_over_last(unskip.create_model("plain_resnet50"), x)
    assert seqnet < 10
    assert plain > 200
    assert plain / seqnet > 50


# B.1 and B.2: how they are trained.


def rates(recipe_name: str, **changes: object) -> dict[str, float]:
    recipe = load_recipe(recipe_name, **changes)
    with torch.device("meta"):
        network = unskip.create_model(recipe.network.model, **recipe.network.options)
    names = {id(p): name for name, p in network.named_parameters()}
    optimizer = make_optimizer(network, recipe.optimizer)
    groups = optimizer.param_groups
    rate = {names[id(p)]: recipe.optimizer.lr * group["lr_scale"] for group in groups for p in group["params"]}
    assert set(rate) == set(names.values())
    return rate


def test_learning_rates_of_b1_on_the_real_networks() -> None:
    rate = rates("imagenet-seqnet-101")
    for name, lr in rate.items():
        expected = 0.1 if name.startswith("fc.") else 0.02 * 6 / 23 if name.startswith("layer3.") else 0.02
        assert lr == pytest.approx(expected), name
    assert sum(name.endswith("conv1.weight") for name in rate if name.startswith("layer3.")) == 23
    assert sorted(set(rates("imagenet-seqnet-50").values())) == pytest.approx([0.02, 0.1])
    deep34 = rates("imagenet-seqnet-50", model="seqnet34", lr_scales={"fc": 1.0, "*": 0.4})
    assert sorted(set(deep34.values())) == pytest.approx([0.04, 0.1])


def test_orthogonal_regularisation_is_zero_for_o_init_and_turns_r_init_into_it() -> None:
    assert Orthogonal(1.0)(Seq(init="O").linear(32, 4)).item() < 1e-8
    gaussian = Seq(init="R").linear(32, 4)
    before = Orthogonal(1.0)(gaussian).item()
    optimizer = torch.optim.SGD(gaussian.parameters(), lr=1e-2)
    for _ in range(100):
        loss = Orthogonal(1.0)(gaussian)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert Orthogonal(1.0)(gaussian).item() < 0.01 * before
