"""What the training loop costs beside the bare update, and images/s of ResNet-110 and PNNH-110 at batch 128.

    python benchmarks/loop_overhead.py OUT                     # one GPU, under 3 minutes; writes OUT/loop_overhead.json
    python benchmarks/loop_overhead.py OUT --device cpu --network resnet20 --batch 16 --steps 4      # to try it out

For each network and setting, in one process: epochs of the loop as a user runs it (`unskip.train.run`: CIFAR-shaped
random images on the device, crops and mirrors, schedule, logging, metrics.jsonl), and after each epoch as many bare
forward-backward-updates of the same network on one cached batch, eagerly or by the same CUDA graph. The two take turns
and medians are compared, so that a clock that changes hits both. The first epoch, which compiles and records, is left
out.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskip.data import DataSet, Split
from unskip.train import Recipe, run, runner
from unskip.train.trainer import Training

NETWORKS = ("resnet110", "pnnh_resnet110")


def images(count: int) -> DataSet:
    """Random uint8 images of CIFAR's shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (count,), generator=generator)
    sizes = {"classes": 10, "channels": 3, "image_size": 32}
    grey = {"mean": (0.5, 0.5, 0.5), "std": (0.3, 0.3, 0.3)}
    return DataSet(name="random", train=Split(x, y), val=None, test=Split(x[:128], y[:128]), **sizes, **grey)


class Timed(Training):
    """The loop as it is; where an epoch ends, the bare update is timed too."""

    rounds: list[list[float]] = []  # noqa: RUF012 - of the run under way: [loop, bare], ms an update

    def close_epoch(self, epoch: int, images_per_s: float) -> None:
        if epoch == 1:
            Timed.rounds = []
        else:
            loop = 1e3 * self.recipe.batch / images_per_s  # what the loop itself measures and prints
            Timed.rounds.append([loop, self.bare_ms(*next(self.feed.epoch(0)))])
        super().close_epoch(epoch, images_per_s)

    def bare_ms(self, x: Tensor, y: Tensor) -> float:
        """Forward, backward and update on one cached batch and nothing else."""
        self.synchronize()
        began = time.perf_counter()
        graph = getattr(self.step, "graph", None)
        for _ in range(self.feed.steps):
            if graph is not None:
                graph.replay()
                continue
            self.optimizer.zero_grad()
            self.step.criterion(self.network(x), y).backward()
            self.optimizer.step()
        self.synchronize()
        return 1e3 * (time.perf_counter() - began) / self.feed.steps

    def synchronize(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()


def time_one(recipe: Recipe, data: DataSet) -> dict[str, Any]:
    """A run of the recipe: what an update costs in the loop and bare, medians over its epochs but the first."""
    runner.Training = Timed  # type: ignore[misc]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = run(recipe, data=data, out=Path(folder) / "run", silent=True)
    loop, bare = (statistics.median(column) for column in zip(*Timed.rounds, strict=True))
    shown = ("network", "compile", "cuda_graph", "precision", "batch")
    return {
        **{name: getattr(recipe, name) for name in shown},
        "loop_ms": loop,
        "bare_ms": bare,
        "overhead_percent": 100 * (loop / bare - 1),
        "images_per_s": 1e3 * recipe.batch / loop,
        "parameters": result.parameters,
        "rounds_ms": Timed.rounds,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--network", action="append", help="instead of ResNet-110 and PNNH-110")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150, help="updates in an epoch")
    parser.add_argument("--epochs", type=int, default=6, help="the first is not counted")
    args = parser.parse_args()
    gpu = torch.cuda.is_available() and args.device == "auto"
    data = images(args.steps * args.batch)
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if gpu else "cpu"}
    if gpu:
        about["cudnn"] = str(torch.backends.cudnn.version())
    rows: list[dict[str, Any]] = []
    for compiled in ("no", "blocks") if gpu else ("no",):
        for network in args.network or NETWORKS:
            recipe = Recipe(
                network=network,
                batch=args.batch,
                epochs=args.epochs,
                lr=0.1,
                warmup_epochs=1,
                weight_decay=3e-4,
                decay_all=True,
                crop="pad",
                flip=0.5,
                precision="bf16" if gpu else "fp32",
                cuda_graph=gpu,
                compile=compiled,
                log_steps=50,
                device=args.device,
                val_fraction=0.0,
            )
            try:
                row = time_one(recipe, data)
            except Exception as error:  # one setting that fails must not take the others with it
                row = {"network": network, "compile": compiled, "error": f"{type(error).__name__}: {error}"[:2000]}
            rows.append(row)
            (args.out / "loop_overhead.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            print(
                {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "rounds_ms"}, flush=True
            )


if __name__ == "__main__":
    main()
