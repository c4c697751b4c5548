"""How the learning rate may fall in papers/plainnet.md, Table II: the proposed row by eight schedules, side by side.

    python benchmarks/plainnet_schedules.py usps.npz OUT.jsonl
    python benchmarks/plainnet_schedules.py usps.npz OUT.jsonl --device cpu --epochs 1 --depth 4     # to try it out

Constant rates, cosine and exponential falls to 0.0001, the lower end of the paper's range, after one epoch of warm-up;
two seeds, nine tenths of the training images. A line of OUT.jsonl has the errors in percent with BatchNorm's running
averages and with statistics of all training images at once (`Crowd.settle`). 200 s on one H200.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from unskip.reproduce.crowd import Crowd
from unskip.reproduce.plainnet_table2 import LOWEST, ROWS, Table2
from unskip.train.sets import load

KINDS = [
    ("constant", 0.003),
    ("constant", 0.01),
    ("cosine", 0.003),
    ("cosine", 0.01),
    ("cosine", 0.03),
    ("cosine", 0.1),
]
KINDS += [("exp", 0.03), ("exp", 0.1)]
JOBS = [(kind, lr, seed) for seed in (0, 1) for kind, lr in KINDS]
SPLITS = ("train", "val", "test")


def rate(kind: str, lr: float, t: float) -> float:
    """At the share t of the run."""
    if kind == "cosine":
        return LOWEST + (lr - LOWEST) * 0.5 * (1 + math.cos(math.pi * t))
    return lr if kind == "constant" else lr * (LOWEST / lr) ** t


class Scheduled(Crowd):
    """Networks with these schedules instead of their recipes'."""

    def rates(self) -> Tensor:
        warm = self.feed.steps
        total = self.one.epochs * warm
        columns = [[rate(kind, lr, i / total) * min(1, (i + 1) / warm) for i in range(total)] for kind, lr, _ in JOBS]
        return torch.tensor(columns, dtype=self.dtype).T.contiguous().to(self.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    row = next(row for row in ROWS if row.name == "BN + LReLU + max-norm")
    base = Table2(data=args.data, depth=args.depth).recipe().replace(epochs=args.epochs, val_fraction=0.1)
    recipes = [row.recipe(base, lr=lr, seed=seed) for _, lr, seed in JOBS]
    crowd = Scheduled(recipes, load(base, args.data), torch.device(args.device), torch.float32)
    began = time.perf_counter()
    found: dict = {}
    with open(args.out, "w") as file:
        for epoch in crowd.train():
            if epoch % max(1, args.epochs // 12) and epoch != args.epochs:
                continue
            found = {"epoch": epoch, "jobs": JOBS, "loss": [round(v, 5) for v in crowd.loss.tolist()]}
            found["running"] = {split: crowd.error(split) for split in SPLITS}
            running = crowd.mean.clone(), crowd.var.clone()
            crowd.settle()
            found["settled"] = {split: crowd.error(split) for split in SPLITS}
            crowd.mean.copy_(running[0])
            crowd.var.copy_(running[1])
            file.write(json.dumps(found) + "\n")
            file.flush()
            print(f"epoch {epoch}, {time.perf_counter() - began:.0f} s", flush=True)
    for i, (kind, lr, seed) in enumerate(JOBS):
        errors = [
            f"{how} " + " ".join(f"{found[how][split][i]:6.2f}" for split in SPLITS) for how in ("running", "settled")
        ]
        print(f"{kind:9} {lr:<6} seed {seed}  loss {found['loss'][i]:.4f}  {'   '.join(errors)}")


if __name__ == "__main__":
    main()
