"""Tables of trained networks: rows are the paper's, runs go on where they stopped, both numbers stand side by side."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from tests.train.small import SMALL
from unskip.models import ENTRIES
from unskip.models.build import build_network
from unskip.reproduce import REPRODUCTIONS, Outcome, paper_table, reproduce, reproduction
from unskip.reproduce.noise_table1 import table1_rows as noise_rows
from unskip.reproduce.plainnet_table3 import table3_rows
from unskip.reproduce.pnnh_figure3 import DEPTHS, figure3_rows
from unskip.reproduce.pnnh_table1 import table1_rows
from unskip.reproduce.pnnh_table4 import table4_rows
from unskip.reproduce.trained import (
    Row,
    Trained,
    TrainedTable,
    chosen,
    run_recipe,
    summary,
    train_table,
)
from unskip.train import run
from unskip.train.many import Finished, check_recipe, finished, run_many

ROOT = Path(__file__).parents[2]
SMALLER = SMALL.replace(epochs=2, val_fraction=0.0)
ROWS = [
    Row(name="batch", label="a small network", recipe=SMALLER, error=6.61, spread=0.16, params=1.7),
    Row(name="quoted", label="somebody's", error=5.0),
]
LOST = Row(name="lost", label="a rate too high", recipe=SMALLER.replace(lr=1e20, warmup_epochs=0.0), error="diverges")


@dataclass(frozen=True, kw_only=True)
class OneSeed(Trained):
    seeds: Annotated[int, "runs of each row"] = 1


def test_rows_are_the_papers() -> None:
    """Each printed row once and with its number, each recipe with a network that is there, each name once."""
    tables = {
        "pnnh 1": (table1_rows(), paper_table("pnnh", "1"), "c10_error"),
        "plainnet III": (table3_rows(), paper_table("plainnet", "III"), "test_error"),
    }
    for rows, table, column in tables.values():
        assert [row.error for row in rows[: len(table.rows)]] == [printed[column] for printed in table.rows]
    assert [row.error for row in table1_rows("cifar100")[:2]] == [27.22, None]
    four = {row.name: row.error for row in table4_rows("pnnh_paper", 110)}
    assert four["rectified_normal"] == pytest.approx(6.37)
    assert four["none"] == "diverges"
    assert four["random"] == pytest.approx(14.79)
    assert {row.name: row.error for row in noise_rows()}["simplified_plain44"] == pytest.approx(22.13)
    assert len(figure3_rows()) == 3 * len(DEPTHS)
    assert [row.error for row in figure3_rows() if row.error is not None] == [6.61, 6.37]
    for rows in (table1_rows(), table3_rows(), table4_rows("pnnh", 20), noise_rows(), figure3_rows()):
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            assert row.recipe is None or row.recipe.network.model in ENTRIES
            assert row.recipe is None or row.recipe.run.epochs >= 200


@pytest.mark.parametrize("name", ["none", "random", "identity", "group_average"])
def test_rows_of_table_4_build(name: str) -> None:
    """Those whose coder needs no fitting; tests/methods builds the others."""
    recipe = next(row.recipe for row in table4_rows("pnnh_paper", 20) if row.name == name)
    assert recipe is not None
    assert recipe.network.options == {"pretext": name}
    build_network(recipe.network, num_classes=10, in_chans=1)


def test_what_the_user_sets_reaches_the_recipe() -> None:
    slow = noise_rows()[0].recipe
    assert slow is not None
    short = run_recipe(slow, Trained(epochs=20, weight_decay=5e-4, dataset="digits", device="cpu"), seed=5)
    assert short.optimizer.weight_decay == 5e-4
    assert (short.run.epochs, short.optimizer.milestones, short.run.seed, short.data.dataset) == (
        20,
        (12, 16),
        5,
        "digits",
    )
    assert (short.run.device, short.run.cuda_graph, short.run.precision, short.run.compile) == (
        "cpu",
        False,
        "fp32",
        "no",
    )
    assert (
        run_recipe(slow, Trained(device="cpu"), seed=0).replace(device="auto", seed=slow.run.seed, save_seconds=0.0)
        == slow
    )
    rows = table1_rows()
    assert [row.name for row in chosen(rows, Trained(rows="wrn28_10, resnet110"))] == ["resnet110", "wrn28_10"]
    assert len(chosen(rows, Trained())) == len(rows)
    with pytest.raises(ValueError, match=r"--rows has 'resnet11', and there is no such row .* mean 'resnet110'"):
        chosen(rows, Trained(rows="resnet11"))
    with pytest.raises(ValueError, match="seeds=0 must be between 1 and"):
        Trained(seeds=0)
    with pytest.raises(ValueError, match="dataset='imagefolder' must be one of"):
        Trained(dataset="imagefolder")


def test_zero_is_zero_and_the_papers_number_is_what_is_left_out() -> None:
    recipe = table1_rows()[0].recipe
    assert recipe is not None
    assert recipe.optimizer.weight_decay > 0
    assert run_recipe(recipe, Trained(weight_decay=0.0, device="cpu"), seed=0).optimizer.weight_decay == 0
    assert run_recipe(recipe, Trained(device="cpu"), seed=0).optimizer.weight_decay == recipe.optimizer.weight_decay
    shown = TrainedTable("a-table", Trained(weight_decay=0.0, epochs=3, device="cpu"), ROWS, {}).outcome()
    assert any("a-table --epochs 3 --seeds 3 --weight-decay 0.0 --dataset" in line for line in shown.readme)
    for settings in (Trained, REPRODUCTIONS["plainnet-table2"].settings):
        for wrong in (0, -1):
            with pytest.raises(
                ValueError, match=rf"epochs={wrong} must be between 1 and .*; leave it out for the paper's"
            ):
                settings(epochs=wrong)  # type: ignore[call-arg]
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=r"weight_decay=.* must be between 0 and 100; leave it out for the paper's"
        ):
            Trained(weight_decay=wrong)
    with pytest.raises(ValueError, match="at_once=0 must be between 1 and 1,000; leave it out for 8 on a GPU"):
        Trained(at_once=0)


def test_mean_spread_and_difference() -> None:
    def runs(*errors: float | None) -> list[Finished]:
        return [
            Finished(name="", test_error=e, test_loss=None, val_error=None, parameters=1234, seconds=1.0)
            for e in errors
        ]

    assert str(summary(runs(6.0, 7.0, 8.0))) == "7.00 ± 1.00 (n = 3)"
    assert str(summary(runs(6.0))) == "6.00 (n = 1)"
    assert str(summary(runs(6.0, None))) == "6.00 (n = 1, 1 diverged)"
    assert str(summary(runs(None, None))) == "diverges (n = 2)"
    rows = [Row(name="a", label="A", error=6.37), Row(name="b", label="B", error=6.61)]
    table = TrainedTable("a-table", Trained(), rows, {"a": runs(9.0, 8.0), "b": runs(8.0)})
    assert table.difference("a", "b", "A less B") == "A less B: paper -0.24, ours +0.50 points."
    assert not TrainedTable("a-table", Trained(), rows, {"a": runs(9.0)}).difference("a", "b", "A less B")
    assert "| A | 6.37 | 8.50 ± 0.71 (n = 2) | 9.00, 8.00 |  | 1,234 |" in table.markdown()


def test_a_table_is_trained_written_and_not_trained_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    @reproduction("small-table", source="Nobody 2024, Table 0", shows="nothing", settings=OneSeed, trains=True)
    def table(settings: OneSeed, folder: Path) -> Outcome:
        return train_table("small-table", settings, ROWS, folder).outcome(["Found.", ""])

    try:
        fields = {"dataset": "digits", "epochs": 2, "device": "cpu"}
        written = reproduce("small-table", out=tmp_path, record=tmp_path / "record", **fields)
    finally:
        del REPRODUCTIONS["small-table"]
    assert "Runs to train: 1 (epochs: 2), 1 at a time, in " in capsys.readouterr().err
    alone = run(SMALLER, out=tmp_path / "alone", silent=True)
    record = json.loads((tmp_path / "record" / "results.json").read_text())
    rows = record["numbers"]["rows"]
    assert rows["batch"]["runs"][0]["test_error"] == pytest.approx(alone.test_error), "as `unskip train` alone"
    assert rows["batch"]["paper"] == 6.61
    assert rows["batch"]["ours"] == {"n": 1, "diverged": 0, "mean": pytest.approx(alone.test_error), "spread": None}
    readme = (tmp_path / "record" / "README.md").read_text()
    assert f"| a small network | 6.61 ± 0.16 | {alone.test_error:.2f} (n = 1) |" in readme
    assert "| somebody's | 5.00 | not run |" in readme
    assert "don't compare ours with them" in readme
    assert "unskip reproduce small-table --epochs 2 --seeds 1 --dataset digits" in readme
    assert [row["epoch"] for row in rows["batch"]["runs"][0]["epochs"]] == [1, 2]
    assert "Found." in written.outcome.lines

    # A second time nothing is trained, and another setting is refused.
    recipes = {f"{row.name}_s0": run_recipe(row.recipe, OneSeed(**fields), 0) for row in ROWS if row.recipe is not None}
    before = (tmp_path / "small-table" / "runs" / "batch_s0" / "result.json").stat().st_mtime_ns
    results = run_many(recipes, tmp_path / "small-table" / "runs", at_once=1, say=said.append)
    assert said == ["1 of 1 runs are done already."]
    assert results["batch_s0"].parameters == alone.parameters
    assert (tmp_path / "small-table" / "runs" / "batch_s0" / "result.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"batch_s0/recipe.toml was made with another recipe: epochs was 2 and is 3"):
        check_recipe(tmp_path / "small-table" / "runs" / "batch_s0", recipes["batch_s0"].replace(epochs=3))


@pytest.mark.full
def test_one_that_diverges_is_a_result_and_one_that_fails_is_named(tmp_path: Path) -> None:
    """Two at a time. What diverged is not trained again."""
    said: list[str] = []
    assert LOST.recipe is not None
    recipes = {"lost_s0": LOST.recipe, "wrong_s0": SMALLER.replace(options={"drop": 7.0})}
    with pytest.raises(ValueError, match=r"1 of 2 runs failed. wrong_s0 ended with ValueError: .*dropout prob"):
        run_many(recipes, tmp_path, at_once=2, say=said.append)
    del recipes["wrong_s0"]
    results = run_many(recipes, tmp_path, at_once=2, say=said.append)
    assert results["lost_s0"].test_error is None
    assert "the loss is" in (tmp_path / "lost_s0" / "diverged.txt").read_text()
    table = TrainedTable("a-table", Trained(), [LOST], {"lost": list(results.values())})
    assert "| a rate too high | diverges | diverges (n = 1) | diverged |  |  |" in table.markdown()


@pytest.mark.full
def test_ctrl_c_leaves_it_resumable(tmp_path: Path) -> None:
    """The command is stopped in the middle of a row; the same command goes on and ends as if it had not been."""
    settings = {"dataset": "digits", "rows": "simplified_plain20", "seeds": "1", "epochs": "6", "device": "cpu"}
    words = ["noise-table1", *(word for key, value in settings.items() for word in (f"--{key}", value)), "--out"]
    command = [sys.executable, "-m", "unskip", "reproduce", *words, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "noise-table1"
    metrics = folder / "runs" / "simplified_plain20_s0" / "metrics.jsonl"
    began = time.monotonic()
    while not (metrics.exists() and metrics.read_text()):
        assert first.poll() is None
        assert time.monotonic() - began < 120
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 75, err
    assert "stopped by SIGINT after update" in err
    assert finished(folder / "runs" / "simplified_plain20_s0") is None
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert "| plain, 20 layers | 12.63 |" in again.stdout
    result = finished(folder / "runs" / "simplified_plain20_s0")
    assert result is not None
    recipe = run_recipe(noise_rows()[0].recipe, Trained(epochs=6, dataset="digits", device="cpu"), 0)  # type: ignore[arg-type]
    unbroken = run(recipe, out=tmp_path / "unbroken", silent=True)
    assert result.test_error == pytest.approx(unbroken.test_error)
