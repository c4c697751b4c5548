"""How long a whole training step of the 110-layer CIFAR networks takes in the library, side by side in one run.

    PYTHONPATH=src python benchmarks/cifar_step.py OUT                # one GPU, minutes; OUT/cifar_step.json
    PYTHONPATH=src python benchmarks/cifar_step.py OUT --device cpu --network pnnh_resnet20 --batch 8   # to try it out

A step is what `unskip train cifar10-pnnh-110 --cuda-graph --compile blocks` does with a batch: forward, loss, backward,
update, as one CUDA graph; bfloat16 autocast, batch 128, 32 px, random images. Rounds take turns. Before that the
kernels are compared with the plain definition on the same device.

ResNet-110's blocks are compiled by torch.compile, the best that the library has for them. A hand-written version of
ResNet-110's blocks, outside the library (benchmarks/cifar_gap/bench.py), took 5.19 ms on an H200, beside 4.08 ms for
PNNH-110 in the same manner.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from loop_overhead import images
from torch import Tensor, nn

import unskip
from unskip.methods import fused
from unskip.methods.pnnh import PNNHBlock
from unskip.models.cifar import CifarBlock
from unskip.train import load_recipe, machine
from unskip.train.checkpoint import RunFolder
from unskip.train.runner import build_network
from unskip.train.trainer import Training

DEVICE = "cuda"
NETWORKS = ("pnnh_resnet110", "pnnh_resnet110_wide", "resnet110")
CENTRED = {"pretext": "identity", "transient": "centre"}
SHAPES = [  # channels, hidden width and px of the three stages of either network
    (16, 8, 32, {}), (32, 16, 16, {}), (64, 32, 8, {}),
    (48, 8, 32, CENTRED), (96, 12, 16, CENTRED), (192, 19, 8, CENTRED),
]  # fmt: skip
BEGAN = time.perf_counter()


def say(*words: Any) -> None:
    print(f"[{time.perf_counter() - BEGAN:5.1f} s]", *words, flush=True)


# ---------------------------------------------------------------- the library's step


@contextmanager
def training(name: str, batch: int, gpu: bool) -> Iterator[Training]:
    """A run of the recipe as `unskip train` makes it, before its first step."""
    recipe = load_recipe(
        "cifar10-pnnh-110", network=name, batch=batch, cuda_graph=gpu, compile="blocks" if gpu else "no",
        precision="bf16" if gpu else "fp32", device="auto" if gpu else "cpu",
    )  # fmt: skip
    data = images(2 * batch)
    with machine.settled(recipe), tempfile.TemporaryDirectory() as folder:
        accelerator = machine.make_accelerator(recipe)
        network = build_network(recipe, data)
        made = Training(accelerator, recipe, network, data, RunFolder(Path(folder) / "run"), silent=True)
        made.network.train()
        made.rates.apply(made.optimizer, 0)
        yield made


def milliseconds(call: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / count


def profile(call: Callable[[], object]) -> dict[str, Any]:
    """Kernels of one step: how many, and which take most of the time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    call()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        times[event.name] += event.time_range.elapsed_us()
        counts[event.name] += 1
    top = [{"kernel": name[:90], "count": counts[name], "us": times[name]} for name in sorted(times, key=times.get)]
    span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
    return {"kernels": len(events), "busy_us": sum(times.values()), "span_us": span, "top": top[::-1][:40]}


# ---------------------------------------------------------------- is it right?


def make_block(channels: int, hidden: int, options: dict[str, Any], device: str) -> PNNHBlock:
    torch.manual_seed(0)
    network = unskip.plainify(
        nn.Sequential(CifarBlock(channels, channels, 1, "A")), hidden={channels: hidden}, **options
    )
    block = network[0]
    nn.init.uniform_(block.learner.norm1.weight, 0.5, 1.5)
    nn.init.normal_(block.learner.norm1.bias, 0, 0.3)
    return block.train().to(device, memory_format=torch.channels_last)


def batch_of(channels: int, side: int, batch: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(batch, channels, side, side, device=DEVICE).relu()
    return x.to(dtype, memory_format=torch.channels_last)


def through(blocks: list[PNNHBlock], x: Tensor, g: Tensor, run: Callable[..., Tensor]) -> dict[str, Tensor]:
    source = x.detach().clone().requires_grad_()
    y = source.relu()
    for block in blocks:
        y = run(block, y)
    y.backward(g)
    found = {"y": y.detach(), "x": source.grad}
    for i, block in enumerate(blocks):
        found |= {f"{i}.{n}": p.grad for n, p in block.named_parameters()}
        found |= {f"{i}.{n}": b.clone() for n, b in block.named_buffers() if "norm" in n}
    return {name: value.double() for name, value in found.items()}


def kernels_only(block: PNNHBlock, x: Tensor) -> Tensor:
    layers = fused.layers_of(block)
    assert layers is not None
    return fused.run(layers, x)


def plain(block: PNNHBlock, x: Tensor) -> Tensor:
    with mock.patch.object(fused, "suited", return_value=None):
        return block(x)


def distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {n: ((found[n] - v).norm() / v.norm().clamp(min=1e-9)).item() for n, v in exact.items()}


def check_blocks(channels: int, hidden: int, side: int, options: dict[str, Any], batch: int) -> dict[str, Any]:
    """Two blocks in a row: the largest relative distance over outputs, gradients and statistics, to float64.

    In float32 that is a matter of how many of some million ReLUs decide otherwise than in float64: none or a few, of
    which each moves the gradient of x by 1e-4 to 1e-3.
    """
    blocks = [make_block(channels, hidden, options, DEVICE) for _ in range(2)]
    x, g = (batch_of(channels, side, batch, torch.bfloat16) for _ in range(2))
    exact = through([b.double() for b in copy.deepcopy(blocks)], x.double(), g.double(), plain)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        single, plain_single = (
            distances(through(copy.deepcopy(blocks), x.float(), g.float(), run), exact) for run in (kernels_only, plain)
        )
    with torch.autocast(DEVICE, torch.bfloat16):
        chosen = all(fused.supports(block, x) is not None for block in blocks)
        ours = distances(through(copy.deepcopy(blocks), x, g, lambda block, x: block(x)), exact)
        theirs = distances(through(copy.deepcopy(blocks), x, g, plain), exact)
    worst = max(ours, key=lambda n: ours[n] / max(theirs[n], 1e-3))
    return {
        "chosen": chosen, "fp32": max(single.values()), "plain fp32": max(plain_single.values()),
        "bf16": max(ours.values()), "plain bf16": max(theirs.values()),
        "worst against plain": f"{worst}: {ours[worst]:.1e} and {theirs[worst]:.1e}",
    }  # fmt: skip


def check_network(name: str, batch: int) -> dict[str, Any]:
    """Loss and gradient of a whole network, by kernels and by the definition, in bfloat16."""
    torch.manual_seed(0)
    network = unskip.create_model(name).cuda().train().to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=DEVICE)
    found = []
    for way in ("kernels", "definition", "float32"):
        own = copy.deepcopy(network)
        patch = mock.patch.object(fused, "suited", fused.supports if way == "kernels" else lambda block, x: None)
        with patch, torch.autocast("cuda", torch.bfloat16, enabled=way != "float32"):
            loss = nn.functional.cross_entropy(own(x), y)
        loss.backward()
        buffers = torch.cat([b.double().flatten() for n, b in own.named_buffers() if "running" in n])
        found.append((loss.item(), torch.cat([p.grad.double().flatten() for p in own.parameters()]), buffers))
    exact = found[2]
    result: dict[str, Any] = {"loss": [loss for loss, _, _ in found]}
    for i, what in ((1, "gradient"), (2, "statistics")):
        away = [((f[i] - exact[i]).norm() / exact[i].norm()).item() for f in found[:2]]
        result[f"{what}: kernels, definition"] = away
    return result


# ---------------------------------------------------------------- the run


def rounds(steps: dict[str, Callable[[], object]], count: int, each: int) -> dict[str, Any]:
    """Milliseconds of a step, in turns: `count` rounds of `each` steps."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for call in steps.values():
        milliseconds(call, 10)
    for _ in range(count):
        for name, call in steps.items():
            times[name].append(milliseconds(call, each))
    return {
        name: {"median": statistics.median(t), "least": min(t), "most": max(t), "rounds": t}
        for name, t in times.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--network", action="append", help=f"instead of {', '.join(NETWORKS)}")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60, help="in a round")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    names = args.network or NETWORKS
    args.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"torch": torch.__version__, "batch": args.batch, "steps": args.steps}

    def keep(what: str, value: Any, show: bool = True) -> None:
        record[what] = value
        (args.out / "cifar_step.json").write_text(json.dumps(record, indent=1) + "\n")
        if show:
            say(what, value)

    if args.device == "cpu":
        for name in names:
            with training(name, args.batch, False) as made:
                x, y = next(made.feed.epoch(0))
                began = time.perf_counter()
                made.step(x, y)
                keep(name, {"ms": 1e3 * (time.perf_counter() - began)})
        return

    keep("device", torch.cuda.get_device_name())
    for channels, hidden, side, options in SHAPES:
        keep(f"check {channels}/{hidden}", check_blocks(channels, hidden, side, options, args.batch))
    with ExitStack() as stack:
        steps: dict[str, Callable[[], object]] = {}
        for name in names:
            if name.startswith("pnnh"):
                keep(f"check {name}", check_network(name, args.batch))
            run = stack.enter_context(training(name, args.batch, True))
            steps[name] = partial(run.step, *next(run.feed.epoch(0)))
            steps[name]()
            say(name, "recorded")
        keep("ms a step", rounds(steps, args.rounds, args.steps), show=False)
        for name, row in record["ms a step"].items():
            say(f"{name:40s} {row['median']:6.3f} ms ({row['least']:.3f} to {row['most']:.3f})")
        for name, call in steps.items():
            found = profile(call)
            keep(f"profile {name}", found, show=False)
            say(name, f"{found['kernels']} kernels, busy {found['busy_us']:.0f} us of {found['span_us']:.0f}")
            for row in found["top"][:16]:
                say(f"   {row['us']:8.1f} us {row['count']:5d} x {row['kernel']}")


if __name__ == "__main__":
    main()
