"""What measuring costs: time and peak memory of all default measures beside one training step, in separate processes.

    python benchmarks/doctor_cost.py OUT [--network plain_resnet110] [--batch 64] [--threads 2] [--repeats 3]

Peak memory is the resident set (RSS) that the kernel reports for a process that does nothing else: one that builds the
network and the batch and stops there (`idle`), one that also trains one step (`step`: forward, loss, backward, SGD
with momentum), one that also measures (`measure`). The first call in a process pays for PyTorch's own loading; it is
included. On a busy machine the clock says little: then give --threads 1 and read the processor time, which is what the
clock would show on one free core.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import unskip
from unskip.measures import measure


def work(what: str, network: str, batch: int, threads: int) -> dict[str, float]:
    """One process's share: seconds by the clock and of processor time, and peak MiB."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    net = unskip.create_model(network)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    started, busy = time.perf_counter(), time.process_time()
    if what == "step":
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        F.cross_entropy(net.train()(images), labels).backward()
        optimiser.step()
    elif what == "measure":
        measure(net, images, labels)
    seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    return {"seconds": seconds, "cpu_seconds": cpu, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--network", default="plain_resnet110")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        print(json.dumps(work(arguments.work, arguments.network, arguments.batch, arguments.threads)))
        return
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.repeats):
        for what in ("idle", "step", "measure"):
            command = [sys.executable, __file__, str(arguments.out), "--work", what, "--network", arguments.network]
            command += ["--batch", str(arguments.batch), "--threads", str(arguments.threads)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs.setdefault(what, []).append(json.loads(output.splitlines()[-1]))
            print(what, runs[what][-1], flush=True)
    middle = {
        what: {key: statistics.median(run[key] for run in found) for key in found[0]} for what, found in runs.items()
    }
    result = {
        "network": arguments.network,
        "batch": arguments.batch,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "runs": runs,
        "median": middle,
        "memory_ratio": middle["measure"]["mib"] / middle["step"]["mib"],
        "memory_ratio_beyond_idle": (middle["measure"]["mib"] - middle["idle"]["mib"])
        / (middle["step"]["mib"] - middle["idle"]["mib"]),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{arguments.network}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("median", "memory_ratio", "memory_ratio_beyond_idle")}, indent=1))


if __name__ == "__main__":
    main()
