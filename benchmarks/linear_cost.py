"""Cost by depth and by batch: PNNH and residual CIFAR networks of 20 to 1,202 layers.

    python benchmarks/linear_cost.py OUT
    python benchmarks/linear_cost.py OUT --device cpu --depth 20 56 110 --batch 4 --batches 2 4 8     # to try it out

Training steps (forward, backward, SGD) of 32 px images, eager, on a GPU each as one CUDA graph. Median of the rounds
and peak memory, a straight line through each of the two, and how far the worst point is from it. Writes OUT/linear.json
and OUT/linear.png.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import unskip
from unskip.bench import Case, Setting
from unskip.bench.runner import Reading, Runner, tuned
from unskip.models.cifar import cifar_resnet

DEPTHS = (20, 56, 110, 218, 434, 866, 1202)
BATCHES = (32, 64, 128, 256, 512, 1024)
READING = Reading(shape=(3, 32, 32), classes=10)


def ready(kind: str, depth: int, setting: Setting) -> tuple[Runner, dict[str, Any]]:
    """A network whose training step can be timed, and what is known of it already."""
    network = cifar_resnet(depth)
    if kind == "pnnh":
        network = unskip.plainify(network, "pnnh")
    runner = Runner(Case(network=kind, mode="train", compiled=False), network, READING, setting)
    row = {"kind": kind, "depth": depth, "batch": setting.images, "mib": runner.peak() / 2**20}
    if setting.where.type == "cuda":
        runner.record_graph()
    return runner, row


def measure(jobs: list[tuple[str, int, Setting]], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds and MiB of each network's training step; rounds take turns, so that noise hits all alike."""
    found = [ready(*job) for job in jobs]
    for i in range(rounds):
        for runner, _ in found if i % 2 == 0 else reversed(found):
            runner.round()
    for runner, row in found:
        row["milliseconds"] = 1e3 * row["batch"] / statistics.median(runner.rounds)
        row["rounds"] = list(runner.rounds)
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items() if k != "rounds"}, flush=True)
        runner.close()
    return [row for _, row in found]


def line(x: list[float], y: list[float]) -> dict[str, float]:
    """The straight line that is closest in relative terms, and its worst relative error."""
    weights = 1 / np.array(y)
    slope, start = np.polyfit(x, y, 1, w=weights)
    worst = max(abs(slope * a + start - b) / b for a, b in zip(x, y, strict=True))
    return {"slope": slope, "start": start, "worst_relative_error": worst}


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    figure = Figure(figsize=(9, 6.4), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, (by, what) in zip(
        figure.subplots(2, 2).flat,
        [("depth", "milliseconds"), ("depth", "mib"), ("batch", "milliseconds"), ("batch", "mib")],
        strict=True,
    ):
        for kind, colour in (("residual", "#D55E00"), ("pnnh", "#009E73")):
            own = [row for row in rows if row["kind"] == kind and row["varies"] == by]
            axes.plot([r[by] for r in own], [r[what] for r in own], "o-", color=colour, label=kind, ms=4)
        axes.set_xlabel("layers" if by == "depth" else "images in a batch")
        axes.set_ylabel("ms a training step" if what == "milliseconds" else "MiB at the peak")
        axes.grid(color="#e5e7eb")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--depth", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--batch", type=int, default=128, help="where the depth varies")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--at-depth", type=int, default=110, help="where the batch varies")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = args.device.startswith("cuda")

    def setting(batch: int) -> Setting:
        precision = "bf16" if gpu else "fp32"
        return Setting(device=args.device, batch=batch, precision=precision, rounds=args.rounds, seconds=0.3)

    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if gpu else "cpu"}
    kinds = ("residual", "pnnh")
    jobs = {
        "depth": [(kind, depth, setting(args.batch)) for depth in args.depth for kind in kinds],
        "batch": [(kind, args.at_depth, setting(batch)) for batch in args.batches for kind in kinds],
    }
    rows: list[dict[str, Any]] = []
    lines: dict[str, Any] = {}
    with tuned(setting(args.batch)):
        for varies, chosen in jobs.items():
            rows += [{"varies": varies, **row} for row in measure(chosen, args.rounds)]
            for kind in kinds:
                own = [row for row in rows if row["kind"] == kind and row["varies"] == varies]
                if len(own) > 2:
                    for what in ("milliseconds", "mib"):
                        key = f"{kind}, {what} by {varies}"
                        lines[key] = line([r[varies] for r in own], [r[what] for r in own])
            (args.out / "linear.json").write_text(json.dumps({**about, "lines": lines, "rows": rows}, indent=1) + "\n")
    draw(rows, args.out / "linear.png", f"{about['device']}, PyTorch {about['torch']}")
    for key, found in lines.items():
        print(f"{key}: {found['slope']:.4g} each, worst point {100 * found['worst_relative_error']:.1f} % off the line")


if __name__ == "__main__":
    main()
