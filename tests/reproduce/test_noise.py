"""papers/noise-stability.md, Figure 11: simulated and theoretical dominance."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unskip.reproduce import reproduce
from unskip.reproduce.noise_figure11 import PANELS, Setting, simulate
from unskip.theory import expected_dominance_plain, expected_dominance_residual


def test_the_common_setting_is_the_papers() -> None:
    assert Setting() == Setting(n=20, epsilon=0.1, L=10, l=5, p=0.9, sigma_A=0.01, sigma_V=0.1)
    assert [panel[0] for panel in PANELS] == ["n", "l", "sigma_A", "sigma_V", "p", "epsilon"]


@pytest.mark.parametrize("change", [{}, {"n": 8}, {"l": 8}, {"sigma_V": 5.0}, {"p": 0.8}, {"epsilon": 0.5}], ids=str)
def test_simulation_and_theory_agree(change: dict[str, float]) -> None:
    setting = replace(Setting(), **change)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    hops = setting.L - setting.l
    plain, error = simulate(setting, residual=False, trials=1000, generator=generator)
    assert abs(plain - expected_dominance_plain(setting.n, hops=hops, p=setting.p)) < 4.5 * error
    residual, error = simulate(setting, residual=True, trials=1000, generator=generator)
    theory = expected_dominance_residual(
        setting.n, hops=hops, p=setting.p, epsilon=setting.epsilon, sigma_A=setting.sigma_A, form="corrected"
    )
    assert abs(residual - theory) < 4.5 * error + 2e-3


@pytest.mark.full
def test_all_six_panels_are_drawn(tmp_path: Path) -> None:
    written = reproduce("noise-figure11", out=tmp_path, trials=20)
    assert 10_000 < written.files[0].stat().st_size < 150_000
    assert list(written.outcome.numbers) == [panel[0] for panel in PANELS]


def test_what_a_user_gets_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trials=1 must be at least 2"):
        reproduce("noise-figure11", out=tmp_path, trials=1)
