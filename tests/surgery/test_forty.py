"""Forty residual networks as people write them: converted and verified, or refused for a reason."""

from collections import Counter
from collections.abc import Callable

import pytest

from tests.surgery.forty import NETWORKS, outcome

QUICK = ("CIFAR, option A on both sides", "skips in lines of the parent", "1-D pre-activation, signals")
REACH = {"plain": 34, "pnnh": 28, "rm": 22}


@pytest.mark.parametrize("name", QUICK)
def test_a_few(name: str) -> None:
    assert all(outcome(name, method).startswith("yes") for method in REACH)


@pytest.mark.deep
def test_all_forty(record_property: Callable[[str, object], None]) -> None:
    found = {(name, method): outcome(name, method) for name in NETWORKS for method in REACH}
    for reason in found.values():
        assert reason.startswith(("yes", "plainify: ")), reason
    counts = Counter(method for (_, method), reason in found.items() if reason.startswith("yes"))
    for method, number in counts.items():
        record_property("outcomes", (method, number))
    assert len(NETWORKS) == 40
    assert all(counts[method] >= least for method, least in REACH.items()), counts
