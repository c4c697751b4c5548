"""Hand-written blocks: read off their forward, exact under rm, trainable by the others, or refused."""

import copy
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from tests.surgery.forty import BasicBlock, randomise
from unskip.methods import BlockSpec
from unskip.surgery.expose import expose
from unskip.surgery.traced import read_traced


class Parts(nn.Module):
    """The modules of a block; its forward is one of the functions below."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.gain = nn.Parameter(torch.tensor([0.3]))
        self.gains = nn.Parameter(torch.rand(8) + 0.5)
        self.fc1, self.fc2 = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.down = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.register_buffer("batches", torch.zeros(()))

    def branch(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))


def residual_sum(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def in_place_sum(m: Parts, x: Tensor) -> Tensor:
    out = m.branch(x)
    out += x
    return F.relu(out)


def method_sum(m: Parts, x: Tensor) -> Tensor:
    return m.branch(x).add_(x).relu_()


def difference(m: Parts, x: Tensor) -> Tensor:
    return F.relu(x - m.branch(x))


def alpha(m: Parts, x: Tensor) -> Tensor:
    return torch.add(x, m.branch(x), alpha=0.5)


def both_scaled(m: Parts, x: Tensor) -> Tensor:
    return F.relu(0.7 * x + m.branch(x) / 3)


def sum_scaled(m: Parts, x: Tensor) -> Tensor:
    return (x + m.branch(x)) * 0.5**0.5


def learned(m: Parts, x: Tensor) -> Tensor:
    return m.act(m.gain * m.branch(x) + x)


def layer_scale(m: Parts, x: Tensor) -> Tensor:
    return x + m.gains[:, None, None] * m.branch(x)


def learned_on_both_sides(m: Parts, x: Tensor) -> Tensor:
    return F.relu(m.gains[:, None, None] * x + m.branch(x) * m.gains.view(1, -1, 1, 1))


def gains_by_view(m: Parts, x: Tensor) -> Tensor:
    return torch.relu(x + m.branch(x).mul(m.gains.view(1, -1, 1, 1)))


def dropped(m: Parts, x: Tensor) -> Tensor:
    return F.relu(F.dropout(m.branch(F.dropout2d(x, 0.1, m.training)), 0.1, m.training) + x)


def preactivation(m: Parts, x: Tensor) -> Tensor:
    return x + m.conv2(F.relu(m.bn2(m.conv1(torch.relu(m.bn1(x))))))


def preactivated_identity(m: Parts, x: Tensor) -> Tensor:
    x = F.relu(m.bn1(x))
    return x + m.conv2(F.relu(m.bn2(m.conv1(x))))


def preactivated_projection(m: Parts, x: Tensor) -> Tensor:
    out = F.relu(m.bn1(x))
    return m.conv2(F.relu(m.bn2(m.conv1(out)))) + m.down(out)


def projection_of_x(m: Parts, x: Tensor) -> Tensor:
    return m.conv2(F.relu(m.bn2(m.conv1(F.relu(m.bn1(x)))))) + m.down(x)


def gated(m: Parts, x: Tensor) -> Tensor:
    y = m.branch(x)
    return F.relu(x + y * torch.sigmoid(m.fc2(F.relu(m.fc1(F.adaptive_avg_pool2d(y, 1))))))


def by_a_function(m: Parts, x: Tensor) -> Tensor:
    return F.leaky_relu(residual_sum(m.branch(x), x), 0.1)


def gelu(m: Parts, x: Tensor) -> Tensor:
    return x + m.conv2(F.gelu(m.conv1(x)))


def variadic(m: Parts, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return F.relu(m.bn2(m.conv2(F.relu(m.conv1(x, *args, **kwargs)))) + x)


FORWARDS = [
    in_place_sum, method_sum, difference, alpha, both_scaled, sum_scaled, learned, learned_on_both_sides, layer_scale,
    gains_by_view, dropped,
    preactivation, preactivated_identity, preactivated_projection, projection_of_x, gated, by_a_function, gelu,
    variadic,
]  # fmt: skip


def block_of(forward: Callable[[Parts, Tensor], Tensor]) -> Parts:
    return type(forward.__name__, (Parts,), {"forward": forward})()


def network_of(forward: Callable[[Parts, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), block_of(forward), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    randomise(network)
    return network.eval()


@pytest.mark.parametrize("forward", FORWARDS)
def test_every_way_to_write_it(forward: Callable[[Parts, Tensor], Tensor]) -> None:
    network = network_of(forward).double()
    plain = unskip.plainify(network, "rm", limit=float("inf"))
    assert plain.surgery.replaced == ("1",)
    for side in (7, 12):
        x = 3 * torch.randn(2, 3, side, side + 1, dtype=torch.float64)
        torch.testing.assert_close(plain(x), network(x), rtol=1e-9, atol=1e-9)
    for method in ("plain", "pnnh", "dirac"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # trained weights are lost
            trainable = unskip.plainify(network, method).train()
        trainable(torch.randn(4, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
        assert any(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in trainable[1].parameters())


def decides(m: Parts, x: Tensor) -> Tensor:
    y = m.branch(x)
    return x + y if x.mean() > 0 else x - y  # the line


def three_ways(m: Parts, x: Tensor) -> Tensor:
    y = m.conv1(x) + m.conv2(x)  # the line
    return y + x


def changes_x(m: Parts, x: Tensor) -> Tensor:
    out = m.branch(x)
    x.mul_(2)  # the line
    return F.relu(out + x)


def counts(m: Parts, x: Tensor) -> Tensor:
    m.batches.add_(1)  # the line
    return F.relu(x + m.branch(x))


def adds_into(m: Parts, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.add(x, m.branch(x), out=y)  # the line
    return F.relu(y)


def through_data(m: Parts, x: Tensor) -> Tensor:
    y = m.branch(x)
    y.data += 1  # the line
    return F.relu(x + y)


@pytest.mark.parametrize("forward", [decides, three_ways, changes_x, counts, adds_into, through_data])
@pytest.mark.parametrize("method", ["plain", "pnnh", "rm"])
def test_what_can_not_be_read_is_refused_with_its_line(forward: Callable[[Parts, Tensor], Tensor], method: str) -> None:
    source = Path(__file__).read_text(encoding="utf-8").split("\n")
    begin = forward.__code__.co_firstlineno
    line = next(i for i, text in enumerate(source, 1) if i > begin and "# the line" in text)
    with pytest.raises(ValueError, match=rf"block '1' of Sequential .*{re.escape(f'(test_traced.py:{line})')}"):
        unskip.plainify(network_of(forward), method)


class WithGain(Parts):
    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        return F.relu(x + gain * self.branch(x))


@pytest.mark.parametrize("method", ["plain", "pnnh", "rm"])
def test_other_arguments_of_a_block_are_named(method: str) -> None:
    with pytest.raises(ValueError, match=r"takes other arguments than its input \(gain\), and a block has one input"):
        unskip.plainify(nn.Sequential(WithGain()).eval(), method)


class VideoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + x)


def test_blocks_of_3d_convolutions_become_plain_or_are_refused_by_name() -> None:
    network = nn.Sequential(VideoBlock()).eval()
    x = torch.randn(2, 4, 4, 6, 5)
    plain = unskip.plainify(network, "plain", example=x)
    assert plain(x).shape == x.shape
    for method in ("pnnh", "rm"):
        with pytest.raises(ValueError, match=r"its branch holds torch.Conv3d, a 3-D convolution; 1-D and 2-D are"):
            unskip.plainify(network, method, example=x)


def test_parts_are_the_modules_of_the_block() -> None:
    """And what was read is what the block computes: the proof also sees weights that are zero."""
    block = BasicBlock(4, 8, 2).eval()
    nn.init.zeros_(block.bn2.weight)
    spec = read_traced(block, "here")
    assert isinstance(spec, BlockSpec)
    assert [m for m in spec.branch if not isinstance(m, nn.ReLU)] == [block.conv1, block.bn1, block.conv2, block.bn2]
    assert list(spec.shortcut) == [*block.shortcut]
    assert isinstance(spec.out_act, nn.ReLU)


def test_the_forward_of_a_parent_is_rewritten_and_computes_the_same() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(2))
            self.rate = 0.2

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x + self.first(x), self.rate, self.training)
            return torch.tanh(x).add(self.second(torch.tanh(x)))

    parent = Parent().train()
    x = torch.randn(2, 4, 9)
    expected = parent.eval()(x)
    rewritten = expose(parent)
    assert {"first", "second"} <= {name for name, _ in rewritten.named_children()}
    torch.testing.assert_close(rewritten(x), expected)
    assert not torch.equal(rewritten.train()(x), rewritten(x))  # its dropout still follows the mode


def in_training(m: nn.Module, x: Tensor) -> Tensor:
    return 2 * x if m.training else x


def with_gradients(m: nn.Module, x: Tensor) -> Tensor:
    return 2 * x if torch.is_grad_enabled() else x


def always_dropped(m: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, True)


def alpha_dropped(m: nn.Module, x: Tensor) -> Tensor:
    return F.alpha_dropout(x, 0.5, m.training)


def number_of_calls(m: nn.Module, x: Tensor) -> Tensor:
    m.calls += 1
    return m.calls * x


def counted(m: nn.Module, x: Tensor) -> Tensor:
    m.batches.add_(1)
    return x


def counted_anew(m: nn.Module, x: Tensor) -> Tensor:
    m.batches = m.batches + 1
    return x


def part_written(m: nn.Module, x: Tensor) -> Tensor:
    part = x[:, 1:]
    part += 1
    return x


def two_names(m: nn.Module, x: Tensor) -> Tensor:
    y = x
    x *= 2
    return x + y.mean()


def random_gain(m: nn.Module, x: Tensor) -> Tensor:
    return random.random() * x


BETWEEN = [
    in_training, with_gradients, always_dropped, alpha_dropped, number_of_calls, counted, counted_anew, part_written,
    two_names, random_gain,
]  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN)
def test_a_forward_that_does_more_than_one_trace_shows_is_not_rewritten(between: Callable) -> None:
    """In training, by writes to memory, by what it remembers: methods would lose it, without a word."""

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(2))
            self.register_buffer("batches", torch.zeros(()))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            x = between(self, torch.tanh(x + self.first(x)))
            return torch.tanh(x + self.second(x))

    parent = Parent()
    exposed = expose(copy.deepcopy(parent))
    assert exposed.calls == parent.calls
    for mode in (False, True):
        for grad in (False, True):
            outputs = []
            for network in (parent, exposed):
                torch.manual_seed(1)
                random.seed(1)
                with torch.set_grad_enabled(grad):
                    outputs.append(network.train(mode)(torch.linspace(-1, 1, 72).view(2, 4, 9)))
            torch.testing.assert_close(*outputs)
    assert parent.batches == exposed.batches
    with pytest.raises(ValueError, match=r"plainify: Parent .*can't be read"):
        unskip.plainify(parent, "plain")
