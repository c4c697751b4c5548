"""Figures 1 and 9 of Oyedotun et al. 2020: rows, choice of the rate, and the whole command on digits."""

import json
from pathlib import Path

import pytest

from unskip.reproduce import reproduce
from unskip.reproduce.plainnet_figure9 import VARIANTS, Figure9, figure9_rows

SMALL = {"dataset": "digits", "size": 8, "depths": "2", "width": 24, "rates": "0.1,0.01", "epochs": 2}


def test_rows_differ_in_what_their_names_say() -> None:
    rows = {row.name: row.recipe for row in figure9_rows(Figure9(depths="3,100", rates="0.01,0.001"))}
    assert len(rows) == len(VARIANTS) * 4
    for name, recipe in rows.items():
        assert recipe is not None
        variant, depth, rate = name.split("-", 2)
        options = recipe.network.options
        assert (options["depth"], recipe.optimizer.lr) == (int(depth), float(rate))
        assert options["norm"] is (variant in ("bn", "proposed"))
        assert bool(recipe.run.recalibrate_batchnorm) is options["norm"]
        assert (recipe.optimizer.max_norm == 3.0) is (options["activation"] == "lrelu") is (variant == "proposed")


def test_the_figure_by_its_command(tmp_path: Path) -> None:
    written = reproduce("plainnet-figure9", out=tmp_path, device="cpu", **SMALL)
    folder = tmp_path / "plainnet-figure9"
    assert (folder / "plainnet-figure9.png").stat().st_size > 10_000
    runs = json.loads((folder / "results.json").read_text())["numbers"]["rows"]
    assert len(runs) == 10
    found = [line for line in written.outcome.lines if "layers and training / test error" in line]
    assert len(found) == len(VARIANTS)
    # Of the two rates the one with the lower training loss stands.
    best = min((runs[f"he-2-{rate}"]["runs"][0] for rate in ("0.1", "0.01")), key=lambda run: run["epochs"][-1]["loss"])
    (line,) = (line for line in found if line.startswith("He,"))
    assert f"2: {best['epochs'][-1]['error']:.1f} / {best['test_error']:.1f}" in line


def test_lists_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"depths='3,x' must be numbers from 1 to 10000 with commas between"):
        Figure9(depths="3,x")
    with pytest.raises(ValueError, match="rates='0' must be numbers from"):
        Figure9(rates="0")
