"""Table II of Oyedotun et al. 2020: rows, choice of the learning rate, and the whole command on digits."""

import json
from pathlib import Path

import pytest

from unskip.reproduce import paper_table, reproduce
from unskip.reproduce.plainnet_table2 import RATES, Table2, table2_rows

SMALL = {"dataset": "digits", "depth": 2, "rows": "BN, LReLU + max-norm", "epochs": 2, "device": "cpu"}
SMALL |= {"select_epochs": 1, "seeds": 2}


def test_rows_are_the_papers() -> None:
    """Seven rows, each set of components once, and only the components of its name are on."""
    rows = {row.name: row for row in table2_rows(Table2())}
    printed = {str(row["components"]): row["test_error"] for row in paper_table("plainnet", "II").rows}
    assert {name: row.error for name, row in rows.items()} == printed
    seen = set()
    for name, row in rows.items():
        assert row.recipe is not None
        options = row.recipe.network.options
        on = options["norm"], options["activation"] == "lrelu", row.recipe.optimizer.max_norm == 3.0
        assert on == tuple(part in name.split(" + ") for part in ("BN", "LReLU", "max-norm"))
        assert bool(row.recipe.run.recalibrate_batchnorm) is options["norm"]
        seen.add(on)
    assert len(seen) == len(rows) == 7
    (cosine, *_) = table2_rows(Table2(schedule="cosine"))
    assert cosine.recipe is not None
    assert cosine.recipe.optimizer.min_lr == 1e-4


def test_the_table_by_its_command_and_no_run_twice(tmp_path: Path) -> None:
    written = reproduce("plainnet-table2", out=tmp_path, **SMALL)
    folder = tmp_path / "plainnet-table2"
    assert len(list((folder / "select").glob("*/result.json"))) == 2 * len(RATES)
    record = json.loads((folder / "results.json").read_text())["numbers"]
    # The rate is the one with the lowest validation error among the runs of its row.
    for name, row in record["rows"].items():
        runs = {lr: json.loads((folder / "select" / f"{name} lr {lr:g}" / "result.json").read_text()) for lr in RATES}
        best = min(RATES, key=lambda lr: runs[lr]["val_error"])
        assert row["label"] == f"{name}, rate {best:g}"
        assert len(row["runs"]) == 2
    assert all(run["test_error"] < 80 for run in record["rows"]["BN"]["runs"]), "it learned something"
    assert "| 83.21 |" in next(line for line in written.outcome.lines if line.startswith("| BN,"))
    finished = sorted(folder.glob("*/*/result.json"))
    before = [file.stat().st_mtime_ns for file in finished]
    again = reproduce("plainnet-table2", out=tmp_path, **SMALL)
    assert again.outcome.lines == written.outcome.lines
    assert [file.stat().st_mtime_ns for file in finished] == before
    with pytest.raises(ValueError, match=r"was made with another recipe: epochs was 1 and is 2"):
        reproduce("plainnet-table2", out=tmp_path, **{**SMALL, "select_epochs": 2})


def test_what_is_wrong_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--rows has 'BN \+ LRelu', and .* Did you mean 'BN \+ LReLU'"):
        reproduce("plainnet-table2", out=tmp_path, **{**SMALL, "rows": "BN + LRelu"})
    with pytest.raises(ValueError, match="schedule='steps' must be one of constant, cosine"):
        Table2(schedule="steps")
    with pytest.raises(ValueError, match="depth=0 must be between 1 and"):
        Table2(depth=0)
