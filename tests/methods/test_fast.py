"""The fast and the lean block are the plain definition: outputs, gradients and statistics, in float64."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import unskip
from unskip.kernels.depthwise import JoinedSequential
from unskip.methods import PNNHBlock
from unskip.methods.lean import LeanInverted, LeanSequential
from unskip.models.cifar import cifar_resnet


def bottlenecks() -> nn.Module:
    """The beginning of a ResNet-50: a transition of width, one of width and stride, and a block behind each."""
    net = timm.models.ResNet(timm.models.resnet.Bottleneck, (2, 2, 1, 1))
    return nn.Sequential(net.conv1, net.bn1, net.act1, net.maxpool, net.layer1, net.layer2)


def inverted() -> nn.Module:
    """The beginning of a MobileNet-V2."""
    net = timm.create_model("mobilenetv2_050")
    return nn.Sequential(net.conv_stem, net.bn1, *net.blocks[:3])


FAMILIES = {
    "vanilla": (lambda: cifar_resnet(14), 8, {}),
    "vanilla, identity": (lambda: cifar_resnet(14), 8, {"pretext": "identity"}),
    "vanilla, fitted's shape": (lambda: cifar_resnet(14), 8, {"pretext": "random"}),
    "vanilla, quarter": (lambda: cifar_resnet(14), 8, {"ratio": 0.25}),
    "vanilla, odd sizes": (lambda: cifar_resnet(14), 9, {}),
    "bottleneck": (bottlenecks, 32, {}),
    "inverted": (inverted, 32, {}),
    "inverted, rectified": (inverted, 32, {"signed": "rectify"}),
    "mlp": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), 32, {"pretext": "group_average"}),
}


def pair(family: str, block: str, *, train: bool) -> tuple[nn.Module, nn.Module, Tensor]:
    """The plain definition, the other one with the same weights, and images."""
    build, side, options = FAMILIES[family]
    residual = build()
    plain, other = (unskip.plainify(residual, "pnnh", block=b, **options) for b in ("plain", block))
    for module in plain.modules():  # so that no gain is 1, no bias 0 and nobody's linear outputs are small
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    other.load_state_dict(plain.state_dict())
    images = torch.randn(4, 3, side, side, dtype=torch.float64)
    return plain.double().train(train), other.double().train(train), images


def results(call: nn.Module, network: nn.Module, images: Tensor) -> list[tuple[str, Tensor]]:
    """Output, gradients of the weights and of the images, and what the norms have noted."""
    x = images.clone().requires_grad_()
    y = call(x)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator, dtype=y.dtype))
    found = [("output", y.detach()), ("images", x.grad)]
    found += [(name, p.grad) for name, p in network.named_parameters()]
    return found + [(name, b) for name, b in network.named_buffers() if "coder" not in name]


def assert_equal(plain: nn.Module, other: nn.Module, call: nn.Module, images: Tensor) -> None:
    pairs = list(zip(results(plain, plain, images), results(call, other, images), strict=True))
    largest = max(p.grad.abs().max() for p in plain.parameters())
    for (name, expected), (_, actual) in pairs:
        assert expected is not None, name
        # A bias in front of a norm has no gradient but rounding, so it is measured by those of others.
        scale = max(expected.abs().max(), 1e-5 * largest)
        error = (actual - expected).abs().max() / scale
        assert error < 1e-10, f"{name}: {error}"


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", ["auto", "fast", "lean"])
def test_equal_in_eager(family: str, block: str, train: bool) -> None:
    plain, other, images = pair(family, block, train=train)
    assert_equal(plain, other, other, images)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("block", ["auto", "fast", "lean"])
@pytest.mark.parametrize(
    "family",
    ["vanilla", *(pytest.param(name, marks=pytest.mark.full) for name in FAMILIES if name != "vanilla")],
)
def test_equal_under_the_compiler(family: str, block: str, train: bool) -> None:
    """Traced, decomposed, and cut into forward and backward; the code that Inductor writes is the next test's."""
    torch._dynamo.reset()
    plain, other, images = pair(family, block, train=train)
    call = torch.compile(other, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    assert_equal(plain, other, call, images)


@pytest.mark.full
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("family", "block"),
    [(family, "auto") for family in ("vanilla", "vanilla, fitted's shape", "bottleneck", "inverted", "mlp")]
    + [("vanilla", "lean"), ("inverted", "fast"), ("inverted", "lean")],
)
def test_equal_in_generated_code(family: str, block: str, train: bool) -> None:
    """By Inductor. `auto`, the default, is `fast` but in inverted blocks."""
    torch._dynamo.reset()
    plain, other, images = pair(family, block, train=train)
    assert_equal(plain, other, torch.compile(other, fullgraph=True, dynamic=False), images)


def test_channels_last_stays_channels_last() -> None:
    _, other, _ = pair("vanilla", "fast", train=True)
    block = other.layer1[1].to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 6, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    assert block.coder(x).is_contiguous(memory_format=torch.channels_last)
    assert block(x).is_contiguous(memory_format=torch.channels_last)


class GPUAutocast(TorchFunctionMode):
    """What autocast on a GPU does with a sum, and on a CPU does not: float32, unless a dtype is asked for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.sum, Tensor.sum) and "dtype" not in kwargs:
            kwargs["dtype"] = torch.float32
        return function(*args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_coder_stays_in_half_precision_under_autocast(family: str) -> None:
    """One sum in float32 and all outputs of a network's blocks would have twice the bytes."""
    _, other, images = pair(family, "fast", train=True)
    other.float()
    found = []
    for module in other.modules():
        if isinstance(module, PNNHBlock) and not module.pre:  # behind a LayerNorm autocast is in float32 anyway
            module.register_forward_hook(lambda _, __, y: found.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16), GPUAutocast():
        other(images.bfloat16())
    assert set(found) <= {torch.bfloat16}


def test_auto_is_lean_where_hidden_activations_are_most_of_what_is_kept() -> None:
    def learners(family: str, **options: str) -> set[type]:
        network = unskip.plainify(FAMILIES[family][0](), "pnnh", **options)
        return {type(module.learner) for module in network.modules() if isinstance(module, PNNHBlock)}

    assert learners("inverted") == {LeanInverted}
    assert learners("inverted", block="lean") == learners("vanilla", block="lean") == {LeanSequential}
    assert learners("inverted", block="fast") == {JoinedSequential}
    assert learners("vanilla") == learners("bottleneck") == learners("inverted", block="plain") == {nn.Sequential}


def test_a_lean_block_works_under_the_transforms_of_torch_func() -> None:
    plain, lean, images = pair("inverted", "lean", train=True)
    found = []
    for network in (plain, lean):

        def loss(weights: dict, network: nn.Module = network) -> Tensor:
            buffers = {name: b.clone() for name, b in network.named_buffers()}  # which norms write to
            return torch.func.functional_call(network, {**weights, **buffers}, (images,)).square().mean()

        found.append(torch.func.grad(loss)({name: p.detach() for name, p in network.named_parameters()}))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-9, atol=1e-12)


def test_a_closed_form_needs_no_convolution() -> None:
    """Three convolutions a block of a bottleneck, and none beside them."""
    from torch.utils.flop_counter import FlopCounterMode

    network = unskip.plainify(timm.create_model("resnet50"), "pnnh").eval()
    block = network.layer2[1]
    x = torch.randn(1, 512, 4, 4)
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        block(x)
    assert flops.get_total_flops() == 2 * 16 * (512 * 64 + 64 * 64 * 9 + 64 * 512)


def test_a_block_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"block='quick' is not known\. Known: auto, plain, fast, lean"):
        unskip.create_model("pnnh_resnet20", block="quick")


def kept_bytes(network: nn.Module, images: Tensor) -> int:
    """What autograd keeps of a forward pass, beside weights."""
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.ndim and tensor.shape[0] == len(images):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        network(images)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_a_lean_block_keeps_less_in_eager() -> None:
    """Of x (C), u (C/2), a (C/2) and the coder's code (C/2) it does not keep a."""
    plain, lean, _ = pair("vanilla", "lean", train=True)
    x = torch.rand(3, 16, 8, 8, dtype=torch.float64)
    # A hook beneath another is not asked, so what is left is counted by freeing: peak less what a step has at its end.
    from unskip.bench.runner import peak_bytes

    def forward(block: nn.Module) -> int:
        held = []
        return peak_bytes(lambda: held.append(block(x.requires_grad_())), torch.device("cpu"), 0, 0)

    a = 3 * 8 * 64 * 8
    deep = [nn.Sequential(*(copy.deepcopy(net.layer1[1]) for _ in range(6))) for net in (plain, lean)]
    assert kept_bytes(deep[0], x) >= 6 * a
    assert forward(deep[0]) - forward(deep[1]) >= 4 * a


def test_lean_twice_over_one_graph() -> None:
    """retain_graph, and a backward pass that needs the weights of the last layer alone."""
    plain, lean, images = pair("vanilla", "lean", train=True)
    for net in (plain, lean):
        loss = net(images).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for (name, p), q in zip(plain.named_parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9, msg=name)
    (gradient,) = torch.autograd.grad(lean(images).sum(), [lean.layer3[-1].learner.conv2.weight])
    (expected,) = torch.autograd.grad(plain(images).sum(), [plain.layer3[-1].learner.conv2.weight])
    torch.testing.assert_close(gradient, expected)


def test_lean_on_the_meta_device() -> None:
    """Where all addresses are 0, and the bench counts what a step must do."""
    from unskip.bench.floor import work

    counts = [work(pair("vanilla", block, train=True)[1], (2, 3, 8, 8), train=True) for block in ("fast", "lean")]
    assert counts[0] == counts[1]


class Gated(nn.Module):
    """Keeps two tensors of its input's shape, neither of which is that or its output."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 1) * (2 * x).sigmoid()


IN_PLACE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.Mish, nn.ELU, nn.CELU)
ACTIVATIONS = [kind(inplace=inplace) for kind in IN_PLACE for inplace in (False, True)]


@pytest.mark.parametrize("act", [*ACTIVATIONS, nn.GELU(), nn.Tanh(), Gated()], ids=str)
def test_lean_with_any_activation(act: nn.Module) -> None:
    """What autograd keeps differs: input, output, a copy of what was overwritten, or something between."""
    lean = LeanSequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act, nn.Conv2d(8, 4, 3)).double()
    plain = nn.Sequential(*copy.deepcopy(lean))
    assert_equal(plain, lean, lean, torch.randn(4, 3, 8, 8, dtype=torch.float64))


def test_lean_computes_again_in_silence_and_in_the_mode_of_the_forward_pass() -> None:
    """Hooks and running statistics see one pass, and calling .eval() before .backward() changes no gradient."""
    lean = LeanSequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).double()
    plain = nn.Sequential(*copy.deepcopy(lean))
    x, calls, found = torch.randn(4, 3, 8, 8, dtype=torch.float64), [], []
    for network in (lean, plain):
        for layer in network:
            layer.register_forward_hook(lambda *_: calls.append(1))
        y = network(x)
        network.eval()
        y.square().sum().backward()
        found.append([*(p.grad for p in network.parameters()), *network.buffers()])
    torch.testing.assert_close(found[0], found[1])
    assert len(calls) == 8
    assert lean[1].num_batches_tracked == 1


def test_lean_leaves_out_an_activation_by_chance() -> None:
    """The noise of a second call would be another one."""
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.RReLU(), nn.Conv2d(8, 4, 3))
    lean, plain = LeanSequential(*layers), nn.Sequential(*copy.deepcopy(layers))
    x, found = torch.randn(4, 3, 8, 8), []
    for network in (lean, plain):
        torch.manual_seed(1)
        network(x).square().sum().backward()
        found.append([p.grad for p in network.parameters()])
    torch.testing.assert_close(found[0], found[1])


class Rounded(nn.Module):
    """Computes in the precision that autocast says."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, torch.eye(8)[..., None, None]).relu()


def test_lean_computes_again_in_the_precision_of_the_forward_pass() -> None:
    """Backward passes run outside of autocast, where this activation would refuse what it reads."""
    layers = (nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), Rounded(), nn.Conv2d(8, 4, 3))
    lean, plain = LeanSequential(*layers), nn.Sequential(*copy.deepcopy(layers))
    x, found = torch.randn(4, 3, 8, 8), []
    for network in (lean, plain):
        with torch.autocast("cpu", torch.bfloat16):
            y = network(x)
        y.float().square().sum().backward()
        found.append([p.grad for p in network.parameters()])
    torch.testing.assert_close(found[0], found[1])
