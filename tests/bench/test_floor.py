"""The floor's counts, against sums done by hand."""

import pytest
import torch
from torch import nn

from unskip.bench import floor
from unskip.bench.floor import DeviceRates, measure_rates, work


def test_counts_of_a_small_network() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    x, hidden, y = 2 * 3 * 16, 2 * 8 * 16, 2 * 4 * 16  # numbers in a batch of two 4 x 4 images
    first, second = 8 * 3 * 9, 4 * 8  # weights
    found = work(network, (2, 3, 4, 4), train=False)
    assert found.macs == 32 * (first + second)
    assert found.numbers == (x + first + hidden) + (hidden + second + y)
    assert found.output == (4, 4, 4)
    trained = work(network, (2, 3, 4, 4), train=True)
    # The first layer's input needs no gradient.
    assert trained.macs == 32 * (2 * first + 3 * second)
    assert trained.numbers == 2 * (x + first + hidden) + 3 * (hidden + second + y)


def test_gradients_in_groups_cost_what_the_convolution_does() -> None:
    network = nn.Sequential(
        nn.Conv2d(6, 6, 1, bias=False),
        nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=6, bias=False),
        nn.ConvTranspose2d(12, 8, 2, stride=2, groups=4, bias=False),
    )
    first, depthwise, up = 2 * 16 * 36, 2 * 4 * 12 * 9, 2 * 4 * 12 * 2 * 4  # batch x positions x weights
    assert work(network, (2, 6, 4, 4), train=False).macs == first + depthwise + up
    assert work(network, (2, 6, 4, 4), train=True).macs == 2 * first + 3 * depthwise + 3 * up


def test_frozen_weights_have_no_gradient_to_count() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, 4, 1, bias=False))
    network[1].requires_grad_(False)
    assert work(network, (1, 3, 2, 2), train=True).macs == 4 * (2 * 24 + 2 * 32)


def test_linear_layers_count_too() -> None:
    network = nn.Linear(6, 5)
    found = work(network, (7, 6), train=False)
    assert found.macs == 7 * 30
    assert found.numbers == 7 * 6 + 30 + 7 * 5


def test_seconds_are_work_over_rates() -> None:
    found = work(nn.Linear(6, 5), (7, 6), train=False)
    assert found.floors(DeviceRates(flops=420.0, bytes=214.0), 2) == (1.0, 1.0)


def test_rates_of_this_machine() -> None:
    found = measure_rates(torch.device("cpu"), torch.float32)
    assert 1e8 < found.flops < 1e15
    assert 1e7 < found.bytes < 1e14


@pytest.mark.parametrize(("product", "convolution"), [(1.0, 1e9), (1e9, 1.0)])
def test_the_better_of_product_and_convolution_counts(
    product: float, convolution: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((product, convolution, 1.0))
    monkeypatch.setattr(floor, "_median_seconds", lambda call, device: next(seconds))
    assert measure_rates(torch.device("cpu"), torch.float32).flops > 1e8
