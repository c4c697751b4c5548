"""Checkpoints: what is refused, what a full disk or a kill leaves, and that nothing is ever overwritten."""

import errno
import io
import math
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import unskip
from tests.train.small import REGISTERED, SMALL, norm_net, small_disk
from unskip.train import Recipe, run
from unskip.train.checkpoint import FIELDS, RunFolder, load_checkpoint, write_atomically
from unskip.train.display import Display
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
    refused(out, "can't be read: it is no file")


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


def fill_disk(tmp_path: Path, epoch: int, free: int) -> None:
    """Somebody else fills the file system after an epoch, but for `free` bytes: what is there stays, and goes on."""
    recipe = REGISTERED.replace(epochs=8)
    run(recipe, out=tmp_path / "whole", silent=True)
    with small_disk(tmp_path / "disk", "6m") as disk:
        if disk is None:
            pytest.skip("mounting a small file system needs root")
        out, filler, original = disk / "run", disk / "somebody-elses", Display.epoch

        def fill(display: Display, row: dict[str, object]) -> None:
            if row["epoch"] == epoch:
                there = os.statvfs(disk)
                filler.write_bytes(b"x" * max(0, there.f_bavail * there.f_frsize - free))
            original(display, row)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Display, "epoch", fill)
            with pytest.raises(ValueError, match=r"can't be written: No space left on device.*--resume auto"):
                run(recipe, out=out, silent=True)
        assert not (out / "lock.json").exists()
        if epoch > 1:
            assert load_checkpoint(out / "checkpoint.pt")["step"] == 20 * (epoch - 1)  # of the epoch before, whole
            assert isinstance(unskip.load(out), torch.nn.Module)
            before = content(out)
            with pytest.raises(ValueError, match=r"can't be written: No space left on device"):
                run(recipe, out=out, resume="auto", silent=True)  # the disk is still full
            kept = content(out)
            assert [name for name in before if kept.get(name) != before[name]] in ([], ["metrics.jsonl"])
        filler.unlink()
        run(recipe, out=out, resume="auto", silent=True)
        name = "weights.safetensors"
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        rows = [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "step"]
        assert [r["step"] for r in rows] == list(range(1, 161))


def test_a_full_disk_in_the_middle_of_a_run(tmp_path: Path) -> None:
    fill_disk(tmp_path, 3, 4096)


@pytest.mark.full
@pytest.mark.parametrize(("epoch", "free"), [(1, 0), (2, 200_000), (7, 30_000)])
def test_a_full_disk_at_other_moments(tmp_path: Path, epoch: int, free: int) -> None:
    fill_disk(tmp_path, epoch, free)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10))
def test_a_full_disk_at_random_moments(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    fill_disk(tmp_path, chance.randrange(1, 8), chance.randrange(400_000))


def test_leftovers_of_a_killed_write_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.pt.99.part").write_bytes(b"half")
    with RunFolder(tmp_path) as folder:
        assert folder.open("auto") is False
        assert [file.name for file in tmp_path.iterdir()] == ["lock.json"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_missing_or_no_value_for_it_is_named(finished: Path, tmp_path: Path, name: str) -> None:
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    file = tmp_path / "checkpoint.pt"
    torch.save({key: value for key, value in state.items() if key != name}, file)
    with pytest.raises(ValueError, match=rf"checkpoint\.pt is damaged: its field '{name}' is missing. Nothing was"):
        load_checkpoint(file)
    torch.save({**state, name: b"b"}, file)  # a pickle makes bytes by calling a function
    with pytest.raises(
        ValueError, match=r"it holds more than tensors and plain values\. That would be code, and is not"
    ):
        load_checkpoint(file)
    for value in ("a" * 100, 10**30 * 1j, -1, -0.5, math.nan, True, None, [], {}, torch.zeros(2)):
        if not isinstance(value, FIELDS[name]) or value in (-1, -0.5) or value != value:  # type: ignore[comparison-overlap]
            torch.save({**state, name: value}, file)
            with pytest.raises(ValueError, match=rf"checkpoint\.pt is damaged: its field '{name}' is "):
                load_checkpoint(file)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("network", lambda v: {}),
        ("network", lambda v: {**v, "9.weight": "text"}),
        ("network", lambda v: {key: torch.zeros(2**10) for key in v}),
        ("optimizer", lambda v: {}),
        ("optimizer", lambda v: {**v, "param_groups": 3}),
        ("optimizer", lambda v: {**v, "param_groups": []}),
        ("optimizer", lambda v: {**v, "param_groups": [{**group, "params": []} for group in v["param_groups"]]}),
        ("optimizer", lambda v: {**v, "state": {0: {"momentum_buffer": torch.zeros(3)}}}),
        ("optimizer", lambda v: {**v, "state": {0: 3}}),
        ("random", lambda v: [3]),
        ("random", lambda v: [{**v[0], "torch": torch.zeros(2)}]),
        ("random", lambda v: [{**v[0], "numpy": ()}]),
        ("sums", lambda v: [1.0]),
        ("sums", lambda v: [None] * 3),
        ("step", lambda v: 10**15),
    ],
)
def test_a_field_that_does_not_fit_is_named(out: Path, name: str, change: Callable[[Any], Any]) -> None:
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    torch.save({**state, name: change(state[name])}, out / "checkpoint.pt")
    refused(out, f"belongs to another network, or is damaged: its field '{name}' does not fit: .* Nothing was changed")


def test_malformed_settings_of_an_optimizer_are_the_recipes(out: Path, finished: Path) -> None:
    """An unbroken run and one whose checkpoint says nonsense about its learning rates end alike."""
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    groups = [
        {**group, "lr_scale": "much", "momentum": None, "fused": 3} for group in state["optimizer"]["param_groups"]
    ]
    torch.save({**state, "optimizer": {**state["optimizer"], "param_groups": groups}}, out / "checkpoint.pt")
    run(RECIPE, out=out, resume="auto", silent=True)
    assert (out / "weights.safetensors").read_bytes() == (finished / "weights.safetensors").read_bytes()


def test_best_weights_that_are_gone_are_named(tmp_path: Path) -> None:
    recipe = RECIPE.replace(keep="best")
    run(recipe, out=tmp_path, silent=True)
    for damage in (lambda file: file.write_bytes(b"no"), Path.unlink):
        damage(tmp_path / "best.safetensors")
        refused(tmp_path, r"best\.safetensors can't be read, or is another network's: ", recipe)


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_is_gone_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    assert run(RECIPE, out=tmp_path / "run").steps == 20


@pytest.mark.full
def test_a_full_disk_behind_stderr_does_not_end_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unskip", "train", "--model", "plainnet_mlp", "--options", "{img_size = 8}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with open("/dev/full", "wb", buffering=0) as full:
        done = subprocess.run(
            [*command, "--epochs", "1", "--warmup-epochs", "0", "--out", str(tmp_path / "run")],
            env=environment, stdout=subprocess.PIPE, stderr=full,
        )  # fmt: skip
    assert b"test error" in done.stdout
    assert (tmp_path / "run" / "result.json").is_file()


def test_places_where_no_run_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the folder /dev/full can't be written: File exists"):
        run(RECIPE, out="/dev/full", silent=True)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match="the folder runs/x can't be written: No such file or directory"):
        run(RECIPE, out="runs/x", silent=True)
    run(RECIPE, out=tmp_path / "run", silent=True)


def test_a_run_whose_folder_is_removed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Display.epoch

    def remove(display: Display, row: dict[str, object]) -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        original(display, row)

    monkeypatch.setattr(Display, "epoch", remove)
    with pytest.raises(ValueError, match=r"lock\.json is gone or another process's"):
        run(RECIPE, out=tmp_path / "run", silent=True)
