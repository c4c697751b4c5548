"""The grid of GPTs: a pause shows what is done, and the best rate of a row is that of the least validation loss."""

from pathlib import Path
from typing import Any

import pytest

from unskip.reproduce import reproduce
from unskip.train import TrainingInterrupted
from unskip.train.many import finished

TEXT = "".join(f"Line {i}: {i * i}.\n" for i in range(200))
SMALL: dict[str, Any] = {
    "device": "cpu", "depths": "1", "width": 8, "heads": 1, "context": 8, "batch": 16, "epochs": 1, "seeds": 2,
    "optimizers": "adamw", "adamw_rates": "1e-5,1e-2", "rows": "residual", "results_only": True, "at_once": 2,
}  # fmt: skip


def test_a_paused_grid_shows_what_is_done_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text(TEXT)
    settings = {**SMALL, "data": tmp_path / "some.txt", "out": tmp_path}
    folder = tmp_path / "attention"
    with pytest.raises(TrainingInterrupted, match="its limit of 1e-05 minutes"):
        reproduce("attention", **settings, minutes=1e-5)
    assert " 0 runs are done." in (folder / "README.md").read_text()
    written = reproduce("attention", **settings)
    runs = {name: finished(folder / "runs" / f"residual_1_adamw_{name}") for name in ("1e-05_s0", "0.01_s0", "0.01_s1")}
    assert all(run is not None for run in runs.values())
    slow, fast, other = (run.epochs[-1]["val_loss"] for run in runs.values() if run is not None)
    assert fast < slow
    mean = (fast + other) / 2
    assert f"| 1 | residual | adamw | 0.01 | {mean:.3f} ± " in written.outcome.lines[2]
    assert " 3 runs are done." in (folder / "README.md").read_text()
    assert {file.name for file in folder.glob("runs/*/*")} == {"recipe.toml", "result.json", "metrics.jsonl"}
    assert reproduce("attention", **settings, train=False).outcome.lines == written.outcome.lines
