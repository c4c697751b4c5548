"""Small random models: a result or a clear error, and an unchanged model."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

from tests.measures.networks import hooks, networks, same, snapshot
from unskip.measures import Measured, measure


def check(model: nn.Module, example: Tensor) -> None:
    before, kept = snapshot(model), example.clone()
    try:
        measured: Measured | str = measure(model, example)
    except ValueError as error:
        measured = str(error)
    assert same(before, snapshot(model))
    assert hooks(model) == 0
    assert torch.equal(example, kept)
    assert not example.requires_grad
    if isinstance(measured, str):
        assert measured.startswith("measure: ")
        assert measured.endswith(".")
    else:
        names = [layer.name for layer in measured.layers]
        assert len(set(names)) == len(names) > 0
        for series in measured.series.values():
            assert set(series.layers) <= set(names)
            assert all(isinstance(value, float) for value in series.values), series
        assert all(isinstance(value, float) for value in measured.numbers.values())
        assert all(note.endswith(".") for note in measured.notes)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks())
def test_a_few_random_networks(case: tuple[nn.Module, Tensor]) -> None:
    check(*case)


@pytest.mark.full
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks())
def test_many_random_networks(case: tuple[nn.Module, Tensor]) -> None:
    check(*case)
