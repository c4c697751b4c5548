"""The cache on disk: used when right, noticed and replaced when wrong, and never in the way."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from unskip.coders import CoderBank, CoderSpec, cache
from unskip.coders.bank import cached_fit

SPEC = CoderSpec(channels=8, code=4, pretext="rectified_normal", act="ReLU()")
RELU = nn.ReLU()


@pytest.fixture
def entry(no_cache: Path) -> Path:
    cached_fit(SPEC, RELU)
    path = cache.path_of(SPEC)
    assert path.exists()
    return path


def test_a_second_network_takes_the_coder_from_disk(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached_fit(SPEC, RELU)
    monkeypatch.setattr("unskip.coders.bank.fit", None)  # fitting again would fail
    coder = CoderBank().take(SPEC, RELU)
    assert torch.equal(coder.enc, first.enc)
    assert torch.equal(coder.dec, first.dec)


@pytest.mark.parametrize(
    "change",
    [
        {"channels": 16},
        {"code": 3},
        {"pretext": "uniform"},
        {"act": "ReLU6()"},
        {"kernel": 3},
        {"depth": 2},
        {"seed": 1},
        {"paired": True},
        {"linear": True},
    ],
    ids=str,
)
def test_the_key_holds_everything_that_the_coder_depends_on(change: dict) -> None:
    assert cache.path_of(dataclasses.replace(SPEC, **change)) != cache.path_of(SPEC)


def test_the_key_holds_the_settings_of_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.path_of(SPEC)
    monkeypatch.setattr(cache.fitting, "STEPS", 7)
    assert cache.path_of(SPEC) != before


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def damage_garbage(path: Path) -> None:
    path.write_bytes(b"not a coder")


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_flip(path: Path) -> None:
    """One bit in the weights: still a valid file, still the right shapes."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(bytes(data))


def damage_foreign(path: Path) -> None:
    """Another coder's entry under this one's name."""
    other = dataclasses.replace(SPEC, seed=1)
    cached_fit(other, RELU)
    shutil.copy(cache.path_of(other), path)


@pytest.mark.parametrize("damage", [damage_truncate, damage_garbage, damage_empty, damage_flip, damage_foreign])
def test_a_damaged_or_foreign_entry_is_said_and_rebuilt(entry: Path, damage: object) -> None:
    good = cached_fit(SPEC, RELU)
    damage(entry)
    with pytest.warns(UserWarning, match="can't be used .* fitted again and replaced"):
        again = cached_fit(SPEC, RELU)
    assert torch.equal(again.enc, good.enc)
    assert torch.equal(cached_fit(SPEC, RELU).dec, good.dec)  # and now without a warning


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """A file where the folder should be: fails for every user, root included."""
    before = torch.hub.get_dir()
    (tmp_path / "hub").write_text("in the way")
    torch.hub.set_dir(str(tmp_path / "hub"))
    try:
        with pytest.warns(UserWarning, match="could not be cached: .* Set TORCH_HOME"):
            coder = CoderBank().take(SPEC, RELU)
    finally:
        torch.hub.set_dir(before)
    assert coder.enc.shape == (4, 8, 1, 1)
    assert (tmp_path / "hub").read_text() == "in the way"


def test_no_half_written_file_is_left(entry: Path) -> None:
    assert [file.name for file in entry.parent.iterdir()] == [entry.name]
