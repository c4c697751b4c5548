"""Networks that train side by side are those that `unskip.train.run` trains alone; Table II of Oyedotun et al. 2020."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from unskip.data.sets import load
from unskip.reproduce import reproduce
from unskip.reproduce.batched_mlp import Crowd, bare_layer, compiled, descend_hidden, normed_layer
from unskip.reproduce.plainnet_table2 import ROWS, select, side_by_side, table
from unskip.train import Recipe, load_recipe, run

# float64, two epochs of scikit-learn's digits; a limit that bites, and a rate that falls in one of the networks
BASE = load_recipe(
    "usps-plainnet-100", dataset="digits", precision="fp64", device="cpu", epochs=2, max_norm=1.2, val_fraction=0.1,
    options={"depth": 5, "width": 24, "img_size": 8}, channels_last=False, schedule="constant",
    min_lr=0.0, recalibrate_batchnorm=0,
)  # fmt: skip


def recipes(norm: bool) -> list[Recipe]:
    rows = [row for row in ROWS if row.norm is norm]
    rates = (0.01, 0.1, 0.03, 0.05)
    chosen = [row.recipe(BASE, lr=rates[seed], seed=seed) for seed, row in enumerate(rows)]
    return [*chosen[:-1], chosen[-1].replace(schedule="cosine", min_lr=1e-4)]


@pytest.mark.parametrize("norm", [True, False])
def test_side_by_side_is_one_by_one(norm: bool, tmp_path: Path) -> None:
    data = load(BASE.data)
    crowd = Crowd(recipes(norm), data, torch.device("cpu"), torch.float64)
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
        limited = bool(recipe.optimizer.max_norm)
        assert (norms.max().item() <= 1.2 + 1e-9) is limited  # so the limit was at work where it is set


def test_a_network_that_diverges_spoils_no_other() -> None:
    data = load(BASE.data)
    row = ROWS[1]
    alone = Crowd([row.recipe(BASE, lr=0.01)], data, torch.device("cpu"), torch.float64)
    beside = Crowd([row.recipe(BASE, lr=lr) for lr in (0.01, 1e6)], data, torch.device("cpu"), torch.float64)
    for crowd in (alone, beside):
        list(crowd.train())
    assert alone.error("test")[0] == beside.error("test")[0] < 60
    assert np.isnan(beside.error("test")[1])
    torch.testing.assert_close(alone.weights[2][0], beside.weights[2][0], rtol=0, atol=1e-12)


@pytest.mark.full
def test_compiled_layers_and_updates_are_the_plain_ones() -> None:
    """What a GPU runs: gradients of the compiled layers, and the compiled update with its limit."""
    torch.manual_seed(0)
    z = torch.randn(3, 7, 32, dtype=torch.float64, requires_grad=True)
    vectors = [torch.randn(3, 7, 1, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    slope = torch.tensor([0.0, 0.3, 0.1], dtype=torch.float64).view(3, 1, 1)
    for plain, fast, count in zip((normed_layer, bare_layer), compiled(), (3, 1), strict=False):
        outputs, grads = [], []
        for function in (plain, fast):
            out = function(z, *vectors[:count], slope)
            outputs.append(out if isinstance(out, tuple) else (out,))
            loss = outputs[-1][0].sin().sum()
            grads.append(torch.autograd.grad(loss, [z, *vectors[:count]]))
        for one, other in zip([*outputs[0], *grads[0]], [*outputs[1], *grads[1]], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    states = []
    for function in (descend_hidden, compiled()[2]):
        generator = torch.Generator().manual_seed(1)
        p, g, v = (torch.randn(3, 7, 9, dtype=torch.float64, generator=generator) for _ in range(3))
        limit = torch.tensor([1.0, float("inf"), 2.0], dtype=torch.float64).view(3, 1, 1)
        p.mul_(function(p, g, v, slope + 0.1, 0.9, 1e-4, limit))
        states.append((p, v))
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert states[0][0].norm(dim=2)[0].max() <= 1 + 1e-12 < states[0][0].norm(dim=2)[1].max()


def test_rows_and_table() -> None:
    """The seven rows of Table II, each set of components once; the rate is chosen on validation; None is 'diverged'."""
    assert len({(row.norm, row.leaky, row.max_norm) for row in ROWS}) == len(ROWS) == 7
    errors: dict[float, float | None] = {1e-4: 20.0, 1e-2: 14.0, 1e-1: None}
    results = [{"row": row.name, "lr": lr, "settled_val_error": e} for row in ROWS for lr, e in errors.items()]
    assert set(select(results).values()) == {1e-2}
    same = {"row": "BN", "lr": 0.01, "train_error": 0.1, "settled_train_error": 0.2, "settled_test_error": 4.0}
    (line,) = table([{**same, "test_error": error} for error in (5.0, 5.5, None)]).splitlines()[2:]
    assert line.endswith("| 0.20 (0.20 to 0.20) | 4.00 (4.00 to 4.00) |")
    assert "84.56 / 83.21" in line
    assert "5.25 (5.00 to 5.50) 1 of 3 diverged" in line


def test_both_crowds_and_their_curves() -> None:
    """Rows with and without BatchNorm in one call: each job has its result, and a look at the end of each epoch."""
    data = load(BASE.data)
    jobs = [(row, row.recipe(BASE.replace(precision="fp32"), lr=0.01)) for row in ROWS[2:4]]
    said: list[str] = []
    results = side_by_side(jobs, data, torch.device("cpu"), said.append, look_every=1)
    assert {result["row"] for result in results} == {"max-norm", "BN + LReLU"}
    for result in results:
        row = next(row for row in ROWS if row.name == result["row"])
        crowd = Crowd([row.recipe(BASE, lr=0.01)], data, torch.device("cpu"), torch.float32)
        errors = [crowd.error("val")[0] for _ in crowd.train()]
        assert result["curve"]["epoch"] == [1, 2]
        assert result["curve"]["val"] == pytest.approx(errors, abs=1.0)
        assert result["val_error"] == result["curve"]["val"][-1]
        assert result["train_error"] == pytest.approx(crowd.error("train")[0], abs=1.0)
    assert "1 with BatchNorm and 1 without BatchNorm; 2 epochs" in said[0]


@torch.no_grad()
def test_recalibrated_norms_are_those_of_pytorch() -> None:
    """Against torch.optim.swa_utils.update_bn, on the library's network; all training images are one batch."""
    data = load(BASE.data)
    crowd = Crowd(recipes(norm=True)[:2], data, torch.device("cpu"), torch.float64)
    network = crowd.build()[1].double()
    torch.optim.swa_utils.update_bn([crowd.images.view(-1, 1, 8, 8)], network)
    crowd.recalibrate_batchnorm()
    for i, layer in enumerate(network.stage1):
        torch.testing.assert_close(crowd.mean[i, 1], layer.norm.running_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(crowd.var[i, 1], layer.norm.running_var, rtol=1e-10, atol=0)


def test_the_table_by_its_command_and_no_step_twice(tmp_path: Path) -> None:
    fields = {"dataset": "digits", "depth": 2, "rows": "BN, LReLU + max-norm", "epochs": 2, "device": "cpu"}
    fields |= {"select_epochs": 1, "seeds": 2}
    written = reproduce("plainnet-table2", out=tmp_path, **fields)
    folder = tmp_path / "plainnet-table2"
    record = json.loads((folder / "results.json").read_text())["numbers"]
    assert len(record["select"]) == 2 * 7
    assert len(record["final"]) == 2 * 2
    assert record["rates"].keys() == {"BN", "LReLU + max-norm"}
    assert all(result["test_error"] < 80 for result in record["final"] if result["row"] == "BN"), "it learned something"
    assert "| BN | 84.56 / 83.21 |" in written.outcome.lines[2]
    assert "| LReLU + max-norm | 83.62 / 82.11 |" in (folder / "README.md").read_text()
    before = [(folder / "runs" / name).stat().st_mtime_ns for name in ("select.json", "final.json")]
    again = reproduce("plainnet-table2", out=tmp_path, **fields)
    assert again.outcome.lines == written.outcome.lines
    assert [(folder / "runs" / name).stat().st_mtime_ns for name in ("select.json", "final.json")] == before
    with pytest.raises(ValueError, match=r"select.json is of other settings .* Choose another folder"):
        reproduce("plainnet-table2", out=tmp_path, **{**fields, "epochs": 3})
    with pytest.raises(ValueError, match=r"--rows has 'BN \+ LRelu', and .* Did you mean 'BN \+ LReLU'"):
        reproduce("plainnet-table2", out=tmp_path / "other", **{**fields, "rows": "BN + LRelu"})
