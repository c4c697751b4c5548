"""Comparisons of tiny networks, timed for real. Nothing is asserted about who is faster."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from unskip.bench import Case, Comparison, Setting, table, write
from unskip.bench.compare import Row
from unskip.bench.compiling import cause
from unskip.bench.floor import Work
from unskip.bench.runner import Reading, Runner

QUICK = {"device": "cpu", "batch": 2, "size": 8, "rounds": 2, "seconds": 0.01}


def test_two_networks_eagerly(tmp_path: Path) -> None:
    comparison = Comparison(["resnet20", "pnnh_resnet20"], Setting(**QUICK, compiled=False))
    comparison.run(lambda: write(comparison, tmp_path))
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (tmp_path / "bench.png").stat().st_size > 5_000
    kinds = [(line["network"], line["mode"], line["form"]) for line in found["rows"]]
    assert kinds == [
        ("resnet20", "train", "as trained"), ("pnnh_resnet20", "train", "as trained"),
        ("resnet20", "infer", "norms fused"), ("pnnh_resnet20", "infer", "dense"), ("pnnh_resnet20", "infer", "fast"),
    ]  # fmt: skip
    for line in found["rows"]:
        assert not line["error"]
        assert len(line["rounds"]) == 2
        assert line["low"] <= line["images_per_s"] <= line["high"]
        assert line["memory_bytes"] > 0
        assert line["floor_milliseconds"]["arithmetic"] > 0
        assert line["finite"]
    assert found["rows"][0]["ratio"] == {"speed": 1.0, "memory": 1.0}
    assert found["rows"][1]["ratio"]["memory"] < 0.95
    # The folded dense block is the residual one's size; the fast one computes less.
    dense, fast = found["rows"][3]["macs"], found["rows"][4]["macs"]
    assert fast < 0.75 * dense
    text = "".join(str(part.columns[0]._cells) for part in table(comparison))
    assert "pnnh_resnet20" in text


@pytest.mark.full
def test_bf16_on_a_cpu() -> None:
    setting = Setting(**{**QUICK, "rounds": 1}, compiled=False, precision="bf16", infer=False)
    comparison = Comparison(["resnet20", "plain_resnet20"], setting)
    comparison.run()
    assert all(len(row.rounds) == 1 and not row.error for row in comparison.rows)


@pytest.mark.full
def test_compiled_by_workers(tmp_path: Path) -> None:
    """Two processes compile ahead; the comparison finds the code and says how long it took."""
    said: list[str] = []
    setting = Setting(**QUICK, eager=False, train=False, compile_workers=2)
    comparison = Comparison(["plain_resnet20", "pnnh_resnet20"], setting, said.append)
    comparison.run()
    assert not any(row.error for row in comparison.rows)
    assert comparison.compile_seconds
    assert sum("compiled in" in words for words in said) == 3


def test_unlike_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'resnet20' gives 10 numbers an image and 'pnnh_resnet20:num_classes=7' 7"):
        Comparison(["resnet20", "pnnh_resnet20:num_classes=7"], Setting(**QUICK))


@pytest.mark.parametrize(("words", "says"), [(["resnet20"], "two networks or more"), (["resnet20"] * 2, "named twice")])
def test_a_comparison_needs_two(words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Comparison(words, Setting(**QUICK))


def test_a_size_that_a_network_does_not_take_is_refused_before_the_work() -> None:
    with pytest.raises(
        ValueError, match=r"'resnet20' can't take a batch of shape \(1, 3, 1, 1\): Expected more than 1"
    ):
        Comparison(["resnet20", "pnnh_resnet20"], Setting(size=1, batch=1))


def test_a_folder_that_is_a_file_is_said(tmp_path: Path) -> None:
    comparison = Comparison(["resnet20", "pnnh_resnet20"], Setting(size=8, batch=2))
    (tmp_path / "there").touch()
    with pytest.raises(
        ValueError, match=r"bench: the folder .*there can't be written: File exists\. Choose another one"
    ):
        write(comparison, tmp_path / "there")


def test_one_network_that_fails_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison(["resnet20", "plain_resnet20"], Setting(**QUICK, compiled=False, infer=False))
    comparison.networks["resnet20"].fc.in_features = -1
    comparison.networks["resnet20"].fc.weight = nn.Parameter(torch.zeros(10, 3))
    comparison.run()
    first, second = comparison.rows
    assert first.error.startswith("RuntimeError: ")
    assert len(second.rounds) == 2
    assert comparison.ratios(second) == {"speed": None, "memory": None}


def test_of_a_long_error_the_cause_is_kept() -> None:
    """It stands at the end, before the compiler's advice."""
    words = "backend='inductor' raised:\n" + "in a kernel\n" * 200 + "out of resource: shared memory"
    advice = "\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace"
    found = cause(RuntimeError(words + advice))
    assert found.startswith("RuntimeError: ... ")
    assert found.endswith("in a kernel out of resource: shared memory")
    assert len(found) < 900
    assert cause(ValueError("short\nwords")) == "ValueError: short words"


def test_ctrl_c_leaves_what_is_there() -> None:
    comparison = Comparison(["resnet20", "plain_resnet20"], Setting(**QUICK, compiled=False, infer=False))
    seen = 0

    def interrupt() -> None:
        nonlocal seen
        seen += 1
        assert comparison.begun == (seen == 3)
        if seen == 3:  # after the first round
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        comparison.run(interrupt)
    assert [len(row.rounds) for row in comparison.rows] == [1, 1]
    assert all(line["images_per_s"] for line in comparison.to_dict()["rows"])


def test_ratios_are_to_the_best_form_of_the_first() -> None:
    comparison = Comparison(["pnnh_resnet20", "resnet20"], Setting(**QUICK))
    case = {"mode": "infer", "compiled": False}
    w = Work(macs=1, numbers=1, output=(10,))
    comparison.rows = [
        Row(case=Case(network="pnnh_resnet20", form="dense", **case), rounds=[9.0, 10.0, 30.0], memory=100, work=w),
        Row(case=Case(network="pnnh_resnet20", form="fast", **case), rounds=[40.0], memory=50, work=w),
        Row(case=Case(network="resnet20", form="norms fused", **case), rounds=[20.0], memory=100, work=w),
    ]
    assert [comparison.ratios(row)["speed"] for row in comparison.rows] == [0.25, 1.0, 0.5]
    assert [comparison.ratios(row)["memory"] for row in comparison.rows] == [2.0, 1.0, 2.0]


class Hoarder(nn.Module):
    """Keeps exactly ten times its input for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.repeat(1, 10) * self.gain).exp().mean(1, keepdim=True).expand(-1, 2)


def test_peak_memory_and_the_largest_batch() -> None:
    setting = Setting(device="cpu", batch=4, channels_last=False)
    case = Case(network="hoarder", mode="train", compiled=False)
    runner = Runner(case, Hoarder(), Reading(shape=(1000,), classes=2), setting)
    one = 4000  # bytes of an input
    peak = runner.peak()
    # Its input, ten copies (saved by the product), their products, and what exp gives: at least 1 + 20, at most 1 + 50.
    assert 4 * 21 * one <= peak <= 4 * 52 * one
    largest = runner.largest_batch(round(5.5 * peak / 4))
    assert largest == 5
    assert len(runner.x) == 4, "the batch is what it was"
    assert runner.largest_batch(100) == 0
