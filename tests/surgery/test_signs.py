"""A proof that a block reads nothing negative holds, and what is no proof is none."""

from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.surgery.cost import on_meta
from unskip.surgery.signs import decides, nonnegative_inputs


class Reads(nn.Module):
    """A block between a stem and whatever comes before it."""

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.block, self.before = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), before
        self.relu, self.pool, self.norm = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), nn.BatchNorm2d(4)
        self.larger, self.overshooting = (nn.Upsample(scale_factor=2, mode=mode) for mode in ("bilinear", "bicubic"))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.before(self, self.stem(x)))


def overwritten(net: Reads, x: Tensor) -> Tensor:
    x = net.relu(x)
    x.sub_(1)
    return x


def overwritten_by_operator(net: Reads, x: Tensor) -> Tensor:
    y = x = net.relu(x)
    y -= 1
    return x


def branches(net: Reads, x: Tensor) -> Tensor:
    return net.relu(x) if x.sum() > 0 else x


def reads_nonnegative(network: Reads) -> set[str]:
    network = on_meta(network.eval())
    return nonnegative_inputs(network, {"block": network.block}, (3, 8, 8))


@pytest.mark.parametrize(
    ("before", "proven"),
    [
        (lambda net, x: x, False),
        (lambda net, x: net.relu(x), True),
        (lambda net, x: F.relu(x), True),
        (lambda net, x: x.relu(), True),
        (lambda net, x: net.pool(net.relu(x)), True),
        (lambda net, x: net.norm(net.relu(x)), False),
        (lambda net, x: net.relu(x) - 1, False),
        (lambda net, x: F.leaky_relu(x), False),
        (lambda net, x: F.softplus(x), True),
        (lambda net, x: F.softplus(x, beta=-1), False),
        (lambda net, x: F.softplus(x, threshold=-3), False),
        (lambda net, x: F.relu6(x), True),
        (lambda net, x: F.hardtanh(x), False),
        (lambda net, x: x.clamp(min=0), True),
        (lambda net, x: x.clamp(max=1), False),
        (lambda net, x: x.clamp(0, -1), False),
        (lambda net, x: F.avg_pool2d(x.relu(), 2), True),
        (lambda net, x: F.avg_pool2d(x.relu(), 2, divisor_override=-4), False),
        (lambda net, x: F.pad(x.relu(), (1, 1), value=-1), False),
        (lambda net, x: torch.cat([x[:, :2].relu(), x[:, 2:]], 1), False),
        (lambda net, x: torch.cat([x[:, :2].relu(), x[:, 2:].relu()], 1), True),
        (lambda net, x: x.relu()[:, :, 1:].transpose(2, 3), True),
        (lambda net, x: x.relu_() if torch.is_grad_enabled() else x, False),
        (lambda net, x: x if torch.is_inference_mode_enabled() else x.relu(), False),
        (lambda net, x: x.relu() if x.shape[-1] > 3 else x, False),
        (lambda net, x: net.pool(x), False),
        (lambda net, x: net.larger(net.relu(x)), True),
        (lambda net, x: net.overshooting(net.relu(x)), False),
        (overwritten, False),
        (overwritten_by_operator, False),
        (branches, False),
    ],
)
def test_only_what_is_proven(before: Callable, proven: bool) -> None:
    assert (reads_nonnegative(Reads(before)) == {"block"}) is proven


def test_a_block_that_runs_twice_needs_two_proofs() -> None:
    class Twice(Reads):
        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(self.stem(x).relu()))

    for out_act, proven in ((nn.ReLU(), True), (nn.GELU(), False), (nn.Identity(), False)):
        network = Twice(lambda net, x: x)
        network.block = nn.Sequential(network.block, out_act)
        assert (reads_nonnegative(network) == {"block"}) is proven


def test_a_hook_or_an_optional_argument_is_no_proof() -> None:
    class Masked(Reads):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.stem(x)
            return self.block(x.relu() if mask is not None else x)

    assert not reads_nonnegative(Masked(lambda net, x: x))
    network = Reads(lambda net, x: net.relu(x))
    network.relu.register_forward_hook(lambda module, args, y: y - 1)
    assert not reads_nonnegative(network)
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_what_a_forward_keeps_while_it_is_followed_is_taken_back() -> None:
    def count(net: Reads, x: Tensor) -> Tensor:
        net.batches = net.batches + x.mean()
        return net.relu(x)

    network = Reads(count)
    network.register_buffer("batches", torch.zeros(()))
    said = decides(network)
    if torch.__version__.startswith("2.6."):  # takes no symbol as a buffer, so it is refused
        assert "cannot assign" in said
    else:
        assert said == ""
    assert torch.equal(network.batches, torch.zeros(()))


@pytest.mark.parametrize(
    "build", [lambda: timm.create_model("resnet18"), lambda: torchvision.models.resnet18()], ids=["timm", "torchvision"]
)
def test_resnets_read_nothing_negative(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        network = build().eval()
    blocks = {path: m for path, m in network.named_modules() if type(m).__name__ == "BasicBlock"}
    assert nonnegative_inputs(network, blocks, (3, 33, 32)) == set(blocks)
    assert len(blocks) == 8
