"""Shipping networks that were really trained: what rm, fold, ONNX and INT8 keep, and what each form costs.

    python benchmarks/ship.py make OUT --data usps.npz --runs RUNS     # trains where RUNS has no run; a few minutes
    python benchmarks/ship.py time OUT --runs RUNS                     # single-thread latency by the thread's own clock

A ResNet-20 and a PNNH-20 are trained on USPS (16 x 16, the standard split). `make` writes each form as ONNX into
RUNS/onnx, runs it on all 2,007 test images and counts the predictions that differ from those of the trained network in
PyTorch; calibration is on 512 training images. `time` runs all files in turns, one thread each, on one test image.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS, EACH = 100, 20  # rounds in which every file has its turn, and runs in a turn
RECIPE = {"dataset": "npz", "epochs": 20, "batch": 128, "lr": 0.1, "crop": "pad", "pad": 2}
CALIBRATION = 512  # training images


def make(out: Path, data_file: Path, runs: Path) -> None:
    """Trains, writes every form, and compares predictions."""
    import onnxruntime
    import timm
    import torch
    from torch import Tensor, nn
    from torch.utils.flop_counter import FlopCounterMode

    import unskip
    from unskip.data.feed import make_feed
    from unskip.data.sets import Split, load
    from unskip.io.load import load_network
    from unskip.ship import Exported, Quantized, convert, export, fold, quantize
    from unskip.ship.export import onnx_runner
    from unskip.train import load_recipe, run

    recipe = load_recipe("digits-pnnh-56", **RECIPE)
    data = load(recipe, data_file)
    feed = make_feed(data, recipe.replace(channels_last=False), device=torch.device("cpu"))

    def images(split: Split) -> tuple[Tensor, Tensor]:
        batches = [(x[w > 0], y[w > 0]) for x, y, w in feed.evaluation(split)]
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def answers(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([forward(part).argmax(1) for part in x.split(256)])

    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:CALIBRATION]
    calibration, _ = images(data.train.take(order))
    x, labels = images(data.test)
    folder = runs / "onnx"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "image.npy", x[:1].numpy())

    def simulated(file: Path) -> Callable[[Tensor], Tensor]:
        """A file in 8 bits as its QuantizeLinear and DequantizeLinear say it, in float32, without 8-bit kernels."""
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return lambda part: torch.from_numpy(session.run(None, {"input": part.numpy()})[0])

    def row(name: str, network: nn.Module, wanted: Tensor, bits: int | None = None) -> dict[str, Any]:
        """Writes one form, and says what it costs and keeps."""
        file = folder / f"{name}.onnx"
        written: Exported | Quantized
        if bits is None:
            written = export(network, file, example=x[:8], force=True)
        else:
            written = quantize(network, file, calibrate=calibration, test=(x, labels), bits=bits, limit=100, force=True)
        with FlopCounterMode(display=False) as flops, torch.no_grad():
            network(x[:1])
        found = answers(onnx_runner(file.read_bytes()), x)
        result = {
            "form": name,
            "parameters": sum(p.numel() for p in network.parameters()),
            "macs": flops.get_total_flops() // 2,
            "bytes": file.stat().st_size,
            "test_error": 100 * (found != labels).double().mean().item(),
            "changed": int((found != wanted).sum()),
            "changed_by_rounding": None if bits is None else int((answers(simulated(file), x) != wanted).sum()),
            "changed_in_pytorch": None if bits else int((answers(network, x) != wanted).sum()),
            "relative_error": written.error if isinstance(written, Exported) else None,
            "output_noise_db": [layer.output for layer in written.layers] if isinstance(written, Quantized) else None,
        }
        print(json.dumps({k: v for k, v in result.items() if k != "output_noise_db"}))
        return result

    rows, trained = [], {}
    for name in ("resnet20", "pnnh_resnet20"):
        done = run(recipe.replace(network=name), data=data, out=runs / name, resume="auto", silent=True)
        trained[name] = {"test_error": done.test_error, "seconds": done.seconds, "seed": recipe.seed}
        network = load_network(str(runs / name), tested=True).network.eval()
        wanted = answers(network, x)
        forms = {"original": network}
        if name == "resnet20":
            forms["rm"] = convert(network, "rm", example=x[:8])
            forms["rm folded"] = fold(forms["rm"], example=x[:8])
        else:
            forms["folded"] = fold(network, example=x[:8])
            forms["folded fast"] = fold(network, "fast", example=x[:8])
        for form, made in forms.items():
            rows.append(row(f"{name} {form}".replace(" ", "-"), made, wanted))
        for form in ("original",) if name == "resnet20" else ():
            rows += [row(f"{name}-{form}-int8-{bits}bit", forms[form], wanted, bits) for bits in (7, 8)]
        last = "rm folded" if name == "resnet20" else "folded"
        rows += [row(f"{name} {last} int8-{bits}bit".replace(" ", "-"), forms[last], wanted, bits) for bits in (7, 8)]
    about = {
        "recipe": RECIPE, "trained": trained, "test_images": len(labels), "calibration_images": CALIBRATION,
        "versions": {m.__name__: m.__version__ for m in (unskip, torch, timm, onnxruntime)},
        "python": platform.python_version(), "cpu": cpu(), "vnni": has_vnni(),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "forms.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def clock(out: Path, runs: Path) -> None:
    """Single-thread latency of every file that `make` wrote."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    feed = {"input": np.load(runs / "onnx" / "image.npy")}
    sessions = {
        file.stem: onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        for file in sorted((runs / "onnx").glob("*.onnx"))
    }
    for session in sessions.values():
        for _ in range(EACH):
            session.run(None, feed)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    walls: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(ROUNDS):
        for name, session in sessions.items():
            # One thread runs it all, so its own clock leaves out what other processes take.
            began, own = time.perf_counter(), time.thread_time()
            for _ in range(EACH):
                session.run(None, feed)
            times[name].append(1e6 * (time.thread_time() - own) / EACH)
            walls[name].append(1e6 * (time.perf_counter() - began) / EACH)
    rows = {}
    for name, rounds in times.items():
        tenths = statistics.quantiles(rounds, n=10)
        rows[name] = {
            "median_us": statistics.median(rounds),
            "p10_us": tenths[0],
            "p90_us": tenths[-1],
            "wall_median_us": statistics.median(walls[name]),
        }
        print(f"{name:<44}{rows[name]['median_us']:>9.0f} us  ({tenths[0]:.0f} to {tenths[-1]:.0f})")
    about = {
        "cpu": cpu(), "vnni": has_vnni(), "onnxruntime": onnxruntime.__version__, "threads": 1, "batch": 1,
        "rounds": ROUNDS, "runs_in_a_round": EACH, "python": platform.python_version(),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "latency.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def cpu_line(key: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def cpu() -> str:
    return cpu_line("model name") or platform.processor()


def has_vnni() -> bool:
    return "vnni" in cpu_line("flags")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "time"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "time":
        clock(arguments.out, arguments.runs)
    elif arguments.data is None:
        parser.error("make needs --data, the .npz file of USPS")
    else:
        make(arguments.out, arguments.data, arguments.runs)


if __name__ == "__main__":
    main()
