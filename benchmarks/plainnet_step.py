"""How long a step of the networks of `unskip reproduce plainnet-table2` takes, and how far it is from float64.

    PYTHONPATH=src python benchmarks/plainnet_step.py --data usps.npz

The figures are in benchmarks/records/2026-11-15_plainnet-table2_h200/prove.txt.
"""

import argparse
import time
from pathlib import Path

import torch

from unskip.data.sets import DataSet, load
from unskip.reproduce.batched_mlp import Crowd, bare_layer, descend_hidden, normed_layer
from unskip.reproduce.plainnet_table2 import RATES, ROWS
from unskip.train import Recipe, load_recipe


def prove(base: Recipe, data: DataSet, device: torch.device) -> None:
    """How long a step takes, and how far the fast step in float32 is from the plain one in float64."""
    for norm in (True, False):
        rows = [row for row in ROWS if row.norm is norm]
        recipes = [row.recipe(base, lr=lr) for row in rows for lr in RATES]
        began = time.perf_counter()
        fast = Crowd(recipes, data, device, torch.float32)
        print(f"{len(recipes)} networks, norm={norm}: {time.perf_counter() - began:.1f} s until recorded")
        slow = Crowd(recipes, data, device, torch.float64, fast=False)
        order = fast.feed.order(0).view(-1, base.batch)
        for step in range(3):
            for crowd in (fast, slow):
                crowd.index.copy_(order[step].expand_as(crowd.index))
                crowd.update() if crowd.graph is None else crowd.graph.replay()
            away = [(p - q).norm() / q.norm() for p, q in zip(fast.params, slow.params, strict=True)]
            losses = (fast.loss - slow.loss).abs().max().item()
            print(f"step {step + 1}: largest relative distance of a parameter {max(away):.1e}, of a loss {losses:.1e}")
        del slow
        if device.type == "cuda":
            for what, step in (("compiled, recorded", fast.graph.replay), ("as it is", fast.update)):  # type: ignore[union-attr]
                if what == "as it is":
                    fast.normed_layer, fast.bare_layer, fast.descend_hidden = normed_layer, bare_layer, descend_hidden
                for count in (3, 20):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    for _ in range(count):
                        step()
                    torch.cuda.synchronize()
                    took = (time.perf_counter() - began) / count
                print(f"{what}: {1000 * took:.2f} ms a step, {1000 * took / len(recipes):.3f} a network")
        began = time.perf_counter()
        fast.error("test")
        print(f"test error of all: {time.perf_counter() - began:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="usps.npz: x_train, y_train, x_test, y_test")
    args = parser.parse_args()
    recipe = load_recipe("usps-plainnet-100", epochs=100)
    prove(recipe, load(recipe, args.data), torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
