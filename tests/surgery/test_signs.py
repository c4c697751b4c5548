"""A proof that a block reads nothing negative holds, and what is no proof is none."""

from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.surgery.signs import nonnegative_inputs


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
        (lambda net, x: net.pool(x), False),
        (lambda net, x: net.larger(net.relu(x)), True),
        (lambda net, x: net.overshooting(net.relu(x)), False),
        (overwritten, False),
        (overwritten_by_operator, False),
        (branches, False),
    ],
)
def test_only_what_is_proven(before: Callable, proven: bool) -> None:
    network = Reads(before).eval()
    found = nonnegative_inputs(network, {"block": network.block}, {id(network.block): None})
    assert (id(network.block) in found) is proven


def test_a_block_that_runs_twice_needs_two_proofs() -> None:
    class Twice(Reads):
        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(self.stem(x).relu()))

    network = Twice(lambda net, x: x).eval()
    for out_act, proven in ((nn.ReLU(), True), (nn.GELU(), False), (None, False)):
        found = nonnegative_inputs(network, {"block": network.block}, {id(network.block): out_act})
        assert (id(network.block) in found) is proven


def test_a_hook_or_an_optional_argument_is_no_proof() -> None:
    class Masked(Reads):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.stem(x)
            return self.block(x.relu() if mask is not None else x)

    network = Masked(lambda net, x: x).eval()
    acts = {id(network.block): None}
    assert not nonnegative_inputs(network, {"block": network.block}, acts)
    network = Reads(lambda net, x: net.relu(x)).eval()
    network.relu.register_forward_hook(lambda module, args, y: y - 1)
    assert not nonnegative_inputs(network, {"block": network.block}, {id(network.block): None})


@pytest.mark.parametrize(
    "build", [lambda: timm.create_model("resnet18"), lambda: torchvision.models.resnet18()], ids=["timm", "torchvision"]
)
def test_resnets_read_nothing_negative(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        network = build().eval()
    blocks = {path: m for path, m in network.named_modules() if type(m).__name__ == "BasicBlock"}
    acts = {id(m): nn.ReLU() for m in blocks.values()}
    assert len(nonnegative_inputs(network, blocks, acts)) == len(blocks) == 8
