"""The kernels of narrow PNNH blocks are the plain definition; by Triton's interpreter here, and on a GPU where one is.

The interpreter must be asked for before Triton is imported, so those cases run in a process of their own.
"""

import copy
import sys

import pytest
import torch
from torch import Tensor, nn

import unskip
from tests.kernels.interpreter import interpreted
from unskip.coders import FittedCoder
from unskip.methods import fused
from unskip.methods.pnnh import PNNHBlock
from unskip.models.cifar import CifarBlock
from unskip.train import Recipe, machine
from unskip.train.optim import make_optimizer
from unskip.train.recipe import RunConfig
from unskip.train.step import compile_network, make_step

pytest.importorskip("triton")
CENTRED = {"pretext": "identity", "uncarried": "1x1"}
# channels, hidden width, options, side of the image, how many blocks behind a ReLU (0: one, behind none)
CASES = {
    "pairs": (16, 8, {}, 7, 2),
    "what no ReLU gave": (16, 8, {}, 5, 0),
    "identity": (16, 8, {"pretext": "identity"}, 4, 1),
    "groups of four": (32, 16, {"ratio": 0.25}, 6, 1),
    "groups of three": (24, 19, {"ratio": 1 / 3}, 6, 1),
    "single taps": (64, 32, {}, 5, 1),
    "24/12": (24, 12, {}, 5, 1),
    "centred, 48/8": (48, 8, CENTRED, 5, 2),
    "centred, odd widths": (20, 5, CENTRED, 5, 0),
}


def make_block(channels: int, hidden: int, options: dict) -> PNNHBlock:
    """A block whose gains are not 1 and biases not 0."""
    network = unskip.plainify(
        nn.Sequential(CifarBlock(channels, channels, 1, "A")), hidden={channels: hidden}, head_norm=False, **options
    )
    block = network[0]
    nn.init.uniform_(block.learner.norm1.weight, 0.5, 1.5)
    nn.init.normal_(block.learner.norm1.bias, 0, 0.3)
    return block.train().to(memory_format=torch.channels_last)


def images(*shape: int) -> Tensor:
    return torch.randn(*shape).contiguous(memory_format=torch.channels_last)


def by_kernels(block: PNNHBlock, x: Tensor) -> Tensor:
    layers = fused.layers_of(block)
    assert layers is not None
    assert fused.fits(layers, x)
    return fused.run(layers, x)


def results(blocks: list[PNNHBlock], run: object, x: Tensor, g: Tensor, rectify: bool) -> dict[str, Tensor]:
    """Output, gradients and statistics of a chain of blocks."""
    source = x.clone().requires_grad_()
    y = source.relu() if rectify else source
    for block in blocks:
        y = run(block, y)  # type: ignore[operator]
    y.backward(g)
    found = {"y": y.detach(), "x": source.grad}
    for i, block in enumerate(blocks):
        found |= {f"{i}.{name}": p.grad for name, p in block.named_parameters()}
        found |= {f"{i}.{name}": b for name, b in block.named_buffers() if "norm" in name}
    return found


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    for name, value in expected.items():
        error = (actual[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-9)
        assert error < limit, f"{name}: {error:.1e}"


def check_chain(channels: int, hidden: int, options: dict, side: int, count: int) -> None:
    """Of two blocks the second takes the zeros that the first made, and the first a gradient that is rectified."""
    blocks = [make_block(channels, hidden, options) for _ in range(max(1, count))]
    twins = copy.deepcopy(blocks)
    x, g = images(3, channels, side, side), images(3, channels, side, side)
    expected = results(blocks, lambda block, x: block(x), x, g, count > 0)
    actual = results(twins, by_kernels, x, g, count > 0)
    assert_same(actual, expected, 1e-5)
    for block in twins:  # autograd took the gradients as they came
        assert all(p.grad.stride() == p.stride() for p in block.parameters())


def check_other_readers() -> None:
    """An output that something else reads too: its gradient is a sum, of which only a part is zero where it should."""
    blocks = [make_block(16, 8, {}) for _ in range(2)]
    twins = copy.deepcopy(blocks)
    x, weights = images(2, 16, 5, 5).relu(), images(2, 16, 5, 5)
    for first in (True, False):
        found = []
        for pair, run in ((blocks, lambda block, x: block(x)), (twins, by_kernels)):
            source = x.clone().requires_grad_()
            middle = run(pair[0], source)
            terms = [(middle * weights).sum(), run(pair[1], middle).square().sum()]
            loss = terms[0] + terms[1] if first else terms[1] + terms[0]
            parameters = [p for block in pair for p in block.parameters()]
            found.append(dict(enumerate(torch.autograd.grad(loss, [source, *parameters]))))
        assert_same(found[1], found[0], 1e-5)


def check_twice() -> None:
    """A second backward pass over one graph adds the same again; two blocks that read one output don't share zeros."""
    block = make_block(16, 8, {})
    twin = copy.deepcopy(block)
    x = images(2, 16, 5, 5).relu().requires_grad_()
    loss = by_kernels(block, x).square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in block.named_parameters()}
    loss.backward()
    assert_same({name: p.grad for name, p in block.named_parameters()}, {n: 2 * g for n, g in once.items()}, 1e-6)
    y = by_kernels(twin, x)
    outputs = [by_kernels(block, y) for _ in range(2)]
    torch.testing.assert_close(outputs[0], outputs[1])
    with torch.no_grad():
        torch.testing.assert_close(outputs[0], block(y), rtol=1e-4, atol=1e-4)


def check_asked_gradient() -> None:
    """The gradient of an output that somebody asked for is not zero where the output is."""
    blocks = [make_block(16, 8, {}) for _ in range(2)]
    twins = copy.deepcopy(blocks)
    x = images(2, 16, 5, 5).relu().requires_grad_()
    for ask in (lambda y, into: y.retain_grad() or into.append(y), lambda y, into: y.register_hook(into.append)):
        found = []
        for pair, run in ((blocks, lambda block, x: block(x)), (twins, by_kernels)):
            given: list[Tensor] = []
            middle = run(pair[0], x)
            ask(middle, given)
            run(pair[1], middle).square().sum().backward()
            found.append({"middle": given[0].grad if given[0] is middle else given[0]})
        assert (found[0]["middle"][middle == 0] != 0).any()
        assert_same(found[1], found[0], 1e-5)


CHECKS = {"other_readers": check_other_readers, "twice": check_twice, "asked_gradient": check_asked_gradient}


QUICK = ["pairs", "what no ReLU gave", "identity", "24/12", "centred, 48/8"]


@pytest.mark.parametrize(
    "todo",
    [
        pytest.param([f"case:{name}" for name in QUICK] + [f"check:{name}" for name in CHECKS], id="quick"),
        pytest.param([f"case:{name}" for name in CASES if name not in QUICK], id="rest", marks=pytest.mark.full),
    ],
)
def test_kernels_are_the_definition(todo: list[str]) -> None:
    """In float32 by the interpreter: outputs, gradients, running statistics."""
    printed = interpreted("-m", "tests.methods.test_fused", *todo)
    assert printed.splitlines() == todo


def test_never_on_a_cpu() -> None:
    block = make_block(16, 8, {})
    x = images(2, 16, 8, 8).bfloat16()
    assert fused.layers_of(block) is not None
    assert not fused.is_eligible(block, x.device)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused.supports(block, x) is None
        assert type(block(x).grad_fn).__name__ == "ReluBackward0"


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, True),
        ({"block": "lean"}, True),
        (CENTRED, True),
        ({"block": "plain"}, False),
        ({"pretext": "none"}, False),
        ({"pretext": "random"}, False),
        ({"norm": "both"}, False),
    ],
)
def test_which_blocks(options: dict, known: bool) -> None:
    assert (fused.layers_of(make_block(16, 8, options)) is not None) == known


def test_other_layers_are_not_known() -> None:
    def changed(change: object) -> bool:
        block = make_block(16, 8, {})
        change(block)  # type: ignore[operator]
        return fused.layers_of(block) is not None

    def swap(name: str, layer: nn.Module) -> object:
        return lambda block: setattr(block.learner, name, layer)

    assert changed(lambda block: None)
    assert not changed(swap("conv1", nn.Conv2d(16, 8, 3, padding=1)))  # a bias
    assert not changed(swap("conv1", nn.Conv2d(16, 8, 3, padding=1, bias=False, padding_mode="reflect")))
    assert not changed(swap("norm1", nn.SyncBatchNorm(8)))
    assert not changed(swap("norm1", nn.BatchNorm2d(8, momentum=None)))
    assert not changed(swap("act1", nn.LeakyReLU()))
    assert not changed(lambda block: setattr(block, "act", nn.GELU()))
    assert not changed(lambda block: setattr(block, "drop_path", nn.Dropout()))
    fitted = FittedCoder(torch.rand(8, 16, 1, 1), torch.rand(16, 8, 1, 1), nn.ReLU())
    assert not changed(lambda block: setattr(block, "coder", fitted))
    wide = unskip.plainify(nn.Sequential(CifarBlock(128, 128, 1, "A")))[0]
    assert fused.layers_of(wide) is None
    transition = unskip.plainify(nn.Sequential(CifarBlock(16, 32, 2, "A")))[0]
    assert fused.layers_of(transition) is None


def test_large_images_are_left_alone() -> None:
    """An ImageNet network's first stage is as narrow as CIFAR's last."""
    layers = fused.layers_of(make_block(64, 32, {}))
    assert fused.fits(layers, images(1, 64, 32, 32))
    assert not fused.fits(layers, images(1, 64, 33, 8))
    assert not fused.fits(layers, images(1, 64, 56, 56))


def test_a_deterministic_recipe_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They add up by atomics, in whichever order programs come."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    block, gpu = make_block(16, 8, {}), torch.device("cuda")
    assert fused.is_eligible(block, gpu)
    with machine.seeded_run(RunConfig(deterministic=True)):
        assert not fused.is_eligible(block, gpu)
    assert fused.is_eligible(block, gpu)


def test_watched_layers_run_by_themselves() -> None:
    block = make_block(16, 8, {})
    assert not fused.inner_layers_hooked(block)
    block.register_forward_hook(lambda *_: None)  # of the block itself: it is called anyhow
    assert not fused.inner_layers_hooked(block)
    for module in (block.learner, block.learner.conv1, block.learner.norm1, block.coder, block.act):
        for register in (module.register_forward_hook, module.register_full_backward_hook):
            handle = register(lambda *_: None)
            assert fused.inner_layers_hooked(block)
            handle.remove()
    assert not fused.inner_layers_hooked(block)


def test_blocks_with_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their transitions are; without bf16, or where images are large, all are."""
    monkeypatch.setattr(fused, "is_eligible", lambda block, device: fused.layers_of(block) is not None)
    for precision, image_size, left in (("bf16", 32, 7), ("fp32", 32, 0), ("bf16", 64, 0)):
        network = unskip.create_model("pnnh_resnet20")
        compile_network(network, Recipe.of(compile="blocks", precision=precision), image_size)
        blocks = [block for block in network.modules() if isinstance(block, PNNHBlock)]
        eager = [block for block in blocks if block._compiled_call_impl is None]
        assert len(blocks) == 9
        assert len(eager) == left
        assert all(fused.layers_of(block) is not None for block in eager)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    """In bfloat16 by autocast, both measured by float64: the kernels are no further away than the definition."""
    channels, hidden, options, side, _ = CASES[case]
    blocks = [make_block(channels, hidden, options).cuda() for _ in range(2)]
    x, g = (images(32, channels, side, side).relu().bfloat16().cuda() for _ in range(2))

    def through(run: object, dtype: torch.dtype) -> dict[str, Tensor]:
        own = copy.deepcopy(blocks)
        for block in own:
            block.to(dtype)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype != torch.float64):
            kind = torch.bfloat16 if dtype == torch.float32 else dtype
            return results(own, run, x.to(kind), g.to(kind), True)

    exact = through(lambda block, x: block(x), torch.float64)
    calls = []

    def chosen(block: PNNHBlock, x: Tensor) -> Tensor:
        y = block(x)
        calls.append(type(y.grad_fn).__name__)
        return y

    actual = through(chosen, torch.float32)
    assert calls == ["FusedBlockBackward"] * 2
    for block in blocks:
        block.learner.register_forward_hook(lambda *_: None)
    plain = through(lambda block, x: block(x), torch.float32)
    for name, value in exact.items():
        size = value.double().norm().clamp(min=1e-9)
        errors = [((other[name].double() - value).norm() / size).item() for other in (actual, plain)]
        assert errors[0] < max(1.5 * errors[1], 1e-3), f"{name}: {errors}"


@needs_gpu
def test_a_recorded_update_is_the_update() -> None:
    """Three updates eagerly and as a CUDA graph, kernels in both: each replay starts from zeros of its own."""
    recipe = Recipe.of(model="pnnh_resnet20", precision="bf16", compile="no", lr=0.05, batch=64)
    start = unskip.create_model("pnnh_resnet20").cuda().train().to(memory_format=torch.channels_last)
    batches = [(images(64, 3, 16, 16).cuda(), torch.randint(10, (64,)).cuda()) for _ in range(3)]
    found = []
    for graph in (False, True):
        own = recipe.replace(cuda_graph=graph)
        accelerator = machine.make_accelerator(own)
        network = copy.deepcopy(start)
        network, optimizer = accelerator.prepare(network, make_optimizer(network, own.optimizer, cuda_graph=graph))
        step = make_step(accelerator, network, optimizer, own)
        losses = torch.stack([step(x, y)[0] for x, y in batches])
        moved = torch.cat([(p - q).flatten() for p, q in zip(network.parameters(), start.parameters(), strict=True)])
        noted = torch.cat([b.float().flatten() for n, b in network.named_buffers() if "coder" not in n])
        found.append({"losses": losses, "weights": moved.detach(), "statistics": noted})
    assert_same(found[1], found[0], 0.03)  # sums in another order, rounded to bfloat16


if __name__ == "__main__":
    assert "unskip.kernels.pnnh_triton" not in sys.modules, "importing unskip must not import Triton's part"
    torch.manual_seed(0)
    for what in sys.argv[1:]:
        kind, name = what.split(":")
        CHECKS[name]() if kind == "check" else check_chain(*CASES[name])
        print(what, flush=True)
