"""Any small random network: an answer or a sentence, and no trace."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

from tests.measures.networks import hooks, networks, same, snapshot
from unskip.measures import Measured, measure


def check(network: nn.Module, batch: Tensor) -> None:
    before, kept = snapshot(network), batch.clone()
    try:
        measured: Measured | str = measure(network, batch)
    except ValueError as error:
        measured = str(error)
    assert same(before, snapshot(network))
    assert hooks(network) == 0
    assert torch.equal(batch, kept)
    assert not batch.requires_grad
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
