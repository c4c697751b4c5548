"""Checkpoints: what is refused, what a full disk or a kill leaves, and that nothing is ever overwritten."""

import os
import pickle
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.small import SMALL, norm_net
from unskip.train import Recipe, run
from unskip.train.checkpoint import RunFolder, load_checkpoint, write_atomically
from unskip.train.metrics import read_metrics

RECIPE = SMALL.replace(epochs=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    run(RECIPE, out=out, silent=True)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(out: Path, message: str, recipe: Recipe = RECIPE, **kwargs: object) -> None:
    before = content(out)
    with pytest.raises(ValueError, match=message):
        run(recipe, out=out, silent=True, **{"resume": "auto", **kwargs})  # type: ignore[arg-type]
    assert content(out) == before


def test_holds_what_a_run_needs(finished: Path) -> None:
    state = torch.load(finished / "checkpoint.pt", weights_only=True)  # no code in it
    assert {"network", "optimizer", "scaler", "ema", "random", "step", "recipe", "data"} <= set(state)
    shapes = sorted(s["momentum_buffer"].shape for s in state["optimizer"]["state"].values())
    assert shapes == sorted(p.shape for p in norm_net(10, 1).parameters())
    weights = load_file(finished / "weights.safetensors")
    for key, value in state["network"].items():
        assert torch.equal(value, weights[key])


def test_a_second_run_in_the_same_folder_is_refused(out: Path) -> None:
    refused(out, "holds a run already. Go on with it .--resume auto.", resume="never")
    (out / "checkpoint.pt").unlink()
    refused(out, "holds a run already", resume="never")  # metrics alone are worth keeping too
    refused(out, "resume='maybe' must be 'never' or 'auto'", resume="maybe")


def test_a_finished_run_goes_on_to_its_result(out: Path) -> None:
    weights, metrics = (out / "weights.safetensors").read_bytes(), (out / "metrics.jsonl").read_bytes()
    run(RECIPE, out=out, resume="auto", silent=True)
    assert ((out / "weights.safetensors").read_bytes(), (out / "metrics.jsonl").read_bytes()) == (weights, metrics)


@pytest.mark.parametrize("cut", [0, 10, 0.5, -1])
def test_truncated(out: Path, cut: float) -> None:
    file = out / "checkpoint.pt"
    raw = file.read_bytes()
    file.write_bytes(raw[: int(cut * len(raw)) if isinstance(cut, float) else cut])
    refused(out, r"checkpoint\.pt is damaged.*Nothing was changed")


def test_a_flipped_bit_anywhere_in_the_weights(out: Path) -> None:
    """torch.load alone would not notice."""
    file = out / "checkpoint.pt"
    raw = bytearray(file.read_bytes())
    weight = torch.load(file, weights_only=True)["network"]["9.weight"].numpy().tobytes()
    at = bytes(raw).index(weight)
    raw[at + 100] ^= 4
    file.write_bytes(raw)
    torch.load(file, weights_only=True)  # indeed
    refused(out, "is damaged: the checksum of .* is wrong")


def test_foreign(out: Path) -> None:
    file = out / "checkpoint.pt"
    torch.save(norm_net(10, 1).state_dict(), file)
    refused(out, "is no checkpoint of unskip: it holds 'other keys'")
    torch.save([1, 2], file)
    refused(out, "is no checkpoint of unskip: it holds 'list'")
    torch.save(norm_net(10, 1), file)  # a pickled module: code
    refused(out, "is no checkpoint of unskip, or damaged")
    file.write_bytes(pickle.dumps({"a": 1}))
    refused(out, "is damaged, or no checkpoint at all")
    file.unlink()
    file.mkdir()
    refused(out, "can't be read: Is a directory")


def test_a_recipe_of_before_there_were_tables_is_refused(out: Path) -> None:
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    torch.save({**state, "recipe": {"network": "resnet20", "epochs": 1}}, out / "checkpoint.pt")
    refused(out, r"the recipe in .*checkpoint\.pt: 'network' stands outside the tables\. .*'network' is 'model'")


def test_another_recipe_or_other_data_or_another_network(out: Path) -> None:
    refused(out, "made with another recipe: lr was 0.05 and is 0.06", RECIPE.replace(lr=0.06))
    refused(out, "made with another recipe: seed was 0 and is 1", RECIPE.replace(seed=1))
    from unskip.data.sets import load

    refused(out, "made with another data set: .*sizes was", data=load(RECIPE.replace(val_fraction=0.3).data))
    refused(out, "belongs to another network", model=norm_net(10, 1, norm="group"))
    state = load_checkpoint(out / "checkpoint.pt")
    run(RECIPE.replace(workers=1, log_steps=3, save_steps=5), out=out, resume="auto", silent=True)  # these may change
    assert load_checkpoint(out / "checkpoint.pt")["step"] == state["step"]


def test_metrics_that_were_cut(out: Path) -> None:
    file = out / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    refused(out, r"metrics\.jsonl is shorter than it was")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file where a folder should be: refused to root too, unlike a read-only folder."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"the folder .* can't be written: Not a directory"):
        run(RECIPE, out=tmp_path / "file" / "run", silent=True)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys").is_dir(), reason="needs a read-only file system")
def test_a_read_only_folder() -> None:
    """/proc/sys is read-only for everybody, root included."""
    with pytest.raises(ValueError, match=r"the folder /proc/sys/unskip-run can't be written"):
        run(RECIPE, out="/proc/sys/unskip-run", silent=True)


@pytest.fixture
def small_files() -> object:
    """No file of this process may exceed 64 KiB: writes fail as on a full disk, for root as well."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_for_the_checkpoint(tmp_path: Path, small_files: None) -> None:
    file = tmp_path / "checkpoint.pt"
    write_atomically(file, lambda f: f.write(b"good"))
    with pytest.raises(ValueError, match=r"checkpoint\.pt can't be written: File too large.*untouched"):
        write_atomically(file, lambda f: f.write(b"x" * 100_000))
    assert file.read_bytes() == b"good"
    assert list(tmp_path.iterdir()) == [file]  # no rest of the attempt


def can_mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(folder)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


def test_a_full_disk_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """A file system of 400 KiB that somebody else fills: the last checkpoint stays, and the run goes on later."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("mounting a small file system needs root")
    try:
        recipe = SMALL.replace(epochs=8)
        run(recipe, out=tmp_path / "whole", silent=True)
        filler = disk / "somebody-elses"

        def fill(row: dict[str, object]) -> None:
            if row["epoch"] == 3:
                free = os.statvfs(disk)
                filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 4096))

        from unskip.train.display import Display

        original = Display.epoch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Display, "epoch", lambda self, row: (fill(row), original(self, row))[1])
            with pytest.raises(ValueError, match=r"can't be written: No space left on device.*--resume auto"):
                run(recipe, out=disk / "run", silent=True)
        assert load_checkpoint(disk / "run" / "checkpoint.pt")["step"] == 40  # of epoch 2, whole
        filler.unlink()
        run(recipe, out=disk / "run", resume="auto", silent=True)
        for name in ("weights.safetensors",):
            assert (disk / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        rows = [r for r in read_metrics(disk / "run" / "metrics.jsonl") if r["kind"] == "step"]
        assert [r["step"] for r in rows] == list(range(1, 161))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_leftovers_of_a_killed_write_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.pt.99.part").write_bytes(b"half")
    assert RunFolder(tmp_path).open("auto") is False
    assert list(tmp_path.iterdir()) == []
