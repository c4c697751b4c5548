"""A norm, its activation and a depthwise convolution as one operation are the three layers, and are left alone where
they are not.

No GPU is needed: the kernels run in Triton's interpreter, in a process of their own (`check_...`), where the conditions
on device and precision are lifted.
"""

import copy
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import unskip
from tests.kernels.interpreter import interpreted, needs_triton
from unskip.kernels import depthwise
from unskip.kernels.depthwise import JoinedSequential, joined
from unskip.kernels.dispatch import KERNEL_DTYPES
from unskip.methods.lean import LeanInverted, LeanSequential

ACTS = {"relu": nn.ReLU, "relu6": nn.ReLU6}


def images(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """So large that some of them are above 6."""
    return (3 * torch.randn(shape, dtype=torch.float64)).to(dtype).contiguous(memory_format=torch.channels_last)


def lift() -> None:
    """The kernels are open to every precision on a CPU; all other conditions stand."""
    depthwise.has_kernels_for = lambda x: True  # type: ignore[assignment]
    depthwise.PRECISIONS = KERNEL_DTYPES  # type: ignore[assignment]


def close(actual: Tensor, expected: Tensor, limit: float = 1e-10) -> None:
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    difference = (actual.double() - expected.double()).nan_to_num().norm()
    assert difference <= limit * expected.double().nan_to_num().norm().clamp(min=1e-3), difference


def layers(u: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, stride: int, top: float) -> Tensor:
    """What `depthwise` is, by PyTorch's operations."""
    n = u * scale[:, None, None] + shift[:, None, None]
    return F.conv2d(F.hardtanh(n, 0, top) if top else F.relu(n), weight, None, stride, 1, 1, len(scale))


def arguments(batch: int, channels: int, high: int, wide: int) -> list[Tensor]:
    """Scales of both signs, and of the first channel 0, with a shift that padding must not have."""
    scale, shift = torch.randn(2, channels, dtype=torch.float64)
    scale[0], shift[0] = 0, 1.5
    weight = torch.randn(channels, 1, 3, 3, dtype=torch.float64)
    return [images(batch, channels, high, wide), scale, shift, weight]


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], stride: int, top: float) -> list[Tensor]:
    """The output and the gradient of every tensor."""
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    y = function(*leaves, stride, top)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype))  # the same at every precision
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


# ---------------------------------------------------------------- kernels

SHAPES = [(2, 5, 7, 5, 1, 6.0), (3, 20, 4, 6, 2, 0.0), (1, 8, 1, 1, 1, 0.0)]  # images, channels, sides, stride, bound
MORE = [
    (2, 40, 6, 10, 2, 6.0),
    (3, 70, 9, 5, 1, 0.0),
    (1, 1, 2, 2, 2, 6.0),
    (7, 16, 1, 12, 1, 0.0),
    (5, 33, 8, 34, 2, 0.0),
    (2, 8, 60, 4, 2, 6.0),
    (3, 64, 5, 5, 1, 6.0),
]


def compare(batch: int, channels: int, high: int, wide: int, stride: int, top: float) -> None:
    tensors = arguments(batch, channels, high, wide)
    actual = gradients(depthwise.depthwise, tensors, stride, top)
    assert actual[0].is_contiguous(memory_format=torch.channels_last)
    assert len(actual) == 5
    for found, expected in zip(actual, gradients(layers, tensors, stride, top), strict=True):
        close(found, expected)
    u, _, bias, weight = tensors
    act = (lambda x: F.hardtanh(x, 0, top)) if top else F.relu
    for shift in (None, torch.randn(channels, dtype=torch.float64) + 1):  # which padding must not have
        folded = depthwise.depthwise_folded(u, shift, weight, bias, stride, top)
        n = u if shift is None else u + shift[:, None, None]
        close(folded, act(F.conv2d(act(n), weight, bias, stride, 1, 1, channels)))


def check_kernels() -> None:
    for shape in SHAPES:
        compare(*shape)


def check_more_kernels() -> None:
    for shape in MORE:
        compare(*shape)


def check_programs_that_go_on() -> None:
    """One program with several rounds of squares, as in large batches."""
    from unskip.kernels import depthwise_triton as kernels

    kernels.WAVE = 1
    compare(3, 5, 12, 12, 1, 6.0)
    compare(3, 5, 12, 16, 2, 6.0)


def check_squares_of_other_sizes() -> None:
    from unskip.kernels import depthwise_triton as kernels

    kernels.FORWARD, kernels.BACKWARD = {1: (1, 1, 4), 2: (3, 1, 2)}, {1: (3, 1, 4), 2: (2, 2, 2)}
    compare(2, 20, 7, 5, 1, 0.0)
    compare(2, 20, 8, 6, 2, 6.0)


def check_nan() -> None:
    """It goes through as in PyTorch, to the outputs and gradients that it reaches there, and to no other channel.

    Whether the gradient of the NaN itself is one depends on PyTorch's device; it is not compared.
    """
    for stride, top in ((1, 0.0), (2, 6.0)):
        tensors = arguments(2, 5, 6, 6)
        tensors[0][0, 3, 2, 2] = torch.nan
        wanted = gradients(layers, tensors, stride, top)
        found = gradients(depthwise.depthwise, tensors, stride, top)
        close(found[0], wanted[0])
        assert [bool(t.isnan().any()) for t in wanted] == [True, False, True, False, True]
        for actual, expected in zip(found[1:], wanted[1:], strict=True):
            assert torch.equal(actual.isnan(), expected.isnan())
            channels = 1 if actual.ndim == 4 and len(actual) == 2 else 0
            others = torch.tensor([0, 1, 2, 4])
            close(actual.index_select(channels, others), expected.index_select(channels, others))


def check_half() -> None:
    """bfloat16 is rounded once, when it is written."""
    for dtype, limit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        for stride in (1, 2):
            tensors = [
                t.to(kind) for t, kind in zip(arguments(2, 20, 6, 6), (dtype, *[torch.float32] * 3), strict=True)
            ]
            actual = gradients(depthwise.depthwise, tensors, stride, 6.0)
            assert [t.dtype for t in actual] == [dtype, dtype, *[torch.float32] * 3]
            expected = gradients(layers, [t.double() for t in tensors], stride, 6.0)
            for i, (found, exact) in enumerate(zip(actual, expected, strict=True)):
                close(found, exact, limit if i < 2 else 1e-5)


def check_operators() -> None:
    """PyTorch's check of operators. A second gradient is an error, and a gradient of the folded one too."""
    u, scale, shift, weight = (t.requires_grad_() for t in arguments(2, 5, 4, 6))
    torch.library.opcheck(torch.ops.unskip.depthwise, (u, scale, shift, weight, 2, 6.0))
    plain = [t.detach() for t in (u, scale, shift, weight)]
    torch.library.opcheck(torch.ops.unskip.depthwise_gradient, (images(2, 5, 4, 6), *plain, 1, 0.0))
    torch.library.opcheck(torch.ops.unskip.depthwise_folded, (plain[0], None, plain[3], plain[2], 1, 0.0))
    torch.library.opcheck(torch.ops.unskip.depthwise_folded, (plain[0], plain[1], plain[3], plain[2], 2, 6.0))
    (first,) = torch.autograd.grad(
        depthwise.depthwise(u, scale, shift, weight, 1, 6.0).square().sum(), u, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.square().sum().backward()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        depthwise.depthwise_folded(u, shift, weight, shift, 1, 6.0).sum().backward()


# ---------------------------------------------------------------- learners


def learner(kind: type[nn.Sequential], act: str = "relu6", stride: int = 1, **parts: nn.Module) -> nn.Sequential:
    """That of an inverted bottleneck, some of its parts others, with norms that do something."""
    torch.manual_seed(1)
    made = {
        "conv1": nn.Conv2d(6, 12, 1, bias=False),
        "norm1": nn.BatchNorm2d(12),
        "act1": ACTS[act](inplace=True),
        "conv2": nn.Conv2d(12, 12, 3, stride, 1, groups=12, bias=False),
        "norm2": nn.BatchNorm2d(12),
        "act2": ACTS[act](inplace=True),
        "conv3": nn.Conv2d(12, 6, 1, bias=False),
    } | parts
    found = kind()
    for name, module in made.items():
        found.add_module(name, module)
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.normal_(module.weight, 1, 0.5)
            nn.init.normal_(module.bias, 0, 0.5)
            if module.running_mean is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return found.double()


def compiled(call: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[str]]:
    """Compiled as one graph without Inductor, and the graphs."""
    seen: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        seen.append(str(graph.graph))
        return aot_eager(graph, example)

    torch._dynamo.reset()
    return torch.compile(call, backend=backend, fullgraph=True, **options), seen


def step(network: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Output, gradients and statistics."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = call(leaf)
    y.sin().sum().backward()
    found = [y.detach(), leaf.grad, *(p.grad for p in network.parameters()), *network.buffers()]
    return [t.clone() for t in found if t is not None]


def same(kind: type[nn.Sequential], change: Callable[[nn.Module], Any] = lambda net: None, *, joins: bool = True,
         shape: tuple[int, ...] = (3, 6, 8, 6), **options: Any) -> None:  # fmt: skip
    """Two steps of a compiled learner are those of nn.Sequential; `joins`: whether by the one operation."""
    ordinary, other = (learner(k, **copy.deepcopy(options)) for k in (nn.Sequential, kind))
    assert list(ordinary.state_dict()) == list(other.state_dict())
    for network in (ordinary, other):
        change(network.train())
    call, seen = compiled(other)
    for _ in range(2):
        x = images(*shape)
        for found, expected in zip(step(other, call, x), step(ordinary, ordinary, x), strict=True):
            close(found, expected)
    assert len(seen) == 1
    assert ("unskip.depthwise" in seen[0]) is joins


def frozen(network: nn.Module) -> None:
    """Norms as in evaluation, in a network that trains."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def check_learners() -> None:
    lift()
    same(JoinedSequential, act="relu6", stride=1)
    same(LeanInverted, act="relu", stride=2)
    same(LeanSequential, frozen, stride=1)


def check_more_learners() -> None:
    lift()
    for kind in (JoinedSequential, LeanSequential):
        for act in ACTS:
            for stride in (1, 2):
                same(kind, act=act, stride=stride)
                same(kind, lambda net: net.eval(), act=act, stride=stride)
    same(JoinedSequential, act="relu6", norm1=nn.BatchNorm2d(12, momentum=0.0, eps=0.3))


def check_compiled_otherwise() -> None:
    """What is compiled and takes the ordinary path, and is right."""
    lift()
    same(LeanInverted, lambda net: net.act1.register_forward_hook(lambda *_: None), joins=False)
    same(LeanInverted, norm1=nn.Identity(), joins=False)
    same(LeanInverted, joins=False, shape=(3, 6, 7, 6), stride=2)
    single, _ = compiled(learner(LeanInverted).train())
    with pytest.raises(Exception, match="more than 1 value per channel"):
        single(images(1, 6, 1, 1))


def check_transforms() -> None:
    """torch.func and forward mode under a compiler, which trace through the ordinary layers."""
    lift()
    ordinary, other = learner(nn.Sequential).eval(), learner(LeanInverted).eval()
    x = images(2, 6, 4, 4)

    def calls(net: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
        return {
            "grad": torch.func.grad(lambda x: net(x).sin().sum()),
            "vmap": lambda x: torch.func.vmap(lambda one: net(one))(x[None])[0],  # it asks a module for its repr
        }

    for name, function in calls(other).items():
        call, seen = compiled(function)
        close(call(x), calls(ordinary)[name](x))
        assert not any("unskip" in graph for graph in seen), name
    # PyTorch 2.15 can't trace a norm in forward mode; folded layers have none.
    folded = JoinedSequential(nn.ReLU6(), nn.Conv2d(6, 6, 3, padding=1, groups=6).double(), nn.ReLU6())
    tangents = []
    for net in (nn.Sequential(*folded), folded):
        call, seen = compiled(lambda x, net=net: torch.func.jvp(net, (x,), (x.cos(),))[1])
        with torch.no_grad():
            tangents.append(call(x))
        assert not any("unskip" in graph for graph in seen)
    close(tangents[1], tangents[0])
    assert tangents[0].norm() > 0
    call, seen = compiled(other)
    call(x)
    assert "unskip.depthwise" in seen[0]
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)[0].sum().backward()


def check_compiled_sizes() -> None:
    """Sizes that the compiler leaves open; autocast, where bfloat16 is what the layers read."""
    lift()
    ordinary, other = learner(nn.Sequential).train(), learner(JoinedSequential).train()
    call, seen = compiled(other, dynamic=True)
    for shape in ((3, 6, 8, 6), (5, 6, 4, 10)):
        x = images(*shape)
        for found, expected in zip(step(other, call, x), step(ordinary, ordinary, x), strict=True):
            close(found, expected)
    assert all("unskip.depthwise" in graph for graph in seen)
    ordinary, other = ordinary.float(), other.float()
    call, seen = compiled(other)
    with torch.autocast("cpu", torch.bfloat16):
        close(call(x.float()), ordinary(x.float()), 0.03)
    assert "unskip.depthwise" in seen[0]


# ---------------------------------------------------------------- what is chosen


def taken(network: nn.Sequential, x: Tensor, *, compiling: bool = True) -> bool:
    """Whether the layers behind the first convolution are joined, as if a compiler traced."""
    before = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: compiling
    try:
        return joined(list(network)[1:], x) is not None
    finally:
        torch.compiler.is_compiling = before


def check_choices() -> None:
    lift()

    def conv(*args: Any, **options: Any) -> dict[str, nn.Module]:
        return {"conv2": nn.Conv2d(12, 12, *args, **{"padding": 1, "groups": 12, "bias": False, **options})}

    x = images(2, 12, 8, 6)
    assert taken(learner(LeanInverted), x)
    assert taken(learner(LeanInverted, stride=2), x)
    assert taken(learner(LeanInverted), images(2, 12, 7, 5))
    others = {
        "odd sides": (learner(LeanInverted, stride=2), images(2, 12, 7, 6)),
        "odd sides, across": (learner(LeanInverted, stride=2), images(2, 12, 8, 5)),
        "contiguous": (learner(LeanInverted), x.contiguous()),
        "no image": (learner(LeanInverted), x[:0]),
        "no batch": (learner(LeanInverted), x[0]),
        "one value a channel": (learner(LeanInverted), images(1, 12, 1, 1)),
        "kernel of 5": (learner(LeanInverted, **conv(5, padding=2)), x),
        "dilated": (learner(LeanInverted, **conv(3, padding=2, dilation=2)), x),
        "strides": (learner(LeanInverted, **conv(3, stride=(1, 2))), x),
        "stride of 3": (learner(LeanInverted, **conv(3, stride=3)), images(2, 12, 6, 6)),
        "no padding": (learner(LeanInverted, **conv(3, padding=0)), x),
        "padded by name": (learner(LeanInverted, **conv(3, padding="same")), x),
        "reflected": (learner(LeanInverted, **conv(3, padding_mode="reflect")), x),
        "groups of two": (learner(LeanInverted, **conv(3, groups=6)), x),
        "two outputs a channel": (learner(LeanInverted, conv2=nn.Conv2d(12, 24, 3, padding=1, groups=12)), x),
        "bias": (learner(LeanInverted, **conv(3, bias=True)), x),
        "synchronised": (learner(LeanInverted, norm1=nn.SyncBatchNorm(12)), x),
        "group norm": (learner(LeanInverted, norm1=nn.GroupNorm(3, 12)), x),
        "no momentum": (learner(LeanInverted, norm1=nn.BatchNorm2d(12, momentum=None)), x),
        "not affine": (learner(LeanInverted, norm1=nn.BatchNorm2d(12, affine=False)), x),
        "no statistics": (learner(LeanInverted, norm1=nn.BatchNorm2d(12, track_running_stats=False)), x),
        "dropout": (learner(LeanInverted, act1=nn.Dropout(0.5)), x),
        "GELU": (learner(LeanInverted, act1=nn.GELU()), x),
        "hard tanh": (learner(LeanInverted, act1=nn.Hardtanh(0, 6)), x),
        "all in half precision": (learner(LeanInverted).bfloat16(), x.bfloat16()),
        "weights of another precision": (learner(LeanInverted), x.bfloat16()),
    }
    for name, (network, read) in others.items():
        assert not taken(network, read), name
    for part in ("norm1", "act1", "conv2"):
        for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
            network = learner(LeanInverted)
            handle = getattr(network.get_submodule(part), register)(lambda *_: None)
            assert not taken(network, x), (part, register)
            handle.remove()
            assert taken(network, x)
    pruned = learner(LeanInverted)
    prune.l1_unstructured(pruned.conv2, "weight", amount=0.5)
    assert not taken(pruned, x)
    normed = learner(LeanInverted)
    nn.utils.parametrizations.weight_norm(normed.conv2)
    assert not taken(normed, x)
    assert not taken(learner(LeanInverted), x, compiling=False)  # eager training
    with torch.no_grad():
        assert not taken(learner(LeanInverted).eval(), x, compiling=False)
    with torch.autocast("cpu", torch.float16):
        assert not taken(learner(LeanInverted).float(), x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert taken(learner(LeanInverted).float(), x.bfloat16())


class Called(TorchDispatchMode):
    """Notes how often the folded operation is called, and how often with the bias of the convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.behind = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.unskip.depthwise_folded.default:
            self.count += 1
            self.behind += args[1] is not None
        return func(*args, **(kwargs or {}))


def mobilenet(block: str = "auto") -> nn.Module:
    """A small one of torchvision's, with norms that do something."""
    torch.manual_seed(0)
    settings = [[1, 8, 1, 1], [6, 12, 3, 2]]
    residual = torchvision.models.MobileNetV2(3, inverted_residual_setting=settings)
    network = unskip.plainify(residual, "pnnh", block=block)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return network.double().eval()


def check_folded() -> None:
    """In form 'fast' every block that expands has it, in inference alone; form 'dense' has PyTorch's own modules."""
    lift()
    network = mobilenet()
    x = images(2, 3, 16, 16)
    folded = unskip.fold(network, "fast", example=x)
    expected = network(x).detach()
    dense = unskip.fold(network, "dense", example=x)
    assert not any(isinstance(module, JoinedSequential) for module in dense.modules())
    assert type(folded.features[2]) is JoinedSequential  # a transition, learner and coder in one
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Called() as called:
            close(folded(x), expected)
        assert called.count == called.behind == 3
    with torch.no_grad():
        with Called() as called:
            close(copy.deepcopy(folded)(x), expected)
            close(folded(x.contiguous()), expected)  # its first convolution keeps that layout
            assert called.count == 3
        tangents = []
        for net in (folded, network):
            with forward_ad.dual_level():
                tangents.append(forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.cos()))).tangent)
        close(tangents[0], tangents[1])
        with Called() as called:
            close(torch.func.vmap(folded)(x[None])[0], expected)
            handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
            close(folded(x), expected)
            handle.remove()
            assert called.count == 0
    with Called() as called:
        close(folded(x), expected)  # it has no gradient
    assert called.count == 0
    for net, strict in ((network, False), (folded, False), (folded, True)):
        with torch.no_grad():
            program = torch.export.export(net, (x,), strict=strict)
        assert not any("unskip" in str(node.target) for node in program.graph.nodes)
        close(program.module()(x), expected)
    with torch.no_grad():
        program = torch.jit.trace(folded, x)
    assert "unskip::" not in str(program.inlined_graph)
    close(program(x), expected)
    chain = folded.features[3].learner
    assert type(chain) is LeanInverted
    traced = torch.fx.symbolic_trace(chain)
    assert not any("unskip" in str(node.target) for node in traced.graph.nodes)
    hidden = images(2, chain[0].in_channels, 4, 4)
    close(traced(hidden), chain(hidden))


def check_folded_choices() -> None:
    """Which convolution before gives its bias to the operation; without that it is called as well, or not at all."""
    lift()

    def chain(first: nn.Module, conv: nn.Conv2d | None = None) -> JoinedSequential:
        torch.manual_seed(2)
        conv = nn.Conv2d(12, 12, 3, 2, 1, groups=12) if conv is None else conv
        return JoinedSequential(first, nn.ReLU6(), conv, nn.ReLU6()).double()

    def calls(network: nn.Module, x: Tensor) -> tuple[int, int]:
        ordinary = nn.Sequential(*network)
        with torch.no_grad(), Called() as called:
            close(network(x), ordinary(x))
        return called.count, called.behind

    x = images(2, 6, 8, 6)
    assert calls(chain(nn.Conv2d(6, 12, 1)), x) == (1, 1)
    assert calls(chain(nn.Conv2d(6, 12, 1, groups=3)), x) == (1, 1)
    others = {
        "no bias": nn.Conv2d(6, 12, 1, bias=False),
        "kernel of 3": nn.Conv2d(6, 12, 3, padding=1),
        "padded": nn.Conv2d(6, 12, 1, padding=1),
        "strides": nn.Conv2d(6, 12, 1, 2),
    }
    for name, first in others.items():
        read = images(2, 6, 16, 12) if name == "strides" else x
        assert calls(chain(first), read) == (1, 0), name
    watched = chain(nn.Conv2d(6, 12, 1))
    watched[0].register_forward_hook(lambda *_: None)
    assert calls(watched, x) == (1, 0)
    for place, expected in enumerate([(1, 0), (0, 0), (0, 0), (0, 0)]):
        replaced = chain(nn.Conv2d(6, 12, 1))
        add_hook_to_module(replaced[place], ModelHook())  # as Accelerate does it, by another `forward`
        assert calls(replaced, x) == expected, place
    assert calls(chain(nn.Conv2d(6, 12, 1)), images(2, 6, 7, 6)) == (0, 0)  # which the stride does not divide
    assert calls(chain(nn.Conv2d(6, 12, 1), nn.Conv2d(12, 12, 5, 1, 2, groups=12)), x) == (0, 0)
    mixed = chain(nn.Conv2d(6, 12, 1))
    for behind in (nn.ReLU(), nn.Hardtanh(0, 6), nn.Conv2d(12, 12, 1).double()):
        mixed[3] = behind  # the operation has one activation for both places
        assert calls(mixed, x) == (0, 0), behind
    wrong = chain(nn.Conv2d(6, 24, 1))  # more channels than the depthwise convolution reads
    for layers, read in ((wrong, x), (wrong[1:], images(2, 24, 8, 6))):
        with torch.no_grad(), pytest.raises(RuntimeError, match="24 channels"):
            layers(read)


CHECKS = {name: call for name, call in list(globals().items()) if name.startswith("check_")}
QUICK = ["check_kernels", "check_nan", "check_half", "check_folded"]


@needs_triton
@pytest.mark.parametrize(
    "todo",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param([name for name in CHECKS if name not in QUICK], id="rest", marks=pytest.mark.full),
    ],
)
def test_by_the_interpreter(todo: list[str]) -> None:
    assert interpreted("-m", "tests.kernels.test_depthwise", *todo).splitlines() == todo


# ---------------------------------------------------------------- without Triton


def test_never_on_a_cpu() -> None:
    network = learner(LeanInverted).eval()
    x = images(2, 12, 8, 6, dtype=torch.bfloat16)
    assert not depthwise.supports(x)
    assert not depthwise.supports(torch.fx.Proxy(torch.fx.Node(torch.fx.Graph(), "x", "placeholder", "x", (), {})))
    assert joined(list(network)[1:], x) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_never_on_a_gpu_that_is_not_there() -> None:
    """Networks are sized for one by tensors that have no numbers."""
    with FakeTensorMode():
        x = torch.empty(2, 12, 8, 6, dtype=torch.bfloat16, device="cuda")
        assert not depthwise.supports(x.contiguous(memory_format=torch.channels_last))


def test_other_precisions_and_batches_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "has_kernels_for", lambda x: True)
    assert depthwise.supports(images(2, 4, 4, 4, dtype=torch.bfloat16))
    assert depthwise.supports(images(2, 4, 4, 4, dtype=torch.float16))
    assert not depthwise.supports(images(2, 4, 4, 4, dtype=torch.float32))

    def empty(batch: int) -> Tensor:
        shape = (batch, 2, 128, 64)
        return torch.empty(shape, dtype=torch.float16, device="meta").contiguous(memory_format=torch.channels_last)

    assert depthwise.supports(empty(2**17))
    assert not depthwise.supports(empty(2**17 + 1))


def test_frozen_norms_of_a_lean_learner() -> None:
    """What is computed again has the statistics that it had, not those of the batch."""
    ordinary, lean = (learner(kind).train() for kind in (nn.Sequential, LeanSequential))
    for network in (ordinary, lean):
        frozen(network)
    x = images(3, 6, 8, 6)
    for found, expected in zip(step(lean, lean, x), step(ordinary, ordinary, x), strict=True):
        close(found, expected)


def test_an_identity_is_called_where_somebody_waits_for_it() -> None:
    network = JoinedSequential(nn.Identity(), nn.ReLU())
    called: list[nn.Module] = []
    network[0].register_forward_hook(lambda module, *_: called.append(module))
    network(torch.ones(2))
    assert called == [network[0]]


def test_learners_of_inverted_bottlenecks_by_block() -> None:
    kinds = {"auto": LeanInverted, "fast": JoinedSequential, "lean": LeanSequential, "plain": nn.Sequential}
    networks = {block: mobilenet(block) for block in kinds}
    names = list(networks["plain"].state_dict())
    for block, kind in kinds.items():
        assert type(networks[block].features[3].learner) is kind
        assert list(networks[block].state_dict()) == names


def test_it_is_copied_and_pickled() -> None:
    network = mobilenet()
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    x = images(2, 3, 16, 16)
    for other in (copy.deepcopy(network), torch.load(file, weights_only=False)):
        assert type(other.features[3].learner) is LeanInverted
        assert torch.equal(other(x), network(x))


if __name__ == "__main__":
    assert "unskip.kernels.depthwise_triton" not in sys.modules, "importing unskip must not import Triton's part"
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        CHECKS[name]()
        print(name, flush=True)
