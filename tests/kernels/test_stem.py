"""The fast stem is the ordinary one: outputs, gradients and statistics; other sizes take the ordinary path.

No GPU is needed: that condition is lifted here, and Triton's kernels run in its interpreter.
"""

import copy
import io

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import prune

import unskip
from tests.kernels.interpreter import interpreted, needs_triton
from unskip._core.modules import as_class
from unskip.kernels import stem, use_fast_layers
from unskip.kernels.stem import PooledStem, StemConv2d, StemPool
from unskip.ship.fold import pool_stem


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The convolution over squares on a CPU too; what it read, so that a test can tell that it ran."""
    read: list[Tensor] = []
    fast = stem.space_to_depth_conv

    def noted(x: Tensor, *args: object, **options: object) -> Tensor:
        read.append(x)
        return fast(x, *args, **options)

    monkeypatch.setattr(stem, "on_tensor_cores", lambda x: True)
    monkeypatch.setattr(stem, "space_to_depth_conv", noted)
    return read


def equal(expected: Tensor, actual: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert (actual - expected).abs().max() <= 1e-10 * expected.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_the_convolution_over_squares(everywhere: list[Tensor], kernel: int, channels: int, bias: bool) -> None:
    conv = nn.Conv2d(channels, 6, kernel, stride=2, padding=kernel // 2, bias=bias, dtype=torch.float64)
    fast = as_class(StemConv2d, conv)
    assert list(fast.state_dict()) == list(conv.state_dict())
    found = []
    for layer in (conv, fast):
        x = torch.randn(2, channels, 10, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        layer.zero_grad()
        y = layer(x)
        y.sin().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    assert len(everywhere) == 1
    assert found[1][0].is_contiguous(memory_format=torch.channels_last)
    for expected, actual in zip(*found, strict=True):
        equal(expected, actual)


@pytest.mark.parametrize("shape", [(2, 3, 9, 8), (2, 3, 8, 9), (3, 8, 8), (0, 3, 8, 8)])
def test_other_images_take_the_ordinary_path(everywhere: list[Tensor], shape: tuple[int, ...]) -> None:
    conv = nn.Conv2d(3, 4, 7, stride=2, padding=3)
    x = torch.randn(shape)
    assert torch.equal(as_class(StemConv2d, conv)(x), conv(x))
    assert not everywhere


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 6, "stride": 2, "padding": 2},
        {"kernel_size": 7, "stride": 1, "padding": 3},
        {"kernel_size": 7, "stride": 2, "padding": 2},
        {"kernel_size": 7, "stride": (2, 1), "padding": 3},
        {"kernel_size": (7, 5), "stride": 2, "padding": (3, 2)},
        {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1, "padding_mode": "reflect"},
        {"kernel_size": 3, "stride": 1, "padding": "same"},
        {"kernel_size": 1, "stride": 2, "padding": 0},
    ],
)
def test_other_convolutions_stay(everywhere: list[Tensor], settings: dict) -> None:
    network = nn.Sequential(nn.Conv2d(4, 4, **settings))
    assert not use_fast_layers(network)
    assert type(network[0]) is nn.Conv2d
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(as_class(StemConv2d, network[0])(x), network[0](x))
    assert not everywhere


def test_layers_with_hooks_stay() -> None:
    """Whoever waits for a layer to be called, or computes its weight by a hook, as torch.nn.utils.prune does."""
    called = []
    network = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.MaxPool2d(3, 2, 1))
    network[1].register_forward_hook(lambda *_: called.append("pool"))
    assert use_fast_layers(network)
    network(torch.randn(2, 3, 8, 8))
    assert called == ["pool"]
    network = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1))
    prune.l1_unstructured(network[0], "weight", amount=0.5)
    assert not use_fast_layers(network)


def test_without_half_precision_on_a_gpu_it_is_the_ordinary_convolution() -> None:
    conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(as_class(StemConv2d, conv)(x), conv(x))
    assert not stem.on_tensor_cores(x)
    assert not stem.on_tensor_cores(x.bfloat16())


@pytest.mark.parametrize(
    ("settings", "suits"),
    [
        ({"kernel_size": 3, "stride": 2, "padding": 1}, True),
        ({"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1)}, True),
        ({"kernel_size": 3, "stride": 2, "padding": 0}, False),
        ({"kernel_size": 2, "stride": 2, "padding": 1}, False),
        ({"kernel_size": 3, "padding": 1}, False),
        ({"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2}, False),
        ({"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}, False),
        ({"kernel_size": 3, "stride": 2, "padding": 1, "return_indices": True}, False),
    ],
)
def test_pooling_that_suits(settings: dict, suits: bool) -> None:
    assert stem.is_stem_pool(nn.MaxPool2d(**settings)) is suits


# ---------------------------------------------------------------- whole networks

NETWORKS = {
    "resnet18": (lambda: timm.create_model("resnet18"), "conv1", "maxpool"),
    "torchvision's": (torchvision.models.resnet18, "conv1", "maxpool"),
    "mobilenetv2": (lambda: timm.create_model("mobilenetv2_050"), "conv_stem", None),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_pnnh_puts_it_in(name: str) -> None:
    build, conv, pool = NETWORKS[name]
    residual = build()
    plain, fast = (unskip.plainify(residual, "pnnh", block=block) for block in ("plain", "fast"))
    assert type(residual.get_submodule(conv)) is type(plain.get_submodule(conv)) is nn.Conv2d
    assert type(fast.get_submodule(conv)) is StemConv2d
    assert torch.equal(fast.get_submodule(conv).weight, residual.get_submodule(conv).weight)
    assert [(k, v.shape) for k, v in fast.state_dict().items()] == [(k, v.shape) for k, v in plain.state_dict().items()]
    assert "StemConv2d(3, " in repr(fast)
    if pool:
        assert type(plain.get_submodule(pool)) is nn.MaxPool2d
        assert type(fast.get_submodule(pool)) is StemPool
        assert "StemPool(kernel_size=3, stride=2, padding=1" in repr(fast)
    other = unskip.plainify(residual.eval(), "pnnh_paper", pretext="random")
    assert type(other.get_submodule(conv)) is StemConv2d
    assert not other.get_submodule(conv).training


def test_networks_of_small_images_and_other_methods_have_none() -> None:
    for network in (
        unskip.create_model("pnnh_resnet20"),
        unskip.create_model("plain_resnet18"),
        unskip.plainify(timm.create_model("resnet18"), "residual_half"),
    ):
        assert not any(isinstance(module, StemConv2d | StemPool) for module in network.modules())


def beginning(block: str) -> nn.Module:
    """A small network with a stem."""
    torch.manual_seed(0)
    network = timm.models.ResNet(timm.models.resnet.BasicBlock, (1, 1, 1, 1), num_classes=5)
    network = unskip.plainify(network, "pnnh", block=block)
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, 0, 0.3)
    return network


@pytest.mark.parametrize(
    ("side", "compiled", "train"),
    [
        (32, False, True),
        (32, False, False),
        (33, False, True),
        (32, True, True),
        pytest.param(32, True, False, marks=pytest.mark.full),
        pytest.param(33, True, True, marks=pytest.mark.full),
    ],
)
def test_a_network_with_it_is_the_same_function(
    everywhere: list[Tensor], side: int, compiled: bool, train: bool
) -> None:
    plain, fast = beginning("plain"), beginning("fast")
    fast.load_state_dict(plain.state_dict())
    found = []
    for network in (plain, fast):
        network.double().train(train)
        x = torch.randn(3, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        call = network
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(network, backend="aot_eager", fullgraph=True, dynamic=False)
        y = call(x)
        y.square().sum().backward()
        noted = [buffer for name, buffer in network.named_buffers() if "coder" not in name]
        found.append([y.detach(), x.grad, *(p.grad for p in network.parameters()), *noted])
    assert bool(everywhere) is (side == 32) or compiled  # a compiler does not call what it has traced
    for expected, actual in zip(*found, strict=True):
        if expected.is_floating_point():
            equal(expected, actual)


def test_autocast_gives_half_precision(everywhere: list[Tensor]) -> None:
    network = as_class(StemConv2d, nn.Conv2d(3, 4, 7, stride=2, padding=3))
    for x in (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8).bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            y = network(x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert network.weight.grad.dtype == torch.float32
    assert len(everywhere) == 2


def test_it_is_copied_pickled_and_loaded() -> None:
    network = unskip.create_model("pnnh_resnet18", num_classes=3).eval()
    x = torch.randn(2, 3, 32, 32)
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    fresh = unskip.create_model("pnnh_resnet18", num_classes=3).eval()
    fresh.load_state_dict(network.state_dict())
    for other in (copy.deepcopy(network), loaded, fresh):
        assert type(other.conv1) is StemConv2d
        assert type(other.maxpool) is StemPool
        with torch.no_grad():
            assert torch.equal(other(x), network(x))


def test_folded_it_stays_in_form_fast_and_is_ordinary_in_form_dense() -> None:
    network = beginning("fast").eval()
    example = torch.randn(2, 3, 32, 32)
    fast, dense = (unskip.fold(network, form, example=example) for form in ("fast", "dense"))
    assert type(fast.conv1) is PooledStem
    conv, _, pool = fast.conv1
    assert type(conv) is StemConv2d
    assert conv.bias is not None  # the norm is in it
    assert type(pool) is StemPool
    assert type(fast.act1) is type(fast.maxpool) is nn.Identity
    assert type(dense.conv1) is nn.Conv2d
    assert type(dense.maxpool) is nn.MaxPool2d
    assert not any(isinstance(module, nn.BatchNorm2d) for net in (fast, dense) for module in net.modules())


def layers_of_a_stem(bias: bool = True) -> list[nn.Module]:
    conv, pool = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=bias), nn.MaxPool2d(3, 2, 1)
    return [as_class(StemConv2d, conv), nn.ReLU(inplace=True), as_class(StemPool, pool)]


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (1, 3, 31, 45), (3, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bias_and_relu_behind_the_pooling_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """max relu(u + b) = relu(max u + b), whatever the rounding, with a bias that is added as it is here."""
    conv, act, pool = layers_of_a_stem()
    network = PooledStem(conv, act, pool).to(dtype)
    x = torch.randn(shape, dtype=dtype)
    assert torch.equal(network(x), pool(act(conv(x))))  # on a CPU the layers as they are
    monkeypatch.setattr(stem, "on_tensor_cores", lambda x: True)
    u = conv._conv_forward(x, conv.weight, None)
    expected = pool(act(u + conv.bias.view(-1, 1, 1)))
    assert (expected == 0).any()
    assert torch.equal(network(x), expected)


def test_a_pooled_stem_under_autocast_gives_half_precision_and_gradients(everywhere: list[Tensor]) -> None:
    network = PooledStem(*layers_of_a_stem())
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert network(x).dtype == torch.bfloat16
    ordinary = nn.Sequential(*network)
    found = [torch.autograd.grad(f(x).square().sum(), [x, *network.parameters()]) for f in (ordinary, network)]
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_pooled_stem_that_is_watched_or_has_no_bias_runs_layer_by_layer(everywhere: list[Tensor]) -> None:
    x = torch.randn(2, 3, 16, 16)
    network = PooledStem(*layers_of_a_stem())
    expected = network(x)
    seen = []
    handle = network[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    torch.testing.assert_close(network(x), expected)
    assert seen == [(2, 8, 8, 8)]
    handle.remove()
    network(x)
    assert len(seen) == 1
    traced = torch.fx.symbolic_trace(network)
    assert [node.op for node in traced.graph.nodes].count("call_module") >= 1
    torch.testing.assert_close(traced(x), expected)
    exported = torch.export.export(network, (x,))
    called = [str(node.target).split(".")[1] for node in exported.graph.nodes if node.op == "call_function"]
    assert called[-2:] == ["relu_", "max_pool2d"]
    bare = PooledStem(*layers_of_a_stem(bias=False))
    assert torch.equal(bare(x), nn.Sequential(*bare)(x))


def test_a_stem_whose_parts_are_read_elsewhere_too_stays_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.pool = layers_of_a_stem()
            self.act.inplace = False

        def forward(self, x: Tensor) -> Tensor:
            u = self.act(self.conv(x))
            return torch.cat([self.pool(u).flatten(1), u.flatten(1)], 1)

    network, x = Twice().eval(), torch.randn(2, 3, 16, 16)
    assert pool_stem(network, x) is network
    assert type(network.conv) is StemConv2d


def test_a_pooled_stem_can_be_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    head = [nn.Conv2d(8, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    network = nn.Sequential(PooledStem(*layers_of_a_stem()), *head).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        network[0][0].weight[:2] = network[0][0].bias[:2] = 0  # dead
        pruned = unskip.ship.prune(network, example=x)
        assert pruned.pruning.removed == {"0.0": 2}
        assert type(pruned[0]) is PooledStem
        expected = network(x)
        monkeypatch.setattr(stem, "on_tensor_cores", lambda x: True)
        torch.testing.assert_close(pruned(x), expected)


def test_an_exported_program_has_the_ordinary_operators() -> None:
    network = beginning("fast").eval()
    program = torch.export.export(network, (torch.randn(2, 3, 32, 32),))
    called = {str(node.target) for node in program.graph.nodes}
    assert not any("unskip" in name or "pad" in name for name in called)
    assert any("max_pool2d" in name for name in called)


def test_a_symbolic_trace_sees_the_ordinary_layers() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    assert use_fast_layers(network)
    traced = torch.fx.symbolic_trace(network)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(traced(x), network(x))


# ---------------------------------------------------------------- Triton's kernels


POOLS = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
import unskip
from unskip._core.modules import as_class
from unskip.kernels import stem

assert "unskip.kernels.stem_triton" not in sys.modules
stem.has_kernels_for = lambda x: True
ordinary = nn.MaxPool2d(3, 2, 1)
pool = as_class(stem.StemPool, ordinary)

def images(*shape, dtype=torch.float64):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.to(dtype).contiguous(memory_format=torch.channels_last)

def check(x, call=pool, tolerance=1e-10):
    found = []
    for f in (ordinary, call):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = f(leaf * 1)
        how = type(y.grad_fn).__name__
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype))
        found.append((y.detach(), leaf.grad))
    for a, b in zip(*found):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True), (a - b).abs().max()
    return "unskip_max_pool" in how
"""


@needs_triton
def test_pooling_by_kernels() -> None:
    """Values and gradients as F.max_pool2d's, ties and NaN too; what it is not made for is left to that."""
    interpreted(
        "-c",
        POOLS
        + """
assert check(images(2, 5, 6, 10))
assert check(images(1, 64, 4, 36))
assert check(images(2, 130, 2, 2))
assert check(images(2, 5, 6, 10).relu())  # ties
assert check(torch.full((1, 3, 4, 4), -torch.inf).contiguous(memory_format=torch.channels_last))
holed = images(2, 5, 6, 10)
holed[0, 0, 1, 1] = holed[0, 0, 2, 1] = torch.nan
assert check(holed)
assert check(images(2, 5, 6, 10, dtype=torch.float32))
# PyTorch's own rounds each sum to bfloat16, the kernel the last one.
assert check(images(2, 5, 6, 10, dtype=torch.bfloat16).relu(), tolerance=2e-2)
assert not check(images(2, 5, 7, 10))
assert not check(images(2, 5, 6, 10).contiguous())
x = images(2, 5, 6, 10)
with torch.no_grad():
    assert torch.equal(pool(x), ordinary(x))
a, b = (torch.func.grad(lambda x: f(x).sin().sum())(x) for f in (pool, ordinary))
assert torch.equal(a, b)
""",
    )


@pytest.mark.full
@needs_triton
def test_pooling_by_kernels_under_compilers() -> None:
    """One graph, by AOTAutograd alone and by Inductor; PyTorch's check of operators; second gradients."""
    interpreted(
        "-c",
        POOLS
        + """
for backend in ("aot_eager", "inductor"):
    torch._dynamo.reset()
    check(images(2, 5, 6, 10), torch.compile(pool, backend=backend, fullgraph=True, dynamic=False))
x = images(2, 5, 6, 10)
torch.library.opcheck(torch.ops.unskip.max_pool, (images(2, 5, 6, 10).requires_grad_(),))
code = torch.ops.unskip.max_pool(x)[1]
torch.library.opcheck(torch.ops.unskip.max_pool_gradient, (images(2, 5, 3, 5).requires_grad_(), code))
small = images(1, 2, 4, 6).requires_grad_()
assert torch.autograd.gradgradcheck(lambda x: pool(x.contiguous(memory_format=torch.channels_last)), (small,))
""",
    )
