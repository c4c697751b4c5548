"""The fates: trains every network of the validation by the one recipe of README.md.

    python benchmarks/verdict/train.py OUT/fates.json [--only tune|score|second] [--match TEXT] [--reserve]

Goes on where it stopped. Nothing is measured here.
"""

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from networks import RESERVE, SCORE, SECOND, TUNE, Candidate
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.data.sets import Split, load
from unskip.train.recipe import Recipe

RATES = (0.05, 0.01, 0.002)
EPOCHS, WARMUP, BATCH = 10, 2, 64
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
ENOUGH, LIMIT, CHANCE = 10.0, 20.0, 90.0  # percent held-out error: no further rate; trains below; not finite
BORDER = (10.0, 35.0)  # a second seed


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and held-out digits, (N, 1, 8, 8), standardised by the training images."""
    data = load(Recipe(network="resnet20", dataset="digits", val_fraction=0))
    mean, std = data.mean[0], data.std[0]

    def tensors(split: Split) -> tuple[Tensor, Tensor]:
        assert isinstance(split.images, Tensor)
        return (split.images.permute(0, 3, 1, 2).float() / 255 - mean) / std, split.labels

    return tensors(data.train), tensors(data.test)


def train(candidate: Candidate, rate: float, seed: int) -> dict[str, Any]:
    """One run; the error on the held-out digits in percent."""
    (x, y), (x_test, y_test) = digits()
    torch.manual_seed(seed)
    network = candidate.build().train()
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    steps = len(x) // BATCH
    total, warm = EPOCHS * steps, WARMUP * steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: (i + 1) / warm if i < warm else 0.5 * (1 + math.cos(math.pi * (i - warm) / (total - warm))),
    )
    start, loss = time.perf_counter(), torch.zeros(())
    for _ in range(EPOCHS):
        order = torch.randperm(len(x))
        for i in range(steps):
            index = order[i * BATCH : (i + 1) * BATCH]
            loss = F.cross_entropy(network(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if not math.isfinite(loss.item()):
                return {"rate": rate, "seed": seed, "error": CHANCE, "loss": None, "s": time.perf_counter() - start}
    error = held_out_error(network, x_test, y_test)
    seconds = round(time.perf_counter() - start, 1)
    return {"rate": rate, "seed": seed, "error": round(error, 2), "loss": round(loss.item(), 4), "s": seconds}


@torch.no_grad()
def held_out_error(network: nn.Module, x: Tensor, y: Tensor) -> float:
    network.eval()
    return 100 * (network(x).argmax(1) != y).float().mean().item()


def fate(candidate: Candidate) -> dict[str, Any]:
    """All runs of a network by the rules of README.md, its error and what follows."""
    runs: list[dict[str, Any]] = []

    def best(seed: int) -> float:
        lowest = math.inf
        for rate in RATES:
            runs.append(train(candidate, rate, seed))
            lowest = min(lowest, runs[-1]["error"])
            if lowest < ENOUGH:
                break
        return lowest

    errors = [best(0)]
    if BORDER[0] <= errors[0] <= BORDER[1]:
        errors.append(best(1))
    error = round(sum(errors) / len(errors), 2)
    answer = "trains" if error < LIMIT else "fails"
    return {"fate": answer, "guess": candidate.guess, "error": error, "errors": errors, "runs": runs}


def candidates(only: str | None, reserve: bool) -> dict[str, dict[str, Candidate]]:
    """The lists, with the reserve in SeqNet's place where that method does not exist."""
    score = {name: candidate for name, candidate in SCORE.items() if not (reserve and name == "seqnet44")}
    lists = {"tune": TUNE, "score": score | RESERVE if reserve else score, "second": SECOND}
    return lists if only is None else {only: lists[only]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=["tune", "score", "second"])
    parser.add_argument("--match", default="", help="only networks with this in their name, for several processes")
    parser.add_argument("--reserve", action="store_true", help="residual_half32 in place of seqnet44")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    results["about"] = {"torch": torch.__version__, "python": platform.python_version(), "threads": 1}
    for name, group in candidates(arguments.only, arguments.reserve).items():
        done = results.setdefault(name, {})
        for candidate in group.values():
            if candidate.name in done or arguments.match not in candidate.name:
                continue
            done[candidate.name] = fate(candidate)
            part = arguments.out.with_suffix(".part")
            part.write_text(json.dumps(results, indent=1))
            os.replace(part, arguments.out)
            row = done[candidate.name]
            print(f"{name:6}{candidate.name:32}{row['guess']:8}{row['fate']:8}{row['errors']}", flush=True)


if __name__ == "__main__":
    main()
