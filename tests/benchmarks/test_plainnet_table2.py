"""Networks that train side by side in benchmarks/plainnet_table2.py are those that `unskip.train.run` trains alone."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from unskip.train import Recipe, load_recipe, run
from unskip.train.sets import load

FILE = Path(__file__).parents[2] / "benchmarks" / "plainnet_table2.py"
# float64, two epochs of scikit-learn's digits; a limit that bites, and a rate that falls in one of the networks
BASE = load_recipe(
    "usps-plainnet-100", dataset="digits", precision="fp64", device="cpu", epochs=2, max_norm=1.2, val_fraction=0.1,
    options={"depth": 5, "width": 24, "img_size": 8}, channels_last=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plainnet_table2", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def recipes(script: ModuleType, norm: bool) -> list[Recipe]:
    rows = [row for row in script.ROWS if row.norm is norm]
    rates = (0.01, 0.1, 0.03, 0.05)
    chosen = [row.recipe(BASE, lr=rates[seed], seed=seed) for seed, row in enumerate(rows)]
    return [*chosen[:-1], chosen[-1].replace(schedule="cosine", min_lr=1e-4)]


@pytest.mark.parametrize("norm", [True, False])
def test_side_by_side_is_one_by_one(script: ModuleType, norm: bool, tmp_path: Path) -> None:
    data = load(BASE)
    crowd = script.Crowd(recipes(script, norm), data, torch.device("cpu"), torch.float64)
    assert list(crowd.train()) == [1, 2]
    assert crowd.done == 2 * (len(data.train) // 128) > 10
    test_errors, val_errors = crowd.error("test"), crowd.error("val")
    for n, recipe in enumerate(crowd.recipes):
        result = run(recipe, data=data, out=tmp_path / str(n), silent=True)
        alone = load_file(tmp_path / str(n) / "weights.safetensors")
        ours = {"fc.weight": crowd.fc[n], "fc.bias": crowd.fc_bias[n]}
        for i, weight in enumerate(crowd.weights):
            ours[f"stage1.{i}.transform.weight"] = weight[n]
            ours[f"stage1.{i}.transform.bias"] = crowd.bias[i, n]
            if norm:
                for name in ("gamma", "beta", "mean", "var"):
                    path = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "var": "running_var"}[name]
                    ours[f"stage1.{i}.norm.{path}"] = getattr(crowd, name)[i, n]
        assert set(ours) == {name for name in alone if "num_batches" not in name}
        for name, value in ours.items():
            torch.testing.assert_close(value.detach(), alone[name], rtol=0, atol=1e-11, msg=f"{n} {name}")
        assert test_errors[n] == pytest.approx(result.test_error, abs=1e-9)
        assert val_errors[n] == pytest.approx(result.val_error, abs=1e-9)
        norms = torch.cat([weight[n].norm(dim=1) for weight in crowd.weights])
        assert (norms.max().item() <= 1.2 + 1e-9) is bool(recipe.max_norm)  # so the limit was at work where it is set


def test_a_network_that_diverges_spoils_no_other(script: ModuleType) -> None:
    data = load(BASE)
    row = script.ROWS[1]
    alone = script.Crowd([row.recipe(BASE, lr=0.01)], data, torch.device("cpu"), torch.float64)
    beside = script.Crowd([row.recipe(BASE, lr=lr) for lr in (0.01, 1e6)], data, torch.device("cpu"), torch.float64)
    for crowd in (alone, beside):
        list(crowd.train())
    assert alone.error("test")[0] == beside.error("test")[0] < 60
    assert np.isnan(beside.error("test")[1])
    torch.testing.assert_close(alone.weights[2][0], beside.weights[2][0], rtol=0, atol=1e-12)


@pytest.mark.full
def test_compiled_layers_and_updates_are_the_plain_ones(script: ModuleType) -> None:
    """What a GPU runs: gradients of the compiled layers, and the compiled update with its limit."""
    torch.manual_seed(0)
    z = torch.randn(3, 7, 32, dtype=torch.float64, requires_grad=True)
    vectors = [torch.randn(3, 7, 1, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    slope = torch.tensor([0.0, 0.3, 0.1], dtype=torch.float64).view(3, 1, 1)
    for plain, fast, count in zip((script.normed_layer, script.bare_layer), script.COMPILED, (3, 1), strict=False):
        outputs, grads = [], []
        for function in (plain, fast):
            out = function(z, *vectors[:count], slope)
            outputs.append(out if isinstance(out, tuple) else (out,))
            loss = outputs[-1][0].sin().sum()
            grads.append(torch.autograd.grad(loss, [z, *vectors[:count]]))
        for one, other in zip([*outputs[0], *grads[0]], [*outputs[1], *grads[1]], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    states = []
    for function in (script.descend_hidden, script.COMPILED[2]):
        generator = torch.Generator().manual_seed(1)
        p, g, v = (torch.randn(3, 7, 9, dtype=torch.float64, generator=generator) for _ in range(3))
        limit = torch.tensor([1.0, float("inf"), 2.0], dtype=torch.float64).view(3, 1, 1)
        p.mul_(function(p, g, v, slope + 0.1, 0.9, 1e-4, limit))
        states.append((p, v))
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert states[0][0].norm(dim=2)[0].max() <= 1 + 1e-12 < states[0][0].norm(dim=2)[1].max()


def test_rows_and_table(script: ModuleType) -> None:
    """The seven rows of Table II, each set of components once; the rate is chosen on validation; None is 'diverged'."""
    assert len({(row.norm, row.leaky, row.max_norm) for row in script.ROWS}) == len(script.ROWS) == 7
    curves = {1e-4: [50.0, 40, 30, 20], 1e-2: [9.0, 60, 12, 14], 1e-1: [1.0, 1, 1, None]}
    results = [{"row": row.name, "lr": lr, "curve": {"val": v}} for row in script.ROWS for lr, v in curves.items()]
    assert set(script.select(results).values()) == {1e-2}
    errors = (5.0, 5.5, None)
    final = [{"row": "BN", "lr": 0.01, "train_error": 0.1, "test_error": error} for error in errors]
    (line,) = script.table(final).splitlines()[2:]
    assert "84.56 / 83.21" in line
    assert "5.25 (5.00 to 5.50) 1 of 3 diverged" in line


def test_both_crowds_and_their_curves(script: ModuleType) -> None:
    """Rows with and without BatchNorm in one call: each job has its result, and a look at the end of each epoch."""
    data = load(BASE)
    jobs = [(row, row.recipe(BASE.replace(precision="fp32"), lr=0.01)) for row in script.ROWS[2:4]]
    said: list[str] = []
    results = script.side_by_side(jobs, data, torch.device("cpu"), said.append, look_every=1)
    assert {result["row"] for result in results} == {"max-norm", "BN + LReLU"}
    for result in results:
        row = next(row for row in script.ROWS if row.name == result["row"])
        crowd = script.Crowd([row.recipe(BASE, lr=0.01)], data, torch.device("cpu"), torch.float32)
        errors = [crowd.error("val")[0] for _ in crowd.train()]
        assert result["curve"]["epoch"] == [1, 2]
        assert result["curve"]["val"] == pytest.approx(errors, abs=1.0)
        assert result["val_error"] == result["curve"]["val"][-1]
        assert result["train_error"] == pytest.approx(crowd.error("train")[0], abs=1.0)
    assert "1 with BatchNorm and 1 without BatchNorm; 2 epochs" in said[0]
