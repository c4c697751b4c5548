"""Small networks and data that the tests of training share. Subprocesses import it too (PYTHONPATH)."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import processes
from unskip.train import Recipe, run

SMALL = Recipe.of(
    model="tests.train.small:norm_net",
    epochs=2,
    batch=64,
    lr=0.05,
    weight_decay=1e-3,
    warmup_epochs=1,
    log_steps=5,
    device="cpu",
)

# A registered network, so that `unskip.load` opens its checkpoints. Its writes are long enough to be hit.
REGISTERED = SMALL.replace(model="plainnet_mlp", options={"depth": 2, "width": 256, "img_size": 8}, epochs=3, ema=0.9)


def train(recipe: Recipe, out: str) -> None:
    run(recipe, out=out, resume="auto", silent=True)


def start(recipe: Recipe, out: Path) -> BaseProcess:
    """Trains in a process of its own."""
    return processes.start(train, recipe, str(out))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path | None]:
    """A file system of this size in the folder, None where this may not be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


class Halves(nn.BatchNorm2d):
    """One process that normalises each half of the batch by itself, as two processes do."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        # Each half updates statistics of its own; their mean is kept.
        running = [(self.running_mean.clone(), self.running_var.clone()) for _ in range(2)]
        parts = zip(x.chunk(2), running, strict=True)
        y = torch.cat([
            F.batch_norm(half, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
            for half, (mean, var) in parts
        ])  # fmt: skip
        with torch.no_grad():
            self.running_mean.copy_((running[0][0] + running[1][0]) / 2)
            self.running_var.copy_((running[0][1] + running[1][1]) / 2)
            self.num_batches_tracked.add_(1)
        return y


def norm_net(num_classes: int, in_chans: int, norm: str = "batch", drop: float = 0.0) -> nn.Module:
    norms = {"batch": nn.BatchNorm2d, "group": lambda c: nn.GroupNorm(4, c), "halves": Halves}
    return nn.Sequential(
        nn.Conv2d(in_chans, 16, 3, padding=1, bias=False),
        norms[norm](16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False),
        norms[norm](16),
        nn.ReLU(),
        nn.Dropout(drop),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def linear_net(num_classes: int, in_chans: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * in_chans, num_classes))


def arrays(n: int = 40, size: int = 8, channels: int = 3, classes: int = 4) -> dict[str, np.ndarray]:
    """Images whose brightness tells their class."""
    random = np.random.default_rng(0)

    def split(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(count) % classes
        x = random.integers(0, 60, (count, size, size, channels)) + 50 * y[:, None, None, None]
        return x.astype(np.uint8), y.astype(np.int64)

    (x_train, y_train), (x_test, y_test) = split(n), split(n // 2)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def write_npz(path: Path, **changes: np.ndarray | None) -> Path:
    """The arrays as a file, some of them changed, or left out with None."""
    np.savez(path, **{k: v for k, v in {**arrays(), **changes}.items() if v is not None})
    return path
