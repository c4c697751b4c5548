"""Comparisons of tiny networks, timed for real. Nothing is asserted about who is faster."""

import copy
import io
import json
import weakref
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from unskip.bench import SPARE, Case, Comparison, Setting, table, write
from unskip.bench.compare import BenchRow
from unskip.bench.compiling import short_error
from unskip.bench.floor import Work
from unskip.bench.runner import Runner, Task
from unskip.cli.tables import fitted

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
    assert found["rows"][0]["ratio"] == {"speed": 1.0, "memory": 1.0, "speed_over_own_layers": None}
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


def test_the_way_out_of_unlike_heads_is_a_word_that_can_be_given() -> None:
    with pytest.raises(ValueError, match=r"for instance pnnh_resnet20:scale=1,num_classes=10\."):
        Comparison(["resnet20", "pnnh_resnet20:num_classes=7,scale=1"], Setting(**QUICK))


@pytest.mark.parametrize(
    ("words", "says"), [(["resnet20"], "two networks or more, and resnet20 was all"), (["resnet20"] * 2, "named twice")]
)
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
    comparison.candidates[0].model.fc.in_features = -1
    comparison.candidates[0].model.fc.weight = nn.Parameter(torch.zeros(10, 3))
    comparison.run()
    first, second = comparison.rows
    assert first.error.startswith("RuntimeError: ")
    assert len(second.rounds) == 2
    assert set(comparison.ratios(second).values()) == {None}


class Moody(nn.Module):
    """Trains for so many steps, and does no inference."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.head, self.steps = nn.Linear(3, 10), steps
        self.pretrained_cfg = {"input_size": (3, 8, 8)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps -= x.device.type != "meta"
        if not self.training or self.steps < 0:
            raise RuntimeError("not in the mood")
        return self.head(x.mean((2, 3)))


def willing() -> nn.Module:
    return Moody(10**9)


def tired() -> nn.Module:
    return Moody(6)


def test_a_network_that_fails_in_one_mode_or_after_a_while_has_a_row_that_says_so() -> None:
    words = ["resnet20", f"{__name__}:willing", f"{__name__}:tired"]
    comparison = Comparison(words, Setting(**QUICK, compiled=False))
    comparison.run()
    rows = {(row.case.network, row.case.mode): row for row in comparison.rows}
    assert {key for key, row in rows.items() if not row.error} == {
        ("resnet20", "train"), ("resnet20", "infer"), (words[1], "train")
    }  # fmt: skip
    assert all(len(row.rounds) == (0 if row.error else 2) for row in rows.values())
    assert comparison.failed == [
        f"{words[2]}, train, eager: RuntimeError: not in the mood",
        f"{words[1]}, infer, eager, as trained: RuntimeError: not in the mood",
        f"{words[2]}, infer, eager, as trained: RuntimeError: not in the mood",
    ]


def test_a_table_on_a_narrow_terminal_has_its_numbers() -> None:
    case = {"mode": "train", "compiled": False}
    specs = ["resnet20", "pnnh_resnet20:pretext=random,scale=0.25"]
    comparison = Comparison(specs, Setting(**QUICK, fit=2**20))
    work = Work(macs=10**8, numbers=10**8, output=(10,))
    comparison.rows = [
        BenchRow(case=Case(network=name, **case), rounds=[12345.0 * i, 23456.0 * i], memory=i * 2**32, work=work)
        for i, name in enumerate(specs, 1)
    ]
    comparison.largest = dict.fromkeys(specs, 1357)
    console = Console(width=60, file=io.StringIO())
    for part in table(comparison):
        console.print(fitted(part, console, SPARE))
    words = console.file.getvalue()  # type: ignore[attr-defined]
    for number in ("17,900", "35,801", "2.00", "4,096", "8,192", "1,357"):
        assert number in words, number
    assert "…" not in words


@pytest.mark.full
def test_the_largest_batch_is_searched_for_whatever_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison(
        ["resnet20", "plain_resnet20"], Setting(**QUICK, compiled=False, infer=False, fit=5 * 10**6)
    )
    monkeypatch.setattr(comparison, "cases", list)  # nothing is
    comparison.run()
    found = {about["name"]: about["largest_batch"] for about in comparison.to_dict()["networks"]}
    assert found["plain_resnet20"] >= found["resnet20"] >= 2
    assert not comparison.failed


def test_a_search_that_fails_is_said_and_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(runner: Runner, limit: int) -> int:
        raise RuntimeError("no more")

    monkeypatch.setattr(Runner, "largest_batch", search)
    comparison = Comparison(["resnet20", "plain_resnet20"], Setting(**QUICK, compiled=False, infer=False, fit=2**20))
    comparison.run()
    assert all(len(row.rounds) == 2 for row in comparison.rows)
    assert comparison.failed[1] == "plain_resnet20, the largest batch: RuntimeError: no more"
    assert comparison.to_dict()["networks"][1]["largest_batch"] is None


def test_of_a_long_error_the_cause_is_kept() -> None:
    """It stands at the end, before the compiler's advice."""
    words = "backend='inductor' raised:\n" + "in a kernel\n" * 200 + "out of resource: shared memory"
    advice = "\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace"
    found = short_error(RuntimeError(words + advice))
    assert found.startswith("RuntimeError: ... ")
    assert found.endswith("in a kernel out of resource: shared memory")
    assert len(found) < 900
    assert short_error(ValueError("short\nwords")) == "ValueError: short words"


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
        BenchRow(
            case=Case(network="pnnh_resnet20", form="dense", **case), rounds=[9.0, 10.0, 30.0], memory=100, work=w
        ),
        BenchRow(case=Case(network="pnnh_resnet20", form="fast", **case), rounds=[40.0], memory=50, work=w),
        BenchRow(case=Case(network="resnet20", form="norms fused", **case), rounds=[20.0], memory=100, work=w),
    ]
    assert [comparison.ratios(row)["speed"] for row in comparison.rows] == [0.25, 1.0, 0.5]
    assert [comparison.ratios(row)["memory"] for row in comparison.rows] == [2.0, 1.0, 2.0]


def test_ratios_are_between_the_same_layers_first() -> None:
    """resnet34 with fast layers and as built, PNNH with fast layers, and its form 'dense', which has ordinary ones."""
    comparison = Comparison(["resnet20", "pnnh_resnet20"], Setting(**QUICK))

    def row(name: str, form: str, speed: float, memory: int) -> BenchRow:
        case = Case(network=name, mode="infer", compiled=True, form=form)
        return BenchRow(case=case, rounds=[speed], memory=memory, work=Work(macs=1, numbers=1, output=(10,)))

    comparison.rows = [
        row("resnet20", "norms fused", 20.0, 80),
        row("pnnh_resnet20", "dense", 20.0, 100),
        row("pnnh_resnet20", "fast", 30.0, 40),
        row("resnet20 (own layers)", "norms fused", 16.0, 100),
    ]
    found = [comparison.ratios(row) for row in comparison.rows]
    assert [ratio["speed"] for ratio in found] == [1.0, 1.25, 1.5, 1.0]
    assert [ratio["memory"] for ratio in found] == [1.0, 1.0, 0.5, 1.0]
    assert [ratio["speed_over_own_layers"] for ratio in found] == [1.25, 1.25, 1.875, 1.0]
    console = Console(width=160, file=io.StringIO())
    console.print(*table(comparison))
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "over own layers" in text
    assert "ratio: to resnet20 with the same layers" in text
    for number in ("1.25", "1.50", "1.88"):
        assert number in text, number


def test_the_step_is_sgd_on_cross_entropy() -> None:
    """Three steps of a bench, written out in PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    twin = copy.deepcopy(model)
    case = Case(network="small", mode="train", compiled=False)
    runner = Runner(case, model, Task(shape=(3, 2, 2), classes=3), Setting(device="cpu", batch=4))
    decayed = [twin[1].weight, twin[4].weight]
    others = [p for p in twin.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1e-4, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(twin(runner.x), runner.y).backward()
        optimizer.step()
    for found, expected in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_closed_runner_lets_its_model_go(compiled: bool) -> None:
    """Neither Accelerate nor the compiler holds it: the next model needs the memory."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    held = [weakref.ref(model), weakref.ref(model[0].weight)]
    case = Case(network="small", mode="train", compiled=compiled)
    setting = Setting(device="cpu", batch=4, precision="bf16", seconds=0.01)
    runner = Runner(case, model, Task(shape=(3, 8, 8), classes=3), setting)
    del model
    runner.round()
    assert runner.finite()
    assert all(ref() is not None for ref in held)
    runner.close()
    assert all(ref() is None for ref in held)


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
    runner = Runner(case, Hoarder(), Task(shape=(1000,), classes=2), setting)
    one = 4000  # bytes of an input
    peak = runner.peak()
    # Its input, ten copies (saved by the product), their products, and what exp gives: at least 1 + 20, at most 1 + 50.
    assert 4 * 21 * one <= peak <= 4 * 52 * one
    largest = runner.largest_batch(round(5.5 * peak / 4))
    assert largest == 5
    assert len(runner.x) == 4, "the batch is what it was"
    assert runner.largest_batch(100) == 0
