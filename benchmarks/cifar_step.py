"""How long a whole training step of the 110-layer CIFAR networks takes in the library, side by side in one run.

    PYTHONPATH=src python benchmarks/cifar_step.py OUT                # one GPU, about a minute; OUT/cifar_step.json
    PYTHONPATH=src python benchmarks/cifar_step.py OUT --variants     # and how the kernels' work is best cut, 3 minutes
    PYTHONPATH=src python benchmarks/cifar_step.py OUT --device cpu --network pnnh_resnet20 --batch 8   # to try it out

A step is what `unskip train cifar10-pnnh-110 --cuda-graph --compile blocks` does with a batch: forward, loss, backward,
update, as one CUDA graph; bfloat16 autocast, batch 128, 32 px, random images. Rounds take turns. Before that the
kernels are compared with the plain definition on the same device.

ResNet-110's blocks are compiled by torch.compile, the best that the library has for them. A hand-written version of
ResNet-110's blocks, outside the library (benchmarks/cifar_gap/bench.py), took 5.19 ms on an H200, beside 4.06 ms for
PNNH-110 in the same manner.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import unskip
from unskip.methods import fused
from unskip.methods.pnnh import PNNHBlock
from unskip.models.cifar import CifarBlock
from unskip.train import DataSet, Split, load_recipe, machine
from unskip.train.checkpoint import RunFolder
from unskip.train.loop import Training
from unskip.train.runner import build_network

DEVICE = "cuda"
NETWORKS = ("pnnh_resnet110", "pnnh_resnet110_wide", "resnet110")
CENTRED = {"pretext": "identity", "transient": "centre"}
# channels, hidden width, px of the three stages
PAIRS = [(16, 8, 32, {}), (32, 16, 16, {}), (64, 32, 8, {})]
WIDE = [(48, 8, 32, CENTRED), (96, 12, 16, CENTRED), (192, 19, 8, CENTRED)]
BEGAN = time.perf_counter()


def say(*words: Any) -> None:
    print(f"[{time.perf_counter() - BEGAN:5.1f} s]", *words, flush=True)


# ---------------------------------------------------------------- the library's step


def images(count: int) -> DataSet:
    """Random uint8 images of CIFAR's shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (count,), generator=generator)
    sizes = {"classes": 10, "channels": 3, "image_size": 32}
    grey = {"mean": (0.5, 0.5, 0.5), "std": (0.3, 0.3, 0.3)}
    return DataSet(name="random", train=Split(x, y), val=None, test=Split(x[:128], y[:128]), **sizes, **grey)


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


def warm(name: str, batch: int) -> None:
    """Compiles all that a network needs into the caches on disk."""
    with training(name, batch, True) as made:
        for x, y in made.feed.epoch(0):
            super(type(made.step), made.step).__call__(x, y)  # type: ignore[misc]  # not recorded
        torch.cuda.synchronize()


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


def check_blocks(channels: int, hidden: int, side: int, options: dict[str, Any], batch: int) -> dict[str, Any]:
    """Two blocks in a row: the largest relative distance over outputs, gradients and statistics, to float64."""

    def plain(block: PNNHBlock, x: Tensor) -> Tensor:
        with mock.patch.object(fused, "suited", return_value=None):
            return block(x)

    def distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
        return {n: ((found[n] - v).norm() / v.norm().clamp(min=1e-9)).item() for n, v in exact.items()}

    blocks = [make_block(channels, hidden, options, DEVICE) for _ in range(2)]
    x, g = (batch_of(channels, side, batch, torch.bfloat16) for _ in range(2))
    exact = through([b.double() for b in copy.deepcopy(blocks)], x.double(), g.double(), plain)
    single = distances(through(copy.deepcopy(blocks), x.float(), g.float(), kernels_only), exact)
    with torch.autocast("cuda", torch.bfloat16):
        mine = copy.deepcopy(blocks)
        chosen = all(fused.suited(block, x) is not None for block in mine)
        ours = distances(through(mine, x, g, lambda block, x: block(x)), exact)
        theirs = distances(through(copy.deepcopy(blocks), x, g, plain), exact)
    worst = max(ours, key=lambda n: ours[n] / max(theirs[n], 1e-3))
    return {
        "chosen": chosen, "fp32": max(single.values()), "bf16": max(ours.values()), "plain bf16": max(theirs.values()),
        "worst against plain": f"{worst}: {ours[worst]:.1e} and {theirs[worst]:.1e}",
    }  # fmt: skip


def check_to_file(shape: tuple[Any, ...], batch: int, file: Path) -> None:
    try:
        found: Any = check_blocks(*shape, batch)
    except Exception as error:
        found = f"failed: {type(error).__name__}: {error}"[:3000]
    file.write_text(json.dumps(found))


def check_network(name: str, batch: int) -> dict[str, Any]:
    """Loss and gradient of a whole network, by kernels and by the definition, in bfloat16."""
    torch.manual_seed(0)
    network = unskip.create_model(name).cuda().train().to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=DEVICE)
    found = []
    for way in ("kernels", "definition", "float32"):
        own = copy.deepcopy(network)
        patch = mock.patch.object(fused, "suited", fused.suited if way == "kernels" else lambda block, x: None)
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


# ---------------------------------------------------------------- how the work is cut


class Recorder:
    """In the place of a kernel: notes how it would be launched."""

    def __init__(self) -> None:
        self.launch: tuple[Any, ...] = ()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            self.launch = (grid, args, options)

        return call


KERNELS = ("read", "write", "unwrite", "unread")


def launcher(shape: tuple[Any, ...], kernel: str, cut: Any, batch: int) -> Callable[[], object]:
    """A call that launches one kernel of a block as it is cut here."""
    from unskip.methods import kernels

    channels, hidden, side, options = shape
    recorders = {f"{name}_kernel": Recorder() for name in KERNELS}
    block = make_block(channels, hidden, options, DEVICE)
    layers = fused.layers_of(block)
    assert layers is not None
    x = batch_of(channels, side, batch, torch.bfloat16).requires_grad_()
    with mock.patch.multiple(kernels, **recorders), mock.patch.dict(kernels.TILINGS, {(kernel, channels): cut}):
        with mock.patch.object(fused, "rectified", return_value=True):
            y = fused.run(layers, x)
        y.backward(torch.randn_like(y))
    grid, args, settings = recorders[f"{kernel}_kernel"].launch
    for t in args:
        if isinstance(t, Tensor) and t.dtype == torch.bfloat16:
            with torch.no_grad():
                t.normal_()
    real = getattr(kernels, f"{kernel}_kernel")
    return lambda: real[grid](*args, **settings)


def microseconds(call: Callable[[], object], count: int = 25, replays: int = 8) -> float:
    """Of one launch among many, in a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    return min(milliseconds(graph.replay, replays) for _ in range(3)) * 1e3 / count


def cuts(shape: tuple[Any, ...], kernel: str, batch: int) -> list[Any]:
    """Ways to cut a kernel's work: the default first, then other convolutions, then other weight gradients."""
    from unskip.methods.kernels import Tiling, tiling

    channels, _, side, _ = shape
    base = tiling(kernel, channels, batch * side * side)
    # block, warps, stages, together
    many = {
        32: [(128, 4, 1, 16), (64, 4, 1, 16), (256, 4, 1, 16), (256, 8, 1, 16), (64, 2, 1, 16), (32, 1, 1, 16),
             (128, 4, 1, 0), (128, 4, 3, 0), (64, 2, 3, 0), (64, 2, 1, 32), (128, 4, 1, 32)],
        16: [(128, 4, 1, 16), (64, 4, 1, 16), (64, 2, 1, 16), (128, 8, 1, 16), (64, 4, 1, 32), (32, 2, 1, 32),
             (64, 4, 3, 0), (64, 4, 4, 0), (32, 2, 3, 0), (32, 2, 1, 16), (128, 4, 3, 0)],
        8: [(64, 4, 1, 16), (64, 4, 3, 0), (64, 4, 4, 0), (32, 4, 3, 0), (32, 2, 3, 0), (32, 2, 1, 32), (32, 4, 1, 64),
            (64, 4, 1, 64), (16, 2, 3, 0), (16, 1, 3, 0), (32, 4, 1, 32), (64, 8, 3, 0)],
    }  # fmt: skip
    few = [(64, 4, 1, 16), (64, 8, 1, 16), (128, 8, 1, 16), (32, 4, 1, 16), (64, 4, 3, 0)]
    found = [base]
    for block, warps, stages, together in few if channels in (48, 96, 192) else many[side]:
        found.append(replace(base, block=block, warps=warps, stages=stages, together=together))
    if kernel.startswith("un") and channels not in (48, 96, 192):
        turns = {32: [(128, 4), (128, 16), (64, 8), (64, 16), (256, 4)], 16: [(128, 2), (128, 4), (64, 4), (64, 8)]}
        turns[8] = [(128, 1), (128, 4), (64, 1), (64, 2), (64, 4)]
        for chunk, count in turns[side]:
            found.append(replace(base, chunk=chunk, turns=count))
    assert all(isinstance(cut, Tiling) for cut in found)
    return list(dict.fromkeys(found))


def all_cuts(batch: int) -> list[tuple[Any, ...]]:
    return [(shape, k, cut) for shape in PAIRS + WIDE for k in KERNELS for cut in cuts(shape, k, batch)]


def compile_some(jobs: list[tuple[Any, ...]], batch: int) -> None:
    for shape, kernel, cut in jobs:
        try:
            launcher(shape, kernel, cut, batch)()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"does not compile: {shape[:3]} {kernel} {cut}: {type(error).__name__}", flush=True)
            if "CUDA error" in str(error):
                return


def sweep(jobs: list[tuple[Any, ...]], batch: int) -> tuple[list[dict[str, Any]], dict[tuple[str, int], Any]]:
    """Each way timed; for each kernel and stage the best convolution beside the best weight gradient."""
    rows: list[dict[str, Any]] = []
    best: dict[tuple[str, int], tuple[float, Any]] = {}
    bases: dict[tuple[str, int], Any] = {}
    for shape, kernel, cut in jobs:
        key = (kernel, shape[0])
        bases.setdefault(key, cut)
        try:
            us = microseconds(launcher(shape, kernel, cut, batch))
        except Exception as error:
            rows.append({"kernel": kernel, "channels": shape[0], **asdict(cut), "error": f"{error}"[:200]})
            continue
        rows.append({"kernel": kernel, "channels": shape[0], **asdict(cut), "us": us})
        for part in ("conv", "gradient"):
            gradient = (cut.chunk, cut.turns) != (bases[key].chunk, bases[key].turns)
            if cut != bases[key] and gradient != (part == "gradient"):
                continue
            if us < best.get((*key, part), (1e9, None))[0]:  # type: ignore[arg-type]
                best[(*key, part)] = (us, cut)  # type: ignore[index]
    chosen = {}
    for key, base in bases.items():
        conv, gradient = (best.get((*key, part), (0, base))[1] for part in ("conv", "gradient"))  # type: ignore[arg-type]
        chosen[key] = replace(conv, chunk=gradient.chunk, turns=gradient.turns)
    return rows, chosen


def against_compiled(shape: tuple[Any, ...], batch: int) -> dict[str, float]:
    """Forward and backward of four blocks in a row in a CUDA graph: by kernels, and compiled."""
    channels, hidden, side, options = shape
    x = batch_of(channels, side, batch, torch.bfloat16).requires_grad_()
    g = torch.randn_like(x)
    times = {}
    with mock.patch.object(fused, "MOST", 10**6):
        for way in ("kernels", "compiled"):
            blocks = nn.Sequential(*(make_block(channels, hidden, options, DEVICE) for _ in range(4)))
            if way == "compiled":
                torch._dynamo.reset()
                for block in blocks:
                    block.compile()

            def step(blocks: nn.Sequential = blocks) -> None:
                with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                    y = blocks(x)
                torch.autograd.grad(y, [x, *blocks.parameters()], g)

            for _ in range(2):
                step()
            times[way] = microseconds(step, count=2, replays=10) / 4
    return times


def help_along(what: str, batch: int, out: Path) -> None:
    """The work of a process beside the main one: compiling into the caches on disk, and checks."""
    kind, *rest = what.split(":")
    if kind == "wider":
        for *shape, count in WIDER:
            against_compiled(tuple(shape), count)
    elif kind == "cuts":
        compile_some(all_cuts(batch)[int(rest[0]) :: int(rest[1])], batch)
    elif kind == "check":
        shape = (PAIRS + WIDE)[int(rest[0])]
        check_to_file(shape, batch, out / f"check-{shape[0]}.json")
    else:
        warm(what, batch)


def record_one(name: str, batch: int, stack: ExitStack) -> tuple[Training, Any]:
    made = stack.enter_context(training(name, batch, True))
    batches = next(made.feed.epoch(0))
    made.step(*batches)
    return made, batches


WIDER = [(64, 32, 56, {}, 256), (128, 64, 28, {}, 256), (192, 19, 8, CENTRED, 128), (128, 64, 8, {}, 128)]


def wait_for(helpers: dict[str, subprocess.Popen[bytes]]) -> None:
    for what, helper in list(helpers.items()):
        try:
            code = helper.wait(timeout=240)
        except subprocess.TimeoutExpired:
            helper.kill()
            code = -1
        helpers.pop(what)
        if code:
            say(what, "ended with", code)
    say("compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--network", action="append", help=f"instead of {', '.join(NETWORKS)}")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60, help="in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--variants", action="store_true", help="time ways to cut the kernels' work, too")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        help_along(args.warm, args.batch, args.out)
        return
    names = args.network or NETWORKS
    args.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"torch": torch.__version__, "batch": args.batch, "steps": args.steps}

    def keep(what: str, value: Any, show: bool = True) -> None:
        record[what] = value
        (args.out / "cifar_step.json").write_text(json.dumps(record, indent=1) + "\n")
        if show:
            say(what, value)

    def attempt(what: str, call: Callable[[], Any], show: bool = True) -> None:
        """One part that fails must not take the others with it."""
        try:
            keep(what, call(), show)
        except Exception as error:
            keep(what, f"failed: {type(error).__name__}: {error}"[:1500])

    if args.device == "cpu":
        for name in names:
            with training(name, args.batch, False) as made:
                x, y = next(made.feed.epoch(0))
                began = time.perf_counter()
                made.step(x, y)
                keep(name, {"ms": 1e3 * (time.perf_counter() - began)})
        return

    count = max(1, min(12, (os.cpu_count() or 1) - 4))
    todo = [name for name in names if name != "resnet110"] + [f"check:{i}" for i in range(len(PAIRS + WIDE))]
    if args.variants:
        todo += ["wider", *(f"cuts:{i}:{count}" for i in range(count))]
    command = [sys.executable, __file__, str(args.out), "--batch", str(args.batch), "--warm"]
    helpers = {what: subprocess.Popen([*command, what]) for what in todo}
    keep("device", torch.cuda.get_device_name())
    with ExitStack() as stack:
        made, batches = {}, {}
        # The compiler works on ResNet-110 meanwhile.
        for name in sorted(names, key=lambda name: name != "resnet110"):
            if name != "resnet110":
                wait_for(helpers)
            try:
                made[name], batches[name] = record_one(name, args.batch, stack)
                say(name, "recorded")
            except Exception as error:
                keep(f"{name}: not recorded", f"{type(error).__name__}: {error}"[:1500])
        wait_for(helpers)
        made = {name: made[name] for name in names if name in made}
        for shape in PAIRS + WIDE:
            file = args.out / f"check-{shape[0]}.json"
            attempt(f"check {shape[0]}/{shape[1]}", lambda file=file: json.loads(file.read_text()))
            file.unlink(missing_ok=True)
        for name in made:
            if name.startswith("pnnh"):
                attempt(f"check {name}", lambda name=name: check_network(name, args.batch))

        def rounds(steps: dict[str, Callable[[], object]]) -> dict[str, Any]:
            times: dict[str, list[float]] = {name: [] for name in steps}
            for call in steps.values():
                milliseconds(call, 10)
            for _ in range(args.rounds):
                for name, call in steps.items():
                    times[name].append(milliseconds(call, args.steps))
            return {
                name: {"median": statistics.median(t), "least": min(t), "most": max(t), "rounds": t}
                for name, t in times.items()
            }

        def calls() -> dict[str, Callable[[], object]]:
            return {name: lambda name=name: made[name].step(*batches[name]) for name in made}

        def table(times: dict[str, Any]) -> None:
            for name, row in times.items():
                say(f"{name:40s} {row['median']:6.3f} ms ({row['least']:.3f} to {row['most']:.3f})")

        attempt("ms a step", lambda: rounds(calls()), show=False)
        if isinstance(record["ms a step"], dict):
            table(record["ms a step"])
        for name, call in calls().items():
            attempt(f"profile {name}", lambda call=call: profile(call), show=False)
            found = record[f"profile {name}"]
            if isinstance(found, dict):
                say(name, f"{found['kernels']} kernels, busy {found['busy_us']:.0f} us of {found['span_us']:.0f}")
                for row in found["top"][:16]:
                    say(f"   {row['us']:8.1f} us {row['count']:5d} x {row['kernel']}")
        if not args.variants:
            return

        # Other ways to do the same
        from unskip.methods import kernels

        rows, chosen = sweep(all_cuts(args.batch), args.batch)
        keep("cuts", rows, show=False)
        keep("best cuts", {f"{k} {c}": asdict(cut) for (k, c), cut in chosen.items()}, show=False)
        for kernel, channels in chosen:
            here = sorted((r for r in rows if (r["kernel"], r["channels"]) == (kernel, channels)), key=ms_of)
            base = next(r for r in rows if (r["kernel"], r["channels"]) == (kernel, channels))
            say(f"{kernel} {channels}: default {ms_of(base):.2f} us; best:")
            for row in here[:4]:
                say("    ", {k: v for k, v in row.items() if k not in ("kernel", "channels")})

        def again(name: str, *, pdl: bool, ahead: bool) -> dict[str, Any]:
            """Recorded anew with these settings, and timed."""
            with (
                mock.patch.dict(kernels.TILINGS, chosen),
                mock.patch.object(kernels, "PDL", pdl),
                mock.patch.object(kernels, "ZERO_AHEAD", ahead),
            ):
                made[name].step.graph = None
                made[name].step(*batches[name])
                result = rounds({name: calls()[name]})[name]
                result["profile"] = profile(calls()[name])
            return result

        settings: list[dict[str, Any]] = [
            {"pdl": False, "ahead": True},
            {"pdl": False, "ahead": False},
            {"pdl": True, "ahead": True},
        ]
        for name in [name for name in made if name.startswith("pnnh")]:
            for setting in settings[: None if "wide" not in name else 1]:
                attempt(f"{name} {setting}", lambda n=name, s=setting: again(n, **s), show=False)
                found = record[f"{name} {setting}"]
                if isinstance(found, dict):
                    say(f"{name} {setting}: {found['median']:.3f} ms ({found['least']:.3f} to {found['most']:.3f})")
                    if setting == settings[0]:
                        for row in found["profile"]["top"][:12]:
                            say(f"   {row['us']:8.1f} us {row['count']:5d} x {row['kernel']}")
        for *shape, batch in WIDER:
            attempt(f"us a block {shape} batch {batch}", lambda s=shape, b=batch: against_compiled(tuple(s), b))


def ms_of(row: dict[str, Any]) -> float:
    return row.get("us", float("inf"))


if __name__ == "__main__":
    main()
