"""Checks on a CPU that a queue which is paused and gone on with ends where an unbroken one ends, through drive.py.

And that of more states than come back the right ones are kept.

python check_drive.py            # a few minutes
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import drive
import numpy as np
import torch
from PIL import Image

HERE = Path(__file__).parent
SMALL = {"blocks": 1, "widths": [16, 32, 64], "hidden": [2, 4, 8]}
NETWORKS = {
    "resnet": {**SMALL, "kind": "resnet"},
    "centred": {**SMALL, "path": "half", "centred": True, "head_norm": True},
    "fitted": {**SMALL, "path": "fitted", "coder": "rectified_normal", "transition": "whole", "scale": 1.0},
}


def make_data(folder: Path, each: int = 8) -> None:
    """CIFAR-10's files with few images, which a network can learn: a class is a colour in noise."""
    random = np.random.default_rng(0)
    folder.mkdir()
    labels = {}
    colours = random.integers(40, 216, (10, 3))
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        y = np.arange(10 * each) % 10
        x = np.clip(colours[y][:, None, None] + random.normal(0, 60, (len(y), 32, 32, 3)), 0, 255).astype(np.uint8)
        sprite = x.reshape(each, 10, 32, 32, 3).swapaxes(1, 2).reshape(each * 32, 320, 3)
        Image.fromarray(sprite).save(folder / f"{name}.webp", lossless=True)
        labels[name] = y.astype(np.uint8)
    train = np.concatenate([labels[f"data_batch_{i}"] for i in range(1, 6)])
    np.savez(folder / "labels.npz", y_train=train, y_test=labels["test_batch"])


def run(work: Path, out: str, seconds: float, resume: str | None = None, *, stay: bool = False) -> dict[str, dict]:
    command = [sys.executable, HERE / "drive.py", work / "queue.json", "--data", work / "data", "--out", work / out]
    command += ["--device", "cpu", "--mode", "eager", "--slots", 1, "--seconds", seconds]
    command += ["--resume", work / resume] if resume else []
    command += ["--stay", work / "stay"] if stay else []
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return {r["name"]: r for r in map(json.loads, (work / out / "results.jsonl").read_text().splitlines())}


def check_pack(work: Path) -> None:
    """Weights first, then the states that have come furthest and fit; what is kept is whole."""
    kib, random = 1024, np.random.default_rng(0)
    sizes = {
        "done.pt": 150,
        "a.state.pt": 100,
        "b.state.pt": 300,
        "c.state.pt": 100,
        "d.state.pt": 40,
        "e.state.pt": 40,
    }
    states, out = work / "states", work / "packed"
    states.mkdir()
    out.mkdir()
    for name, size in sizes.items():
        (states / name).write_bytes(random.bytes(size * kib))
    # b comes first of the paused and does not fit; a was started anew, so its last line counts, and e is unknown.
    rows = [("a", 9), ("b", 8), ("c", 5), ("d", 3), ("a", 4), ("done", 2)]
    (out / "epochs.jsonl").write_text("".join(json.dumps({"name": n, "epoch": e}) + "\n" for n, e in rows))
    limits = drive.MOST, drive.PIECE
    try:
        for most, kept in ((1000, {*sizes}), (430, {"done.pt", "c.state.pt", "a.state.pt", "d.state.pt"}),
                           (300, {"done.pt", "c.state.pt"}), (200, {"done.pt"})):  # fmt: skip
            drive.MOST, drive.PIECE = most * kib, 64 * kib
            pieces = drive.pack(states, out)
            assert sum(piece.stat().st_size for piece in pieces) <= drive.MOST, most
            target = work / f"unpacked{most}"
            assert set(drive.unpack(out, target)) == kept, most
            assert all((target / name).read_bytes() == (states / name).read_bytes() for name in kept)
            for piece in pieces:
                piece.unlink()
    finally:
        drive.MOST, drive.PIECE = limits
    print("pack: what is kept is whole and fits")


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        check_pack(Path(temporary))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        make_data(work / "data")
        jobs = [
            {"name": f"{name}{'_whole' if whole else ''}", "network": network, "save": True,
             "train": {"epochs": 3, "whole": whole, "lr": 0.05}}
            for name, network in NETWORKS.items()
            for whole in ((False, True) if name == "centred" else (False,))
        ]  # fmt: skip
        (work / "queue.json").write_text(json.dumps(jobs))
        whole = run(work, "unbroken", 10_000)
        assert [r["status"] for r in whole.values()] == ["done"] * len(jobs), whole
        # Time for an epoch or a few, and then for no other network in that stretch.
        folder, stretches, paused = None, 0, 0
        while True:
            out, stretches = f"stretch{stretches}", stretches + 1
            results = run(work, out, drive.RESERVE + 7, folder, stay=stretches > 2)
            for piece in (work / out).glob("kept.tar.*") if stretches > 2 else ():
                piece.unlink()  # what is in the folder must do
            paused += sum(r["status"] == "paused" for r in results.values())
            folder = out
            if all(name in results and results[name]["status"] == "done" for name in whole):
                break
            assert stretches < 60, results
        epochs = [json.loads(line) for line in (work / folder / "epochs.jsonl").read_text().splitlines()]
        for name in whole:
            assert [r["epoch"] for r in epochs if r["name"] == name] == [1, 2, 3], (name, epochs)
        assert paused, "nothing was paused, so nothing is shown"
        drive.unpack(work / "unbroken", work / "a")
        for i in range(stretches):
            drive.unpack(work / f"stretch{i}", work / "b")  # each has the weights of what it finished
        shutil.copytree(work / "stay", work / "b", dirs_exist_ok=True)
        for name in whole:
            a, b = (torch.load(work / part / f"{name}.pt", weights_only=True) for part in "ab")
            assert a.keys() == b.keys()
            worst = max(((a[k] - b[k]).norm() / a[k].norm().clamp(min=1e-3)).item() for k in a)
            print(f"{name:16} {stretches} stretches, largest difference of a weight tensor {worst:.1e}")
            assert worst < 0.05, (name, worst)


if __name__ == "__main__":
    main()
