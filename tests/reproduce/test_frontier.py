"""The frontier: its networks are there, its line is the frontier, a pause loses nothing, no page has empty cells."""

import csv
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from unskip.cli.commands import app
from unskip.models.build import NetworkConfig, build_network
from unskip.reproduce import frontier_columns as columns
from unskip.reproduce import reproduce
from unskip.reproduce.cifar10_headlines import GAP, headline_rows
from unskip.reproduce.frontier import (
    ASKED,
    COSTS,
    KIND,
    LONG,
    NETWORKS,
    TABLES,
    as_csv,
    asked_for,
    draw,
    gathered,
    nearest_frontier,
    pareto,
    write_page,
)
from unskip.reproduce.pnnh_defaults import defaults_rows
from unskip.ship import fold
from unskip.surgery import plainify
from unskip.surgery.cost import on_meta, size
from unskip.train.recipe import parse_command

ROWS = "resnet10t,pnnh_resnet10t,resnet18-32"
TINY = {"dataset": "digits", "epochs": 1, "rows": ROWS, "seeds": 2, "device": "cpu", "at_once": 2}


def made_up() -> dict[str, dict[str, object]]:
    """A table with all columns: costs that rise in the order of the names, errors that mostly fall."""
    table = {}
    for i, name in enumerate(NETWORKS):
        row: dict[str, object] = {"network": name, "kind": KIND[name], "train_speed_ratio": 1.0, "plain_ms": 10.0 + i}
        row |= {"train_images_per_s": 9000.0 - 100 * i, "train_bytes": 2**30 * (1 + i), "plain_macs": 10**9 * (1 + i)}
        for key in ("tinyimagenet32-short", "tinyimagenet32-long", "imagenette64-short"):
            row |= {f"{key}-{what}": 70.0 - (i % 7) - i / 10 for what in ("test_error", "val_error")}
            row |= {f"{key}-n": 3, f"{key}-diverged": 0, f"{key}-parameters": 10**7, f"{key}-test_error_sd": 0.3}
        table[name] = row
    return table


def test_tables_name_networks_that_are_there() -> None:
    for ahead in TABLES["ahead"]:
        assert ahead["network"] in NETWORKS
        assert ahead["than"] in {*NETWORKS, "equal speed"}
        assert set(ahead) - {"network", "than"} <= {"tinyimagenet32-short", "tinyimagenet32-long", "imagenette64-short"}
    assert all(asked[key] in NETWORKS for asked in TABLES["ratio"] for key in ("network", "over"))
    assert set(ASKED) < set(NETWORKS)
    _, recipe = parse_command(["tinyimagenet32-pnnh-34", "--model", NETWORKS["pnnh_resnet18-48"]])
    assert recipe.network == NetworkConfig(model="pnnh_resnet18", options={"channels": [48, 96, 192, 384]})


def test_options_of_a_name_are_those_of_network_and_method() -> None:
    config = NetworkConfig(model="resnet10t:method=pnnh,channels=[16,32,64,128],norm=both,head_norm=false")
    with torch.device("meta"):
        network = build_network(config, num_classes=7, in_chans=3)
    assert (network.layer4[0].learner.norm2.num_features, network.layer4[0].head_norm) == (128, None)
    assert network.surgery.method.norm == "both"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"has options, and method='pnnh' is given as well; use resnet18:method=pnnh"):
        NetworkConfig(model="resnet18:num_classes=3", method="pnnh")


def test_the_frontier_is_what_nothing_beats_in_both() -> None:
    points = {"a": (1.0, 9.0), "b": (2.0, 7.0), "c": (2.0, 8.0), "d": (3.0, 7.0), "e": (4.0, 5.0)}
    assert pareto(points) == ["a", "b", "e"]
    expected = [
        n
        for n, (c, e) in points.items()
        if not any(o != n and points[o] != (c, e) and points[o][0] <= c and points[o][1] <= e for o in points)
    ]
    assert sorted(pareto(points)) == sorted(expected)
    chosen = nearest_frontier(made_up(), "tinyimagenet32-short-val_error")
    assert len(chosen) == LONG
    assert set(ASKED) < set(chosen)


def test_what_was_asked_stands_beside_what_was_reached() -> None:
    table = made_up()
    table["pnnh_resnet34"]["tinyimagenet32-short-test_error"] = 64.8
    table["resnet34"]["tinyimagenet32-short-test_error"] = 65.0
    table["pnnh_resnet18"]["train_images_per_s"] = table["resnet10t"]["train_images_per_s"]
    lines = asked_for(table, "tinyimagenet32-short")
    # sqrt(2 * 0.3^2 / 3)
    assert lines[0].endswith("pnnh_resnet34 less resnet34, points of top-1: asked +0.0 or more, reached: +0.20 ± 0.24.")
    assert any("less equal speed" in line and "(resnet" in line for line in lines)
    del table["resnet18"]["tinyimagenet32-short-test_error"]
    assert asked_for(table, "tinyimagenet32-short")[1].endswith("not measured.")


def test_a_page_has_no_empty_cells(tmp_path: Path) -> None:
    table = made_up()
    figures = {f"tinyimagenet32-short-{budget}.png": b"" for budget in COSTS}
    write_page(tmp_path, table, figures)
    page = (tmp_path / "frontier.md").read_text()
    assert page.index("asked") < page.index("## Recommended") < page.index("| network |")
    assert all((tmp_path / "figures" / f"frontier-{name}").is_file() for name in figures)
    assert "Not measured" not in page
    del table["seqnet18"]["train_bytes"]
    write_page(tmp_path, table, {})
    page = (tmp_path / "frontier.md").read_text()
    assert "Not measured in all of this yet, and not in the tables: seqnet18." in page
    assert "| seqnet18 |" not in page
    assert "| seqnet50 |" in page
    assert "![" not in page
    with pytest.raises(ValueError, match=r"--page compares networks with all of .*, and 1 of 2 have them\."):
        write_page(tmp_path / "other", {name: table[name] for name in ("seqnet18", "seqnet50")}, figures)
    assert not (tmp_path / "other").exists()


def test_columns_of_an_earlier_record_fill_what_is_not_measured(tmp_path: Path) -> None:
    table = made_up()
    for name, row in table.items():
        row["model"] = NETWORKS[name]
    table["resnet18"]["model"] = "resnet18:channels=[1,2,3,4]"
    file = tmp_path / "frontier.csv"
    file.write_bytes(as_csv(table.values()))
    found = gathered(tmp_path / "nothing", file)
    assert found["seqnet18"] == table["seqnet18"]
    assert found["resnet18"] == {"network": "resnet18", "kind": "residual", "model": "resnet18"}
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"--columns .*other.csv can't be read: .*Give a frontier.csv"):
        gathered(tmp_path, tmp_path / "other.csv")


def test_every_name_in_a_picture_is_inside_and_covers_no_other() -> None:
    points = {name: (1.0 + i % 6, 60.0 + (i * 7) % 11) for i, name in enumerate(NETWORKS)}
    points["plain_resnet34"] = (3.0, 90.0)
    figure = draw(points, COSTS["macs"], "error")
    figure.canvas.draw()
    (axes,) = figure.axes
    assert axes.get_title("left") == "above the picture: plain_resnet34 90.0"
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(NETWORKS) - 1
    assert sum(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i]) <= 2


@pytest.mark.full
def test_a_pause_in_the_middle_and_the_rest(tmp_path: Path) -> None:
    """Three networks and two seeds by the command, paused at once; what stays is small."""
    words = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    command = ["reproduce", "frontier", *words, "--out", str(tmp_path), "--step", "train"]
    first = CliRunner().invoke(app, [*command, "--minutes", "1e-5"])
    assert first.exit_code == 75
    assert (tmp_path / "frontier" / "frontier.csv").is_file()
    second = CliRunner().invoke(app, command)
    assert second.exit_code == 0, second.output
    runs = tmp_path / "frontier" / "runs" / "digits-short"
    assert {file.name for file in runs.glob("*/*")} == {"recipe.toml", "result.json", "metrics.jsonl"}
    assert sum(file.stat().st_size for file in runs.glob("*/*")) < 5000 * 6
    assert len((runs / "calls.jsonl").read_text().splitlines()) == 2
    rows = list(csv.DictReader((tmp_path / "frontier" / "frontier.csv").open()))
    trained = {row["network"]: row for row in rows if row["digits-short-n"]}
    assert set(trained) == set(ROWS.split(","))
    errors = [json.loads((runs / f"resnet10t_s{seed}" / "result.json").read_text())["test_error"] for seed in (0, 1)]
    assert float(trained["resnet10t"]["digits-short-test_error"]) == pytest.approx(sum(errors) / 2)
    shown = reproduce("frontier", out=tmp_path, step="show")
    assert "| 2 | " in (tmp_path / "frontier" / "README.md").read_text()
    assert "Measured, error, digits-short: 3 of" in "\n".join(shown.outcome.lines)
    with pytest.raises(ValueError, match=r"have none yet\. Finish --length short, or name networks with --rows"):
        reproduce("frontier", out=tmp_path, step="train", length="long", dataset="digits")


@pytest.mark.full
def test_plain_columns_are_those_of_the_folded_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted on the meta device is what `fold` makes; latency by onnxruntime is of the same two networks."""
    monkeypatch.setattr(columns, "SIDE", 64)
    monkeypatch.setattr(columns, "LATENCY_RUNS", 1)
    monkeypatch.setattr(columns, "LATENCY_SECONDS", 0.0)
    spec = "resnet18:channels=[8,16,32,64]"
    found = columns.plain_columns(spec)
    folded = fold(plainify(columns.built(spec), "rm"), "dense")
    assert found["plain_parameters"] == sum(p.numel() for p in folded.parameters())
    assert found["plain_macs"] == size(on_meta(folded), (3, 64, 64)).macs
    assert found["plain_form"] == "rm and fold"
    assert set(columns.latency_columns(spec)) == {"plain_ms", "plain_ms_median", "own_ms", "own_ms_median"}
    assert set(columns.latency_columns("resnet10t:method=pnnh,channels=[8,16,32,64]")) == {
        "plain_ms",
        "plain_ms_median",
    }


@pytest.mark.full
def test_speed_and_memory_come_from_bench(tmp_path: Path) -> None:
    """Tried out on the CPU: two networks beside the reference, in a folder that no table is made of."""
    reproduce("frontier", out=tmp_path, step="bench", rows="resnet10t,pnnh_resnet10t", device="cpu")
    for name in ("resnet10t", "pnnh_resnet10t"):
        found = json.loads((tmp_path / "frontier" / "bench-tried" / f"{name}.json").read_text())
        assert found["train_images_per_s"] > 0
        assert found["train_bytes"] > 1e6
        assert found["train_memory_ratio"] < 1
    rows = csv.DictReader((tmp_path / "frontier" / "frontier.csv").open())
    assert "train_bytes" not in next(rows)


@pytest.mark.full
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_built(name: str) -> None:
    with torch.device("meta"):
        network = build_network(NetworkConfig(model=NETWORKS[name]), num_classes=200, in_chans=3).eval()
        assert network(torch.empty(1, 3, 64, 64)).shape == (1, 200)


def test_rows_that_choose_defaults_and_close_the_gap() -> None:
    rows = {row.name: row.recipe for row in defaults_rows("resnet34,mobilenetv2")}
    assert len(rows) == 12 + 4 + 8 + 4
    both = rows["resnet34-after_W_2_and_before_pooling-fitted"]
    assert both is not None
    assert both.network.options == {"norm": "both", "head_norm": True, "pretext": "rectified_normal"}
    assert both.data.val_fraction == 0.1
    assert "mobilenetv2-after_W_2-fitted" not in rows
    with pytest.raises(ValueError, match="families has 'resnet35'; it must be among"):
        defaults_rows("resnet35")
    headlines = {row.name: row.recipe for row in headline_rows()}
    assert {f"{name}_30" for name in GAP} < set(headlines)
    thin = headlines["resnet110_thin_200"]
    assert thin is not None
    with torch.device("meta"):
        network = build_network(thin.network, num_classes=10, in_chans=3)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 2) == 0.97
