"""The registry: names, files, and what a user can get wrong."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch

from unskip._core.drawing import dress, panels
from unskip.reproduce import REPRODUCTIONS, Outcome, Settings, reproduce, reproduction
from unskip.reproduce.registry import ABOUT


@dataclass(frozen=True, kw_only=True)
class Small(Settings):
    times: Annotated[int, "how often"] = 2


@pytest.fixture
def small() -> object:
    @reproduction("small", source="Nobody 2024, Figure 0", shows="nothing", settings=Small)
    def run(settings: Small) -> Outcome:
        torch.manual_seed(7)  # as some do for the networks that they build
        figure, (axes,) = panels(1, 1, size=(2, 2), title="small")
        axes.plot([1, 10], [settings.times, 3])
        dress(axes, x="x", y="y", log_x=True)
        return Outcome(lines=("done.",), numbers={"times": settings.times}, figure=figure)

    yield run
    del REPRODUCTIONS["small"]


def test_picture_and_record_are_written(small: object, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    written = reproduce("small", out=tmp_path / "a", record=tmp_path / "b", times=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert written.files == (tmp_path / "a" / "small.png", tmp_path / "b" / "small.json")
    assert written.files[0].read_bytes()[:4] == b"\x89PNG"
    record = json.loads(written.files[1].read_text())
    assert record["numbers"] == {"times": 5}
    assert record["configuration"] == {"times": 5}
    assert record["source"] == "Nobody 2024, Figure 0"
    assert {"versions", "date", "seconds"} <= record.keys()


def test_the_same_numbers_give_the_same_picture(small: object, tmp_path: Path) -> None:
    first, second = (reproduce("small", out=tmp_path / name).files[0].read_bytes() for name in "ab")
    assert first == second


def test_the_list_is_what_there_is() -> None:
    assert ABOUT.keys() == REPRODUCTIONS.keys()
    assert all(entry.source == ABOUT[entry.name]["source"] for entry in REPRODUCTIONS.values())


def test_what_a_user_gets_wrong_is_said(small: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no 'smal'\. Did you mean 'small'"):
        reproduce("smal", out=tmp_path)
    with pytest.raises(ValueError, match=r"small has no option 'time'\. Did you mean 'times'"):
        reproduce("small", out=tmp_path, time=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"can't be written: File exists. Choose another one \(--out\)"):
        reproduce("small", out=tmp_path / "file")
    with pytest.raises(ValueError, match=r"can't be written: .*\. Choose another one \(--record\)"):
        reproduce("small", out=tmp_path, record=Path("/proc/self"))  # there, and nobody's to write to
    assert not list(tmp_path.glob("small*"))
    with pytest.raises(ValueError, match="the name 'small' is taken"):
        reproduction("small", settings=Small)(small)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'new' is not in reproductions\.toml, so source='' and shows='so' must say"):
        reproduction("new", shows="so", settings=Small)(small)  # type: ignore[arg-type]


def test_the_papers_figures_have_names() -> None:
    wanted = {"seqnet-figure1", "seqnet-figure5", "seqnet-figure6", "noise-figure11", "pnnh-figure1", "errata"}
    assert wanted <= REPRODUCTIONS.keys()
