"""The journeys of docs/design.md: every step exists and runs in this order; none does surgery or reads data twice."""

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import unskip
from unskip.cli import main

SOURCE = Path(unskip.__file__).parent
DESIGN = SOURCE.parents[1] / "docs" / "design.md"
STEP = re.compile(r"`([\w/]+\.py):([\w.]+)`")
JOURNEYS = {
    name: STEP.findall(steps)
    for name, steps in re.findall(r"^- \*\*(.+?)\*\*: (.+)$", DESIGN.read_text(encoding="utf-8"), re.MULTILINE)
}
ONCE = ("surgery/plainify.py:plainify", "data/sets.py:load")


def command(*words: str) -> None:
    """Runs a command; it must succeed."""
    sys.argv = ["unskip", *words]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


def plainify_and_forward() -> None:
    model = unskip.plainify(unskip.create_model("resnet20"), method="pnnh")
    model(torch.randn(2, 3, 32, 32))


def train() -> None:
    words = "digits-pnnh-56 --model resnet20 --method plain --epochs 1 --warmup-epochs 0 --device cpu"
    command("train", *words.split())


def doctor() -> None:
    command("doctor", "resnet20", "--method", "plain", "--batch-size", "4")


def plainify_and_export() -> None:
    command("plainify", "resnet20", "-o", "plain.safetensors")
    command("export", "plain.safetensors", "-o", "net.pt2")


def reproduce() -> None:
    words = "noise-table1 --dataset digits --rows simplified_plain20 --epochs 1 --seeds 1 --device cpu"
    command("reproduce", *words.split())


RUNS: dict[str, Callable[[], None]] = {
    "plainify → forward": plainify_and_forward,
    "train": train,
    "doctor": doctor,
    "plainify → export": plainify_and_export,
    "reproduce": reproduce,
}


def test_the_design_shows_all_journeys() -> None:
    assert list(JOURNEYS) == list(RUNS)
    assert all(len(steps) > 3 for steps in JOURNEYS.values())


@pytest.mark.parametrize("journey", RUNS)
def test_every_step_exists(journey: str) -> None:
    for file, function in JOURNEYS[journey]:
        assert (SOURCE / file).is_file(), f"docs/design.md, journey {journey}: there is no file {file}"
        found: object = importlib.import_module(f"unskip.{file.removesuffix('.py').replace('/', '.')}")
        for name in function.split("."):
            found = getattr(found, name, None)
        assert callable(found), f"docs/design.md, journey {journey}: {file} has no {function}"


SLOW = ("train", "doctor", "plainify → export")  # seconds each, with a profile of every call


@pytest.mark.parametrize("journey", [pytest.param(j, marks=[pytest.mark.full] * (j in SLOW)) for j in RUNS])
def test_a_journey_goes_straight_down(journey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are entered for the first time in the order of the page; surgery and reading happen once."""
    calls: Counter[str] = Counter()  # in the order of the first call

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            calls[f"{Path(code.co_filename).relative_to(SOURCE).as_posix()}:{code.co_qualname}"] += 1

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    sys.setprofile(profile)
    try:
        RUNS[journey]()
    finally:
        sys.setprofile(None)
    steps = [f"{file}:{function}" for file, function in JOURNEYS[journey]]
    for step in steps:
        assert step in calls, f"docs/design.md, journey {journey}: {step} does not run"
    assert sorted(steps, key=list(calls).index) == steps, f"docs/design.md, journey {journey}: another order"
    assert {step: calls[step] for step in ONCE if calls[step] > 1} == {}, f"journey {journey} does this more than once"
