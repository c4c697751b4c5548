"""The errata's numbers: what we say agrees with simulation, and what is printed does not."""

from collections.abc import Iterator

import pytest
import torch

from unskip.reproduce import errata as module
from unskip.reproduce.errata import CHECKS, Row


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ours_agrees_with_simulation(check: object) -> None:
    rows: Iterator[Row] = check()  # type: ignore[operator]
    for row in rows:
        if "Table 4" in row.what:  # arithmetic on the paper's own numbers
            assert row.measured == pytest.approx(row.printed, rel=5e-3)
        elif "interlayer" in row.what:
            plain, running = "plain" in row.what, "running" in row.what
            assert (row.measured < 1e-5) == (plain and not running), row
            assert 0.5 < row.measured < 1.5 or not running, row
        elif row.error:
            # Width 256 and first order in b are no limits; both are below 3 % here.
            assert abs(row.measured - row.ours) < 4.5 * row.error + 0.03 * row.ours, row
        elif "Eq. 15" not in row.what:
            assert row.measured == pytest.approx(row.ours), row
        assert row.printed != pytest.approx(row.ours, rel=1e-4) or "Eq. 15" in row.what, row


def test_the_callers_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    kept = module.CHECKS
    try:
        module.CHECKS = kept[2:3]
        first, second = (module.errata(module.Errata(seed=1)).lines for _ in range(2))
    finally:
        module.CHECKS = kept
    assert first == second
    assert torch.equal(before, torch.get_rng_state())
