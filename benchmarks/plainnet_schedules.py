"""How the learning rate may fall in Oyedotun et al. 2020, Table II: the proposed row by several schedules.

    python benchmarks/plainnet_schedules.py usps.npz OUT.jsonl                              # 200 s on one H200
    python benchmarks/plainnet_schedules.py usps.npz OUT.jsonl --kinds warmup --final 3     # 500 s, GPU shared
    python benchmarks/plainnet_schedules.py usps.npz OUT.jsonl --device cpu --epochs 2 --depth 4     # to try it out

"shapes": constant rates, cosine and exponential falls to 0.0001, the lower end of the paper's range, after one epoch of
warm-up. "warmup": cosine falls from finer rates, after 5 or 20 epochs of it. Two seeds, nine tenths of the training
images; `--final N` then trains N seeds of the best on validation with all of them.

A line of OUT.jsonl has the errors in percent with BatchNorm's running averages and with statistics of all training
images at once (`Crowd.settle`), that of a last epoch also with weights averaged over the last fifth and then settled.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from unskip.data.sets import load
from unskip.reproduce.batched_mlp import Crowd
from unskip.reproduce.plainnet_table2 import LOWEST, ROWS, Table2
from unskip.train.recipe import Recipe

AVERAGED = 0.2  # share of the epochs, the last ones


class Kind(NamedTuple):
    """A schedule."""

    shape: str
    lr: float  # the highest
    warmup: int = 1  # epochs
    begin: int = 0  # of the fall, in epochs

    def rate(self, epochs: float, total: int) -> float:
        """After so many epochs of the total, without the warm-up."""
        t = max(0.0, epochs - self.begin) / max(1, total - self.begin)
        if self.shape == "cosine":
            return LOWEST + (self.lr - LOWEST) * 0.5 * (1 + math.cos(math.pi * t))
        return self.lr if self.shape == "constant" else self.lr * (LOWEST / self.lr) ** t


KINDS = {
    "shapes": [
        *(Kind("constant", lr) for lr in (0.003, 0.01)),
        *(Kind("cosine", lr) for lr in (0.003, 0.01, 0.03, 0.1)),
        *(Kind("exp", lr) for lr in (0.03, 0.1)),
    ],
    "warmup": [
        Kind("cosine", lr, warmup, begin=warmup)
        for lr, warmup in ((0.007, 5), (0.01, 5), (0.014, 5), (0.014, 20), (0.02, 5), (0.02, 20), (0.03, 20))
    ],
}


class Scheduled(Crowd):
    """Networks of the proposed row with these schedules instead of the recipe's."""

    def __init__(self, jobs: list[tuple[Kind, int]], base: Recipe, data: Path, device: str) -> None:
        row = next(row for row in ROWS if row.name == "BN + LReLU + max-norm")
        self.jobs = jobs
        recipes = [row.recipe(base, lr=kind.lr, seed=seed) for kind, seed in jobs]
        super().__init__(recipes, load(base, data), torch.device(device), torch.float32)

    def rates(self) -> Tensor:
        steps, epochs = self.feed.steps, self.one.epochs
        columns = [
            [kind.rate(i / steps, epochs) * min(1, (i + 1) / (kind.warmup * steps)) for i in range(epochs * steps)]
            for kind, _ in self.jobs
        ]
        return torch.tensor(columns, dtype=self.dtype).T.contiguous().to(self.device)

    def errors(self) -> dict[str, list[float]]:
        return {split: self.error(split) for split in ("train", "val", "test") if split in self.held}

    @torch.no_grad()
    def settled_errors(self) -> dict[str, list[float]]:
        """With settled norms; the running averages are as before then."""
        running = self.mean.clone(), self.var.clone()
        self.settle()
        errors = self.errors()
        self.mean.copy_(running[0])
        self.var.copy_(running[1])
        return errors


def compare(crowd: Scheduled, phase: str, file: IO[str]) -> dict:
    """Trains, writes what is found on the way, and returns what is found at the end."""
    began = time.perf_counter()
    epochs = crowd.one.epochs
    sums, count = [torch.zeros_like(p, requires_grad=False) for p in crowd.params], 0
    found: dict = {}
    for epoch in crowd.train():
        if epoch > int((1 - AVERAGED) * epochs):
            torch._foreach_add_(sums, [p.detach() for p in crowd.params])
            count += 1
        if epoch % max(1, epochs // 12) and epoch != epochs:
            continue
        found = {"phase": phase, "epoch": epoch, "jobs": [(*kind, seed) for kind, seed in crowd.jobs]}
        found |= {"loss": [round(v, 5) for v in crowd.loss.tolist()]}
        found |= {"running": crowd.errors(), "settled": crowd.settled_errors()}
        if epoch == epochs:
            with torch.no_grad():
                for p, total in zip(crowd.params, sums, strict=True):
                    p.copy_(total / count)
            found["averaged"] = crowd.settled_errors()
        file.write(json.dumps(found) + "\n")
        file.flush()
        print(f"{phase}: epoch {epoch}, {time.perf_counter() - began:.0f} s", flush=True)
    for i, (kind, seed) in enumerate(crowd.jobs):
        errors = [
            f"{how} " + " ".join(f"{each[i]:6.2f} {split}" for split, each in found[how].items())
            for how in ("running", "settled", "averaged")
        ]
        name = f"{phase} {kind.shape:9} {kind.lr:<6} warm-up {kind.warmup:2} seed {seed}"
        print(f"{name}  loss {found['loss'][i]:.4f}  {'   '.join(errors)}", flush=True)
    return found


def best(jobs: list[tuple[Kind, int]], found: dict) -> Kind:
    """By the mean validation error over seeds, settled or averaged, whichever is lower."""

    def score(kind: Kind) -> float:
        each = [
            sum(v for v, (other, _) in zip(found[how]["val"], jobs, strict=True) if other == kind)
            for how in ("settled", "averaged")
        ]
        return min((v for v in each if not math.isnan(v)), default=math.inf)

    return min((kind for kind, _ in jobs), key=score)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", choices=KINDS, default="shapes")
    parser.add_argument("--final", type=int, default=0, metavar="N", help="seeds of the best, on all training images")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    base = Table2(data=args.data, depth=args.depth).recipe().replace(epochs=args.epochs)
    jobs = [(kind, seed) for seed in (0, 1) for kind in KINDS[args.kinds]]
    with open(args.out, "w") as file:
        found = compare(Scheduled(jobs, base.replace(val_fraction=0.1), args.data, args.device), "choose", file)
        if args.final:
            winner = best(jobs, found)
            print(f"best on validation: {winner}", flush=True)
            final = [(winner, seed) for seed in range(args.final)]
            compare(Scheduled(final, base.replace(val_fraction=0.0), args.data, args.device), "final", file)


if __name__ == "__main__":
    main()
