"""Yu and Tomasi 2019: Figure 11, simulated and theoretical dominance; Figure 3, layer cushions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unskip.measures import record_outputs
from unskip.models import create_model
from unskip.models.equivalence import to_plain
from unskip.reproduce import reproduce
from unskip.reproduce.noise_figure3 import cushions
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
    with pytest.raises(ValueError, match="trials=1 must be between 2 and"):
        reproduce("noise-figure11", out=tmp_path, trials=1)


def test_cushions_of_both_forms() -> None:
    """Against the definition, on a dense matrix of the convolution; and plain and residual forms are one function."""
    torch.manual_seed(0)
    residual = create_model("simplified_resnet20", in_chans=1, init="kwi")
    plain = to_plain(residual)
    x = torch.randn(5, 1, 8, 8)
    for ours, other in zip(cushions(residual, x), cushions(plain, x), strict=True):
        assert ours["same"] == pytest.approx(other["same"], rel=1e-3)
        assert other["own"] == pytest.approx(other["same"])
    block = residual.get_submodule("layer1.0")
    (h,) = record_outputs(residual.eval(), ["act1"], x).values()
    y = torch.nn.functional.conv2d(h, block.conv.weight, padding=1) + h
    paper = y.flatten(1).norm(dim=1) / block.conv.weight.norm() / h.flatten(1).norm(dim=1)
    assert cushions(residual, x)[0]["own"] == pytest.approx(paper.detach().numpy(), rel=1e-4)
    assert not any(module._forward_pre_hooks for module in residual.modules())


@pytest.mark.full
def test_figure_3_trains_or_takes_weights(tmp_path: Path) -> None:
    weights = {}
    for kind, option in (("plain", "plain"), ("resnet", "residual")):
        network = create_model(f"simplified_{kind}20", in_chans=1)
        weights[option] = tmp_path / f"{kind}.safetensors"
        save_file(network.state_dict(), weights[option])
    given = reproduce("noise-figure3", out=tmp_path / "given", images=40, **weights)
    assert "plain.safetensors" in given.outcome.lines[0]
    assert given.files[0].stat().st_size < 150_000
    trained = reproduce("noise-figure3", out=tmp_path / "trained", images=40, epochs=1)
    assert "1 epochs on digits" in trained.outcome.lines[0]
    with pytest.raises(ValueError, match=r"resnet\.safetensors holds no weights of simplified_plain32"):
        reproduce("noise-figure3", out=tmp_path, depth=32, plain=weights["residual"])


def test_figure_3_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layer=20 must be a block, 2 to 19"):
        reproduce("noise-figure3", out=tmp_path, layer=20)
    with pytest.raises(ValueError, match="depth=21 must be one of 20, 32, 44"):
        reproduce("noise-figure3", out=tmp_path, depth=21)
