"""Compiles the kernels of a queue's networks in parallel processes, so that the engine finds them in Triton's cache.

python warm.py queue.json --processes 14
"""

import argparse
import json
import multiprocessing
import time
from pathlib import Path


def warm(network: dict) -> float:
    import torch
    from engine import TrainConfig, Trainer
    from networks import NetworkConfig

    from bench import RandomData

    start = time.perf_counter()
    config = NetworkConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in network.items()} | {"blocks": 3})
    Trainer("warm", config, TrainConfig(epochs=1), RandomData("cuda", 256))
    torch.cuda.synchronize()
    return time.perf_counter() - start


def kernels_of(network: dict) -> dict:
    """The network with what makes no difference to its kernels as it is anywhere."""
    same = {k: v for k, v in network.items() if k not in ("scale", "blocks", "head_norm", "transition")}
    return {**same, "coder": "random"} if "coder" in network else same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    jobs = json.loads(args.queue.read_text())
    networks = {json.dumps(kernels_of(job["network"]), sort_keys=True) for job in jobs}
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        seconds = pool.map(warm, [json.loads(n) for n in sorted(networks)], chunksize=1)
    print(f"{len(networks)} networks in {time.perf_counter() - start:.0f} s, slowest {max(seconds):.0f} s")


if __name__ == "__main__":
    main()
