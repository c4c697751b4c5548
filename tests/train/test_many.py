"""Models that train at the same time are those that train alone, and go on where they were paused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters

from tests.train.small import SMALL
from unskip.train import TrainingInterrupted, run
from unskip.train.many import finished, run_many

RECIPES = {f"s{seed}": SMALL.replace(epochs=2, seed=seed, precision="fp64") for seed in range(3)}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights.safetensors")


def test_three_in_turns_are_three_alone(tmp_path: Path) -> None:
    """Two at a time, so that the third starts beside one that is under way; in float64, to the last bit."""
    said: list[str] = []
    results = run_many(RECIPES, tmp_path / "many", at_once=2, say=said.append)
    assert list(results) == list(RECIPES)
    assert "Runs to train: 3 (epochs: 2), 2 at a time" in said[0]
    assert "ms each with 2 models at a time" in said[-1]
    for name, recipe in RECIPES.items():
        alone = run(recipe, out=tmp_path / name, silent=True)
        assert results[name].test_error == alone.test_error
        assert results[name].test_loss == alone.test_loss
        assert len(results[name].epochs) == 2
        ours = weights(tmp_path / "many" / name)
        for key, value in weights(tmp_path / name).items():
            assert torch.equal(ours[key], value), key


def test_a_time_limit_pauses_and_the_same_call_goes_on(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted, match=r"stopped by its limit of 1e-05 minutes after update \d+ of"):
        run_many(RECIPES, tmp_path / "many", at_once=2, minutes=1e-5)
    assert all(finished(tmp_path / "many" / name) is None for name in RECIPES)
    results = run_many(RECIPES, tmp_path / "many", at_once=3)
    assert results["s1"].test_loss == run(RECIPES["s1"], out=tmp_path / "alone", silent=True).test_loss


def test_runs_that_can_not_share_a_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must agree on precision, and 'other' has 'fp32', not 'fp64'"):
        run_many({**RECIPES, "other": SMALL}, tmp_path)
    with pytest.raises(ValueError, match="at_once=0 must be at least 1"):
        run_many(RECIPES, tmp_path, at_once=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"test_error": 3}'])
def test_a_result_that_is_damaged_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "s0").mkdir()
    (tmp_path / "s0" / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"the result in .*s0 can't be read .*Remove result.json"):
        run_many(RECIPES, tmp_path)


def test_runs_of_another_host_are_taken_over_when_asked(tmp_path: Path) -> None:
    recipes = {"s0": RECIPES["s0"].replace(epochs=1)}
    (tmp_path / "s0").mkdir()
    (tmp_path / "s0" / "lock.json").write_text('{"host": "elsewhere", "namespace": "", "process": 7, "started": 1.0}')
    with pytest.raises(ValueError, match=r"1 of 1 runs failed. s0 ended with ValueError: .*on host 'elsewhere'"):
        run_many(recipes, tmp_path)
    assert run_many(recipes, tmp_path, take_over=True)["s0"].test_error is not None


def test_results_alone_are_kept_and_no_run_is_begun_that_would_not_end(tmp_path: Path) -> None:
    """Of two runs, one at a time, the second is too long for what is left; what stays of the first is its result."""
    long = RECIPES["s1"].replace(epochs=100_000)
    with pytest.raises(TrainingInterrupted, match="1 runs would not have ended within 5 minutes and were not started"):
        run_many({"s0": RECIPES["s0"], "s1": long}, tmp_path, at_once=1, minutes=5, whole_runs=True, results_only=True)
    assert {file.name for file in (tmp_path / "s0").iterdir()} == {"recipe.toml", "result.json", "metrics.jsonl"}
    assert not (tmp_path / "s1").exists()
    kept = finished(tmp_path / "s0")
    assert kept is not None
    assert len(kept.epochs) == 2
    assert kept.val_loss == kept.epochs[-1]["val_loss"]


@pytest.mark.full
def test_networks_side_by_side_share_compiled_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second and third seed compile nothing; without the compiler's last step, which takes minutes."""
    compile_in_place = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_in_place(module, backend="aot_eager"))
    recipe = SMALL.replace(model="resnet20", options={"widths": [4, 8, 8]}, epochs=1, batch=512, compile="blocks")
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    run_many({"a": recipe}, tmp_path)
    first = counters["stats"]["unique_graphs"] - before
    results = run_many({"b": recipe.replace(seed=1), "c": recipe.replace(seed=2)}, tmp_path, at_once=2)
    assert 0 < first < 9, "fewer than there are blocks"
    assert counters["stats"]["unique_graphs"] - before == first
    eager = run_many({"d": recipe.replace(seed=1, compile="no")}, tmp_path)["d"]
    assert results["b"].epochs[-1]["loss"] == pytest.approx(eager.epochs[-1]["loss"], rel=1e-3)
