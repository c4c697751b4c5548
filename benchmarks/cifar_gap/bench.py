"""Milliseconds per training step at batch 128: ResNet-110 and PNNH-110, alone and several at a time, eager and compiled pieces, all as CUDA graphs.

python bench.py --out FILE
"""

import argparse
import json
import threading
import time
from pathlib import Path

import torch
from engine import Data, TrainConfig, Trainer
from networks import NetworkConfig
from torch.nn import functional as F

NETWORKS = {
    "resnet110": NetworkConfig(kind="resnet"),
    "pnnh110": NetworkConfig(),
    "pnnh110_wide": NetworkConfig(widths=(32, 64, 128), hidden=(8, 8, 16)),
}


class RandomData(Data):
    """Random images: timing needs no real ones, and zeros would run faster than real data."""

    def __init__(self, device: str, n: int = 4096):
        self.device = device
        images, labels = (
            torch.randint(256, (n, 32, 32, 3), dtype=torch.uint8, device=device),
            torch.randint(10, (n,), device=device),
        )
        self.train = self.val = self.test = images, labels
        self.padded = F.pad(images, (0, 0, 4, 4, 4, 4))


def ms_per_step(trainers: list[Trainer], steps: int) -> float:
    """Wall-clock milliseconds per step of one network when all train at the same time, divided by their number."""

    def work(trainer: Trainer, n: int) -> None:
        with torch.cuda.stream(trainer.stream):
            trainer.cursor.zero_()
            trainer.replay(n)

    def all_of_them(n: int) -> float:
        threads = [threading.Thread(target=work, args=(t, n)) for t in trainers]
        start = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return time.perf_counter() - start

    all_of_them(10)
    return min(all_of_them(steps) for _ in range(2)) * 1000 / steps / len(trainers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    data, rows = RandomData("cuda"), []
    print(torch.__version__, torch.cuda.get_device_name(), "cudnn", torch.backends.cudnn.version(), flush=True)

    def build(name: str, compile_pieces: bool) -> Trainer:
        return Trainer(name, NETWORKS[name], TrainConfig(epochs=20), data, compile_pieces)

    def record(**row) -> None:
        rows.append(row)
        args.out.write_text(json.dumps(rows, indent=1))
        print(row, flush=True)

    best = {}
    for compile_pieces in (False,) if args.no_compile else (False, True):
        for name in NETWORKS if not compile_pieces else ("resnet110", "pnnh110"):
            start = time.perf_counter()
            try:
                trainer = build(name, compile_pieces)
                built = time.perf_counter() - start
                ms = ms_per_step([trainer], 80)
            except Exception as error:
                record(network=name, compiled=compile_pieces, error=f"{type(error).__name__}: {error}"[:600])
                continue
            loss = (trainer.sums[0]).item()
            record(network=name, compiled=compile_pieces, at_a_time=1, ms=ms, build_seconds=built, finite=loss == loss)
            if name == "pnnh110":
                best["pnnh", compile_pieces] = ms
    compile_pieces = best.get(("pnnh", True), 1e9) < best[("pnnh", False)]
    for name in ("pnnh110", "resnet110"):
        trainers = []
        for n in (2, 4, 8, 12) if name == "pnnh110" else (8,):
            trainers += [build(name, compile_pieces) for _ in range(n - len(trainers))]
            record(network=name, compiled=compile_pieces, at_a_time=n, ms=ms_per_step(trainers, 40))
    print("memory GiB", torch.cuda.max_memory_allocated() / 2**30)


if __name__ == "__main__":
    main()
