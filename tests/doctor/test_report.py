"""Reports of `unskip.diagnose` as values, JSON and text."""

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import unskip
from tests.doctor.reports import report
from unskip.doctor.page import render
from unskip.doctor.table import sparkline, table, verdict_lines
from unskip.measures import Layer


def deep(depth: int, gain: float) -> nn.Module:
    """A tanh network whose weights are `gain` times those that keep the signal's size."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(32, 32)
        nn.init.normal_(linear.weight, std=gain / math.sqrt(32))
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def test_diagnose_measures_and_judges_and_leaves_the_model_unchanged() -> None:
    model = deep(12, 0.05)
    images = torch.randn(32, 32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = unskip.diagnose(model, images, torch.arange(32) % 10, name="fading")
    assert found.name == "fading"
    assert found.verdict.outcome == "fails"  # the signal shrinks to 0.05^12
    assert found.verdict.layer in {layer.name for layer in found.measured.layers}
    assert found.parameters == 12 * (32 * 32 + 32) + 330
    assert found.batch == (32, 32)
    variance = found.measured.series["activation_variance"]
    assert variance.values[0] > 1e6 * min(variance.values[-10:-1])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert unskip.diagnose(nn.Sequential(nn.Linear(32, 4)), images).name == "Sequential"


def test_measures_are_chosen_and_added() -> None:
    def entries(layer: Layer, x: torch.Tensor | None, y: torch.Tensor) -> float:
        """Entries per sample.

        As many as units."""
        return y.numel() / len(y)

    model, x = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(16, 32)
    found = unskip.diagnose(model, x, measures=["weights", entries])
    series = found.measured.series
    assert series["entries"].values == (8, 8, 4)
    assert "weight_deviation" in series
    assert "noise_to_signal" in series  # the verdict's own
    assert "layer_cushion" not in series
    assert found.verdict == unskip.diagnose(model, x).verdict
    assert found.as_dict()["series"]["entries"]["healthy"] == "As many as units."
    assert "entries" in text(found.table)
    assert "Entries per sample" in render([found])


def test_wrong_arguments_get_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"diagnose: measures='weights' must be a list, for instance \['weights'\]"):
        unskip.diagnose(nn.Linear(3, 3), torch.zeros(2, 3), measures="weights")
    with pytest.raises(ValueError, match=r"diagnose: model='resnet18' is not an nn.Module. Build the model first"):
        unskip.diagnose("resnet18", torch.zeros(2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"diagnose: example must be a tensor \(B, ...\), .* not list"):
        unskip.diagnose(nn.Linear(3, 3), [1, 2])


def test_tokens_and_several_arguments_are_diagnosed() -> None:
    tokens = torch.randint(11, (16, 9))
    model = nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(54, 4))
    assert unskip.diagnose(model, tokens).batch == (16, 9)
    two = nn.Bilinear(5, 6, 4)
    batch = (torch.randn(16, 5), torch.randn(16, 6))
    assert unskip.diagnose(two, batch).batch == (16, 5)
    named = unskip.diagnose(two, {"input1": batch[0], "input2": batch[1]})
    assert named.measured.numbers["loss"] > 0


def test_json_holds_everything(tmp_path: Path) -> None:
    one, other = report("one"), report("two", outcome="trains", suspect=None)
    one.to_json(tmp_path / "report.json", against=other)
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)  # NaN is not JSON
    assert read["against"]["name"] == "two"
    assert read["verdict"]["outcome"] == "fails"
    assert read["verdict"]["layer"] == "layer5.conv"
    assert read["numbers"] == {"loss": 2.3, "nothing": None, "endless": "inf"}
    assert read["series"]["gradient_norm"]["values"][:5] == [0.0, "inf", None, "-inf", 1e-4]
    assert read["series"]["odd_measure"]["errors"] == [0.05] * 6
    assert read["layers"][3] == {
        "name": "layer3.conv", "kind": "conv", "parameters": 9, "shape": [8, 4, 4], "trunk": True, "depth": 0
    }  # fmt: skip
    assert read["notes"] == list(one.measured.notes)


def text(*what: object, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(*what)
    return console.export_text()


def test_the_table_shows_a_sparkline_and_first_last_and_extremes() -> None:
    shown = text(report().table)
    (line,) = [line for line in shown.splitlines() if "noise to signal" in line]
    assert line.split()[3:] == ["▁▁▁▁▁▂▂▂▃▄▆█", "1", "86.5", "1", "86.5"]
    (line,) = [line for line in shown.splitlines() if "gradient norm" in line]
    assert line.split()[-4:] == ["0", "1e+03", "-inf", "inf"]
    (line,) = [line for line in shown.splitlines() if "nothing" in line]
    assert line.split() == ["nothing", "-", "-", "-", "-"]


def test_two_networks_in_one_table_share_a_scale() -> None:
    shown = text(table([report("[red]one"), report("two", scale=1e-3)]))
    lines = [line.split() for line in shown.splitlines() if "▁" in line]
    assert lines[0][:4] == ["noise", "to", "signal", "[red]one"]  # text, not rich's markup
    assert lines[1] == ["two", "▁" * 12, "0.001", "0.0865"]


def test_the_verdict_in_a_terminal() -> None:
    shown = text(verdict_lines(report("[bold]net", outcome="doubtful")))
    assert shown.splitlines()[0] == "? Doubtful  [bold]net  (confidence: 75 %)"
    assert "[bold]net will do what it will do." in shown
    assert "- Use <b>fewer</b> layers." in shown
    assert "Measured on noise, 8 x 3 x 4 x 4." in shown


def test_a_sparkline_is_as_long_as_it_has_room_and_values() -> None:
    series = report().measured.series
    assert len(sparkline(series["noise_to_signal"], width=5)) == 5
    assert len(sparkline(series["odd_measure"])) == 6
    assert sparkline(series["nothing"]) == ""
    bars = sparkline(series["gradient_norm"])  # zero at the foot, infinity at the top, nothing for NaN
    assert (bars[0], bars[1], bars[2], bars[3], bars[-1]) == ("▁", "█", " ", "▁", "█")


def test_a_report_prints_as_a_few_lines_wherever_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict and what is beyond its limits, not the thousands of numbers; nor rich's own output in a notebook."""
    found = unskip.diagnose(deep(12, 0.05), torch.randn(32, 32), torch.arange(32) % 10, name="fading")
    shown = str(found)
    assert repr(found) == shown
    assert found.verdict.summary.split()[:3] == shown.splitlines()[1].split()[:3]
    assert all(remedy in " ".join(shown.split()) for remedy in found.verdict.remedies)
    marked = [line.split("  ")[0] for line in shown.splitlines() if line.startswith(" ✕ ")]
    assert len(marked) == len([name for name in found.verdict.measures if name in found.measured.series])
    assert len(shown.splitlines()) < 20
    assert max(map(len, shown.splitlines())) <= 100
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(found) == shown
    assert len(repr(found.measured).splitlines()) < 40
    assert len(repr(found.measured.series["gradient_norm"])) < 120
