"""rm keeps the function: every case against the residual network itself, in float64 and float32, odd and even sizes."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.mobilenetv2 import MobileNetV2
from torchvision.models.resnet import BasicBlock, ResNet

import unskip
from tests.models.test_plainness import additions, graph
from tests.ship.test_fold import GRAPH, error, functions, trained
from unskip.methods import RM, BlockSpec, CappedReLU, RMBlock, out_of_range
from unskip.models import ENTRIES
from unskip.models.cifar import cifar_resnet, wide_resnet
from unskip.models.simplified import simplified_net
from unskip.surgery import register_reader
from unskip.surgery.reading import _READERS

NO_LIMIT = float("inf")
SIZES = [(32, 32), (33, 40), (45, 31)]


def check(network: nn.Module, sizes: list[tuple[int, int]] = SIZES, **options: object) -> nn.Module:
    """Converts in float64 and in float32, and compares; returns the converted network in float64."""
    network = trained(network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is discarded
        single = unskip.plainify(network, "rm", limit=NO_LIMIT, **options)
        original = copy.deepcopy(network).double()
        double = unskip.plainify(original, "rm", limit=NO_LIMIT, **options)
    first = next(m for m in network.modules() if isinstance(m, nn.Conv2d))
    assert single.surgery.replaced
    assert not single.surgery.left
    assert not single.surgery.kept
    for height, width in sizes:
        x = torch.randn(2, first.in_channels, height, width)
        assert error(original, double, x.double()) <= 1e-9
        assert error(network, single, x) <= 1e-4
    return double


NARROW = {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 32), "num_classes": 10}
FEW = [[1, 8, 1, 1], [6, 12, 2, 2], [6, 16, 3, 2]]  # blocks of a MobileNet-V2

SMALL: dict[str, Callable[[], nn.Module]] = {
    "cifar, no weights in the shortcut": lambda: cifar_resnet(8),
    "cifar, projections": lambda: cifar_resnet(8, shortcut="B", drop_path_rate=0.5),
    "wrn": lambda: wide_resnet(10, 1),
    "wrn, no weights in the shortcut": lambda: wide_resnet(10, 1, shortcut="A"),
    "simplified": lambda: simplified_net(8, residual=True),
    "timm basic": lambda: timm.create_model("resnet18", **NARROW),
    "timm bottleneck": lambda: timm.create_model("resnet26", **NARROW),
    "timm resnext": lambda: timm.create_model("resnext50_32x4d", **NARROW),
    "timm leaky": lambda: timm.create_model("resnet18", act_layer="leaky_relu", **NARROW),
    "torchvision basic": lambda: ResNet(BasicBlock, [1, 1, 1, 1], 10),
    "torchvision mobilenet": lambda: MobileNetV2(10, inverted_residual_setting=FEW, width_mult=0.35),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_function_stays(name: str) -> None:
    network = check(SMALL[name]())
    folded = unskip.fold(network, example=torch.randn(1, 3, 32, 33))
    assert folded.folding.exact <= 1e-9
    assert functions(folded, torch.randn(1, 3, 32, 32, dtype=torch.float64)) <= GRAPH | {"minimum"}


@pytest.mark.parametrize("options", [{}, {"norm": "absorb", "middle": "grouped"}], ids=["kept", "absorbed"])
def test_average_pooling_at_even_sizes(options: dict) -> None:
    network = check(timm.create_model("resnet26d", **NARROW), [(32, 64), (96, 32)], **options)
    with pytest.raises(ValueError, match=r"rm: a feature map of 9 x 16 pixels comes to a shortcut that averages"):
        network(torch.randn(1, 3, 33, 64, dtype=torch.float64))
    folded = unskip.fold(network, example=torch.randn(1, 3, 64, 32))
    with pytest.raises(ValueError, match="a feature map of 16 x 9 pixels"):
        folded(torch.randn(1, 3, 64, 33, dtype=torch.float64))


def test_average_pooling_of_series_of_any_width() -> None:
    """Of a series with 5 channels only the length must be divisible by the window."""
    shortcut = nn.Sequential(nn.AvgPool1d(2), nn.Conv1d(5, 5, 1))
    block = Any(nn.Conv1d(5, 6, 3, 2, 1), nn.ReLU(), nn.Conv1d(6, 5, 3, padding=1), shortcut=shortcut)
    network = nn.Sequential(nn.Conv1d(3, 5, 1), nn.ReLU(), block, nn.AdaptiveAvgPool1d(1)).double().eval()
    plain = unskip.plainify(network, "rm", limit=float("inf"))
    for length in (16, 30):
        x = torch.randn(2, 3, length, dtype=torch.float64)
        torch.testing.assert_close(plain(x), network(x), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="a feature map of 17 pixels comes to a shortcut that averages windows of 2;"):
        plain(torch.randn(2, 3, 17, dtype=torch.float64))


LARGE: dict[str, Callable[[], nn.Module]] = {
    **{f"timm {name}": lambda name=name: timm.create_model(name, num_classes=10) for name in (
        "resnet18", "resnet34", "resnet50", "resnet101", "wide_resnet50_2", "resnext50_32x4d", "resnet18d", "resnet50d",
        "mobilenetv2_100", "mobilenetv2_140", "resnet10t", "resnet26t",
    )},
    **{f"torchvision {name}": lambda name=name: getattr(torchvision.models, name)(num_classes=10) for name in (
        "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "mobilenet_v2",  # the others have resnet50's blocks
    )},
    **{f"unskip {name}": lambda name=name: unskip.create_model(name) for name, entry in ENTRIES.items()
       if entry.method is None and entry.family in ("cifar_resnet", "wrn", "simplified")
       and name.startswith(("resnet", "wrn", "simplified_resnet"))},
}  # fmt: skip
DENSE = ("18", "34", "mobilenet", "unskip", "10t", "resnext")  # the others are too large for a test in one group


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_every_name(name: str) -> None:
    network = trained(LARGE[name]()).double()
    options = {} if any(part in name for part in DENSE) else {"middle": "grouped"}
    plain = unskip.plainify(network, "rm", limit=NO_LIMIT, norm="absorb", **options)
    for size in [(32, 32)] if name.endswith(("d", "t")) else [(32, 33), (37, 30)]:
        assert error(network, plain, torch.randn(1, 3, *size, dtype=torch.float64)) <= 1e-9
    single, plain = network.float(), plain.float()
    assert error(single, plain, torch.randn(1, 3, *size)) <= 1e-4


class Any(nn.Module):
    """A residual block of any branch, projection and activation."""

    def __init__(
        self,
        *branch: nn.Module,
        pre: tuple[nn.Module, ...] = (),
        shortcut: nn.Module | None = None,
        out_act: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.pre, self.branch, self.shortcut = nn.Sequential(*pre), nn.Sequential(*branch), shortcut
        self.out_act = out_act

    def forward(self, x: Tensor) -> Tensor:
        read = self.pre(x)
        path = x if self.shortcut is None else self.shortcut(read)
        y = self.branch(read) + path
        return y if self.out_act is None else self.out_act(y)


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    @register_reader(Any)
    def read(block: Any, path: str) -> BlockSpec:
        parts = {"branch": tuple(block.branch), "pre": tuple(block.pre)}
        return BlockSpec(path=path, shortcut=block.shortcut, out_act=block.out_act, **parts)

    yield
    _READERS.pop(Any)


def conv(i: int, o: int, k: int = 3, stride: int = 1, **options: object) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, stride, options.pop("padding", k // 2 * options.get("dilation", 1)), **options)


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels)


LEAKY, RELU, RELU6 = nn.LeakyReLU(0.3), nn.ReLU(), nn.ReLU6()
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "signed, relu": lambda: Any(conv(4, 6), norm(6), RELU, conv(6, 4), norm(4)),
    "signed, relu6": lambda: Any(conv(4, 6), norm(6), RELU6, conv(6, 4), norm(4), out_act=RELU6),
    "signed, leaky": lambda: Any(conv(4, 6), norm(6), LEAKY, conv(6, 4), norm(4), out_act=LEAKY),
    "signed, leaky, three": lambda: Any(conv(4, 6, 1), LEAKY, conv(6, 5), norm(5), LEAKY, conv(5, 4, 1), out_act=RELU),
    "signed, leaky and relu": lambda: Any(conv(4, 6, 1), LEAKY, conv(6, 5), norm(5), RELU, conv(5, 4, 1)),
    "signed, prelu": lambda: Any(conv(4, 6), norm(6), nn.PReLU(6), conv(6, 4), out_act=nn.PReLU()),
    "signed, one prelu": lambda: Any(conv(4, 6), norm(6), nn.PReLU(), conv(6, 4)),
    "no activation inside": lambda: Any(conv(4, 6), norm(6), conv(6, 4)),
    "gelu behind the sum": lambda: Any(conv(4, 6), RELU, conv(6, 4), out_act=nn.GELU()),
    "stride, channels kept": lambda: Any(conv(4, 6, stride=2), RELU, conv(6, 4), shortcut=nn.MaxPool2d(1, 2)),
    "stride in the last": lambda: Any(conv(4, 6), RELU, conv(6, 5, stride=2), shortcut=conv(4, 5, 1, 2)),
    "two strides": lambda: Any(conv(4, 6, stride=2), RELU, conv(6, 5, stride=2), shortcut=conv(4, 5, 1, 4)),
    "stride in a 1 x 1": lambda: Any(
        conv(4, 3, 1, 2), RELU, conv(3, 3), RELU, conv(3, 8, 1), shortcut=conv(4, 8, 1, 2)
    ),
    "projection with bias, norm and groups": lambda: Any(
        conv(4, 6), norm(6), RELU, conv(6, 8), norm(8), shortcut=nn.Sequential(conv(4, 8, 1, groups=2), norm(8))
    ),
    "groups": lambda: Any(conv(4, 6, 1), RELU, conv(6, 6, groups=2), norm(6), RELU, conv(6, 4, 1), out_act=RELU),
    "groups that widen": lambda: Any(conv(5, 6, 1), RELU, conv(6, 9, groups=3), RELU, conv(9, 5, 1)),
    "groups that narrow": lambda: Any(conv(5, 9, 1), RELU, conv(9, 6, groups=3), RELU, conv(6, 5, 1)),
    "groups at first": lambda: Any(conv(4, 6, groups=2), norm(6), RELU, conv(6, 4, 1)),
    "groups at last": lambda: Any(conv(4, 6), norm(6), RELU, conv(6, 4, groups=2)),
    "groups after groups": lambda: Any(
        conv(4, 12, 1), RELU, conv(12, 12, groups=3), RELU, conv(12, 12, groups=4), RELU, conv(12, 4, 1)
    ),
    "depthwise twice": lambda: Any(
        conv(4, 6, 1), RELU6, conv(6, 6, groups=6), RELU6, conv(6, 6, 5, groups=6), norm(6), RELU6, conv(6, 4, 1)
    ),
    "depthwise alone": lambda: Any(conv(4, 4, groups=4), out_act=RELU),
    "dilated": lambda: Any(conv(4, 6, dilation=2), RELU, conv(6, 4, 5), out_act=RELU),
    "one convolution": lambda: Any(conv(4, 4), norm(4), out_act=RELU),
    "one strided convolution": lambda: Any(conv(4, 6, 3, 2), shortcut=conv(4, 6, 1, 2)),
    "activation before the sum": lambda: Any(conv(4, 4), norm(4), RELU),
    "groups and an activation before the sum": lambda: Any(conv(4, 4, groups=2), norm(4), RELU),
    "group norm before the sum": lambda: Any(conv(4, 4), nn.GroupNorm(2, 4), RELU, conv(4, 4), nn.GroupNorm(2, 4)),
    "pre-activation": lambda: Any(conv(4, 6), norm(6), RELU, conv(6, 4), pre=(norm(4), RELU)),
    "pre-activation, leaky": lambda: Any(conv(4, 6), norm(6), LEAKY, conv(6, 4), pre=(norm(4), LEAKY)),
    "pre-activation, norm alone": lambda: Any(conv(4, 6), RELU, conv(6, 4), pre=(norm(4),)),
    "pre-activation, projection": lambda: Any(
        conv(4, 6), RELU, conv(6, 5), pre=(norm(4), RELU), shortcut=conv(4, 5, 1)
    ),
    "pre-activation, projection of leaky": lambda: Any(
        conv(4, 6, groups=2), RELU, conv(6, 5), pre=(norm(4), LEAKY), shortcut=conv(4, 5, 1)
    ),
    "average pooling": lambda: Any(
        conv(4, 6, stride=2), RELU, conv(6, 5), shortcut=nn.Sequential(nn.AvgPool2d(2), conv(4, 5, 1), norm(5))
    ),
    "average pooling in the middle": lambda: Any(
        conv(4, 6, 1), RELU, conv(6, 6, stride=2), RELU, conv(6, 5, 1),
        shortcut=nn.Sequential(nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False), conv(4, 5, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"norm": "absorb", "middle": "grouped"}], ids=["kept", "absorbed"])
@pytest.mark.parametrize("rectified", [False, True], ids=["signed", "nonnegative"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_any_kind(name: str, rectified: bool, options: dict) -> None:
    """Behind a convolution its input has both signs, behind a ReLU it has one; rm finds out which."""
    block = BLOCKS[name]()
    stem = nn.Sequential(nn.Conv2d(3, block.branch[0].in_channels, 1), nn.ReLU() if rectified else nn.Identity())
    sizes = [(8, 6), (4, 10)] if "pooling" in name else [(8, 7), (9, 5)]
    check(nn.Sequential(stem, block), sizes, **options)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Any(conv(4, 6), nn.Tanh(), conv(6, 4)), "its activation Tanh.* bends what is carried"),
        (lambda: Any(conv(4, 6), nn.Mish(), conv(6, 4)), "its activation Mish.* bends"),
        (lambda: Any(conv(4, 6), nn.LeakyReLU(-0.1), conv(6, 4)), "bends what is carried"),
        (lambda: Any(conv(4, 6, padding=0), RELU, conv(6, 4, padding=2)), "pads so that it does not read the pixel"),
        (lambda: Any(conv(4, 6, padding_mode="reflect"), RELU, conv(6, 4)), "pads so that it does not read the pixel"),
        (lambda: Any(conv(4, 6), RELU, conv(6, 5), shortcut=conv(4, 5)), "its projection .* is not a 1 x 1"),
        (
            lambda: Any(conv(4, 6), RELU, conv(6, 5), shortcut=nn.Sequential(conv(4, 5, 1), RELU)),
            "its shortcut holds torch.ReLU",
        ),
        (
            lambda: Any(conv(4, 6), RELU, conv(6, 4, stride=2), shortcut=nn.MaxPool2d(2)),
            "its shortcut holds MaxPool2d.* no average over windows",
        ),
        (
            lambda: Any(conv(4, 6, 1, 2), RELU, conv(6, 4), shortcut=nn.AvgPool2d(2)),
            "does not reach over the 2 x 2 pixels",
        ),
        (
            lambda: Any(conv(4, 6, 1), LEAKY, conv(6, 4, stride=2), RELU, conv(4, 4), shortcut=nn.AvgPool2d(2)),
            "averages numbers of both signs",
        ),
        (
            lambda: Any(conv(4, 6), RELU, conv(6, 4), pre=(nn.ReLU(inplace=True),)),
            "works in place on what the shortcut",
        ),
    ],
)
def test_what_has_no_exact_form_is_refused_with_its_path(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)plainify: method 'rm' can't make block '1' of Sequential .*{says}"):
        unskip.plainify(nn.Sequential(nn.Conv2d(3, 4, 1), build()).eval(), "rm", limit=NO_LIMIT)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: timm.create_model("resnet26", aa_layer=timm.layers.BlurPool2d), "its branch holds"),
        (lambda: timm.create_model("resnet10t", act_layer="mish"), "its activation Mish"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1), "its forward takes more than its input"),
    ],
)
def test_networks_that_are_refused(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ValueError, match=rf"can't make block '\S+' of \w+ skip-free: .*{says}"):
        unskip.plainify(build().eval(), "rm", limit=NO_LIMIT)


def test_a_network_in_training_mode_and_one_with_a_hook_are_refused() -> None:
    network = cifar_resnet(8).eval()
    network.layer2[0].bn1.train()
    with pytest.raises(ValueError, match=r"plainify: 'layer2.0.bn1' is in training mode"):
        unskip.plainify(network, "rm")
    network.eval().layer1[0].conv1.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match=r"plainify: 'layer1.0.conv1' \(Conv2d\) has a forward hook"):
        unskip.plainify(network, "rm")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"norm": "drop"}, "norm='drop' is not known. Known: keep, absorb"),
        ({"relu6": "clip"}, "relu6='clip' is not known"),
        ({"middle": "x"}, "middle='x' is not known"),
        ({"scale": 2.5}, "scale=2.5 must be a whole number"),
        ({"scale": -1}, "scale=-1 must be a whole number"),
        ({"limit": 0.5}, "limit=0.5 must be at least 1"),
        ({"limit": "4"}, "limit='4' must be a finite number"),
        ({"limit": float("nan")}, "limit=nan must be a finite number"),
    ],
)
def test_options_are_checked(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=f"rm: {says}"):
        RM(**options)


def relu6_network() -> nn.Module:
    torch.manual_seed(1)
    block = Any(conv(4, 6), norm(6), nn.ReLU6(), conv(6, 6, groups=6), nn.ReLU6(), conv(6, 4, 1), norm(4))
    return trained(nn.Sequential(nn.Conv2d(3, 4, 1), block)).double()


def test_a_relu6_block_carries_what_is_above_six() -> None:
    network, x = relu6_network(), 40 * torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert network[0](x).abs().max() > 12
    plain = unskip.plainify(network, "rm", limit=NO_LIMIT)
    assert any(isinstance(m, CappedReLU) for m in plain.modules())
    assert error(network, plain, x) <= 1e-12
    assert not out_of_range(plain, x)


def test_a_scale_has_a_range_that_is_stored_and_told() -> None:
    network, x = relu6_network(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plain = unskip.plainify(network, "rm", limit=NO_LIMIT, relu6="scale", scale=2)
    assert not any(isinstance(m, CappedReLU) for m in plain.modules())
    assert plain[1].bound == 24
    assert plain.state_dict()["1.bound"] == 24
    x *= 23.9 / network[0](x).abs().max()  # roughly: the bias does not scale
    assert network[0](x).abs().max() > 12
    assert error(network, plain, x) <= 1e-12
    assert not out_of_range(plain, x)
    far = 4 * x
    assert error(network, plain, far) > 1e-3
    for converted in (plain, unskip.fold(plain)):
        (largest, bound), *others = out_of_range(converted, far).values()
        assert not others
        assert bound == 24
        assert largest == pytest.approx(network[0](far).abs().max().item())
        assert not any(m._forward_pre_hooks for m in converted.modules())
        found = unskip.verify(network, converted, far)
        assert not found.ok()
        assert any("block '1' of b carries numbers up to 24 and no larger ones" in reason for reason in found.reasons())


def test_it_is_an_ordinary_network_that_trains_on() -> None:
    network = trained(cifar_resnet(8, shortcut="B"))
    for options in ({}, {"norm": "absorb"}):
        plain = unskip.plainify(network, "rm", **options)
        assert sum(isinstance(m, RMBlock) for m in plain.modules()) == 3
        x, y = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
        before = plain(x)
        assert torch.equal(copy.deepcopy(plain)(x), before)
        fresh = unskip.plainify(trained(cifar_resnet(8, shortcut="B"), seed=1), "rm", **options)
        fresh.load_state_dict(plain.state_dict(), strict=True)
        assert torch.equal(fresh(x), before)
        exported = torch.export.export(plain, (x,)).module()
        torch.testing.assert_close(exported(x), before)
        if not options:
            compiled = torch.compile(copy.deepcopy(plain), backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(x), before)
        plain.train()
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(plain(x), y)
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in plain.parameters())
            optimizer.step()
            losses.append(loss.item())
        assert losses[2] < losses[1] < losses[0]
        # What was trained on still folds: the carried channels are ordinary weights now.
        assert unskip.fold(plain.eval()).folding.exact <= 1e-9


@pytest.mark.parametrize("build", [lambda: cifar_resnet(8, shortcut="B"), lambda: wide_resnet(10, 1)])
def test_its_graph_is_a_row(build: Callable[[], nn.Module]) -> None:
    """No addition, and whatever is computed is read once: nothing stays in memory for later."""
    network = trained(build())
    assert additions(graph(network, 16))
    program = graph(unskip.fold(unskip.plainify(network, "rm")), 16)
    assert not additions(program)
    computed = [node for node in program.graph.nodes if node.op == "call_function"]
    assert len(computed) > 9
    assert all(len(node.users) == 1 for node in computed)


def test_kept_norms_act_on_the_branch_alone() -> None:
    """In training mode the inner norms see what they saw in the residual network: its statistics move alike."""
    network = trained(cifar_resnet(8))
    plain = unskip.plainify(network, "rm")
    x = torch.randn(8, 3, 16, 16)
    network.train(), plain.train()
    network.layer1[0](network.act1(network.bn1(network.conv1(x)))), plain(x)
    for name in ("running_mean", "running_var"):
        ours, theirs = getattr(plain.layer1[0].norm1.norm, name), getattr(network.layer1[0].bn1, name)
        torch.testing.assert_close(ours, theirs)


def test_unknown_signs_are_carried_as_two() -> None:
    """The block ends in a ReLU, but nobody says that it reads one."""
    block = lambda: Any(conv(4, 6), RELU, conv(6, 4), out_act=RELU)  # noqa: E731
    network = nn.Sequential(nn.Conv2d(3, 4, 1), block(), block()).eval()
    plain = unskip.plainify(network, "rm", limit=NO_LIMIT)
    assert plain[1].conv1.out_channels == 6 + 2 * 4
    assert plain[2].conv1.out_channels == 6 + 4
