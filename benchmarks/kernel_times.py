"""The kernels of one compiled training step, longest first: where the time of a network goes on a GPU.

python benchmarks/kernel_times.py OUT resnet34 pnnh_resnet34      # 256 images of 224 px, bf16; OUT/NAME.txt
"""

import argparse
from collections import Counter
from pathlib import Path

import torch

from unskip.bench import Case, Setting
from unskip.bench.networks import load
from unskip.bench.runner import Reading, Runner, tuned

STEPS = 2


def kind(kernel: str) -> str:
    """Inductor's reductions and pointwise kernels, convolutions and matrix products, and the rest."""
    if kernel.startswith("triton"):
        return "reductions" if "_red_" in kernel or "_per_" in kernel else "pointwise"
    matrix = ("conv", "xmma", "cutlass", "nvjet", "gemm", "grad2d", "nhwc")
    return "convolutions" if any(word in kernel for word in matrix) else "other"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("network", nargs="+")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(device="cuda", batch=256, size=224, precision="bf16", eager=False, infer=False)
    for word in args.network:
        with tuned(setting):
            case = Case(network=word, mode="train", compiled=True)
            runner = Runner(case, load(word).network, Reading(shape=(3, 224, 224), classes=1000), setting)
            runner.run(3)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                runner.run(STEPS)
            runner.close()
        times, counts, kinds = Counter[str](), Counter[str](), Counter[str]()
        for event in profile.key_averages():
            milliseconds = event.self_device_time_total / 1000 / STEPS
            times[event.key] += milliseconds
            counts[event.key] += event.count
            kinds[kind(event.key)] += milliseconds
        total = f"{word} {sum(times.values()):.2f} ms: " + ", ".join(f"{k} {t:.2f}" for k, t in kinds.most_common())
        lines = [f"{t:8.3f} ms {counts[name] / STEPS:6.1f}x {name[:180]}" for name, t in times.most_common(70)]
        (args.out / f"{word.replace(':', '_')}.txt").write_text("\n".join([total, *lines]) + "\n")
        print(total, flush=True)


if __name__ == "__main__":
    main()
