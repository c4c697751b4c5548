"""Milliseconds per training step at batch 128, alone and several at a time.

Eager, compiled pieces or fused blocks; each whole step is one CUDA graph.

python bench.py --out FILE [--modes eager compiled fused]
"""

import argparse
import json
import threading
import time
from pathlib import Path

import numpy as np
import torch
from engine import Data, TrainConfig, Trainer
from networks import NetworkConfig

NETWORKS = {
    "resnet110": NetworkConfig(kind="resnet"),
    "pnnh110": NetworkConfig(),
    "pnnh110_wide": NetworkConfig(widths=(32, 64, 128), hidden=(8, 8, 16)),
}


class RandomData(Data):
    """Random images: timing needs no real ones, and zeros would run faster than real data."""

    def __init__(self, device: str, n: int = 4096):
        random = np.random.default_rng(0)
        images, labels = random.integers(256, size=(n, 32, 32, 3), dtype=np.uint8), random.integers(10, size=n)
        self.fill(device, images, labels, np.arange(n) >= n // 2, images, labels)


def all_of_them(trainers: list[Trainer], steps: int) -> float:
    """Seconds until every network has done its steps, all at the same time."""

    def work(trainer: Trainer) -> None:
        with torch.cuda.stream(trainer.stream):
            trainer.cursor.zero_()
            trainer.replay(steps)

    threads = [threading.Thread(target=work, args=(t,)) for t in trainers]
    start = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return time.perf_counter() - start


def ms_per_step(trainers: list[Trainer], steps: int) -> float:
    """Milliseconds per step and network."""
    all_of_them(trainers, 10)
    return min(all_of_them(trainers, steps) for _ in range(2)) * 1000 / steps / len(trainers)


def compare(name: str, data: Data) -> dict[str, float]:
    """Relative difference between fused and eager after one step from the same weights on the same batch."""
    ends = []
    for mode in ("eager", "fused"):
        trainer = Trainer(name, NETWORKS[name], TrainConfig(epochs=20, warmup=0), data, mode)
        with torch.cuda.stream(trainer.stream):
            trainer.next_epoch()
            trainer.replay(1)
        ends.append(
            (
                trainer.flat.momentum.clone(),
                torch.cat([b.flatten().float() for b in trainer.network.buffers()]),
                trainer.sums[0].item(),
            )
        )
    (g0, b0, l0), (g1, b1, l1) = ends
    return {
        "gradient": ((g1 - g0).norm() / g0.norm()).item(), "statistics": ((b1 - b0).norm() / b0.norm()).item(),
        "loss_eager": l0, "loss_fused": l1,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", default=["fused"])
    parser.add_argument("--at-a-time", nargs="+", type=int, default=[1, 4, 8, 12])
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    data, rows = RandomData("cuda"), []
    print(torch.__version__, torch.cuda.get_device_name(), "cudnn", torch.backends.cudnn.version(), flush=True)

    def record(**row) -> None:
        rows.append(row)
        args.out.write_text(json.dumps(rows, indent=1))
        print(row, flush=True)

    for mode in args.modes:
        for name, network in NETWORKS.items():
            if mode == "fused":
                record(network=name, **compare(name, data))
            trainers = []
            for n in args.at_a_time:
                start = time.perf_counter()
                trainers += [
                    Trainer(name, network, TrainConfig(epochs=20), data, mode) for _ in range(n - len(trainers))
                ]
                built = time.perf_counter() - start
                record(network=name, mode=mode, at_a_time=n, ms=ms_per_step(trainers, 60), build_seconds=built)


if __name__ == "__main__":
    main()
