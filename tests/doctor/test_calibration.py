"""benchmarks/verdict, which the doctor's limits are set with, against its own record."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "verdict"
RECORD = FOLDER.parent / "records" / "2026-11-15_verdict_cpu"
RESCORED = RECORD.with_name("2026-11-18_verdict-rescored_cpu")  # the noise is like the inputs since
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks/ is in the repository, not in the sdist")


@pytest.fixture(scope="module")
def calibrate() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("calibrate")
    sys.path.remove(str(FOLDER))
    for name in ("calibrate", "networks"):
        del sys.modules[name]


@torch.no_grad()
def test_every_network_of_the_lists_reads_digits(calibrate: ModuleType) -> None:
    example = torch.randn(2, 1, 8, 8)
    for candidates in calibrate.LISTS.values():
        for candidate in candidates.values():
            assert candidate.build()(example).shape == (2, 10), candidate.name


def test_the_lists_are_those_of_the_record(calibrate: ModuleType) -> None:
    for name in ("tune", "score", "second"):
        recorded = json.loads((RECORD / f"{name}.json").read_text())["networks"]
        assert list(calibrate.LISTS[name]) == list(recorded)


def test_a_network_is_trained_and_judged_as_in_the_record(calibrate: ModuleType, tmp_path: Path) -> None:
    fates = tmp_path / "fates.json"
    calibrate.train_all("tune", "mlp4 relu", fates)
    lines, judged = calibrate.judge_all("tune", json.loads(fates.read_text())["tune"])
    ((name, found),) = judged.items()
    assert lines[2].startswith(f"| {name} |")
    assert "1 of 1 right." in lines
    recorded = json.loads((RESCORED / "tune.json").read_text())["networks"][name]
    assert found["error"] == pytest.approx(recorded["error"], abs=2)  # percent; trained by another loop
    assert found["fate"] == recorded["fate"] == found["verdict"]["outcome"] == "trains"
    for rule, sign in recorded["signs"].items():
        assert found["signs"][rule]["value"] == pytest.approx(sign["value"], rel=0.05), rule
