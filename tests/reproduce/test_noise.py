"""Yu and Tomasi 2019: Figure 11, simulated and theoretical dominance; Figure 3, layer cushions."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unskip.measures import record_outputs
from unskip.models import create_model
from unskip.models.equivalence import to_plain
from unskip.models.simplified import simplified_net
from unskip.reproduce import paper_table, reproduce
from unskip.reproduce.images import load_set
from unskip.reproduce.noise_figure3 import cushions
from unskip.reproduce.noise_figure11 import PANELS, Setting, simulate
from unskip.reproduce.noise_figure12 import dominance
from unskip.reproduce.noise_figure13 import as_printed, simulated
from unskip.reproduce.noise_table3 import ROWS, statistics_of
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


UPDATES = len(load_set("digits", None, size=0).train) // 256


def test_equivalent_networks_train_alike(tmp_path: Path) -> None:
    """Table 2: T is kept to rounding in float64, less so in float32, and the picture is drawn."""
    written = reproduce("noise-table2", out=tmp_path, depth=8, batch=256)
    worst = {name: max(run["largest difference of a weight"]) for name, run in written.outcome.numbers.items()}
    assert 0 < worst["fp64"] < 1e-12
    assert 1e-9 < worst["fp32"] < 1e-3
    run = written.outcome.numbers["fp64"]
    assert run["updates"] == run["updates asked for"] == len(run["loss"]["plain"]) == UPDATES
    assert run["loss"]["plain"] == pytest.approx(run["loss"]["resnet"], abs=1e-12)
    assert run["test_error"]["plain"] == run["test_error"]["resnet"]
    assert any("holds to 1e-09" in line for line in written.outcome.lines)


def test_a_pair_stops_by_the_minute(tmp_path: Path) -> None:
    written = reproduce("noise-table2", out=tmp_path, depth=5, batch=256, precision="fp32", minutes=0.0)
    assert written.outcome.numbers["fp32"]["updates"] == 3
    assert f"after 3 of {UPDATES} updates" in written.outcome.lines[0]
    assert "Stopped by --minutes" in written.outcome.lines[0]


def test_figure_13_is_one_function(tmp_path: Path) -> None:
    for r in (0.03, 1.0, 7.0):
        assert as_printed(r) == pytest.approx(2 / math.pi * math.atan(r), abs=1e-9)
        drawn = simulated(r, 40_000, torch.Generator().manual_seed(1))
        assert drawn == pytest.approx(as_printed(r), abs=4.5 * 0.5 / 200)
    written = reproduce("noise-figure13", out=tmp_path, samples=100)
    assert 10_000 < written.files[0].stat().st_size < 150_000


def test_weights_before_training_are_table_3s() -> None:
    """Against the print, two digits, at depth 32; the mass of t_0 is printed as 1900 (docs/simplified.md)."""
    torch.manual_seed(0)
    p, t = create_model("simplified_plain32"), to_plain(create_model("simplified_resnet32"))
    printed = [[row["p_0"], row["t_0"]] for row in paper_table("noise_stability", "3").rows]
    for model, column in ((p, 0), (t, 1)):
        found = statistics_of(model)
        for row, paper in list(zip(ROWS, printed, strict=True))[1:]:
            assert found[row] == pytest.approx(paper[column], rel=0.15), (row, column)


def test_dominance_of_every_activation() -> None:
    """The last activation's gradient is its own; before it the residual network has more of it."""
    torch.manual_seed(0)
    x, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    plain, residual = (dominance(simplified_net(8, residual=r, in_chans=1), x, labels) for r in (False, True))
    assert len(plain) == len(residual) == 7
    assert plain[-1] == residual[-1] == 1
    assert sum(residual) > sum(plain) + 1


@pytest.mark.full
def test_figure_12_and_table_3_train_or_take_weights(tmp_path: Path) -> None:
    for name in ("noise-figure12", "noise-table3"):
        written = reproduce(name, out=tmp_path, epochs=1, **({"images": 4} if name == "noise-figure12" else {}))
        assert "1 epochs on digits" in written.outcome.lines[0]
        assert written.files[0].stat().st_size < 150_000
