"""The kernels of a norm, an activation and a 3x3 depthwise convolution, by shape: right in bf16, and milliseconds of
each beside cuDNN's convolution and its two gradients, which have neither norm nor activation in them.

    python benchmarks/depthwise.py OUT                                   # a GPU: MobileNet-V2's learners, batch 256
    python benchmarks/depthwise.py OUT --forward 1:2x4x8 1:4x4x8 2:2x2x8 --backward 1:2x2x8 1:2x4x8     # other squares
    TRITON_INTERPRET=1 python benchmarks/depthwise.py OUT --check        # small shapes on a CPU, nothing is timed

A choice is STRIDE:ROWSxCOLUMNSxSQUARES, as in `FORWARD` and `BACKWARD` of unskip/methods/depthwise_kernels.py; without
one those are timed. A time is that of a CUDA graph with 20 calls, the median of 3 replays, divided by 20. The floor is
the time of reading and writing each tensor once at the rate of a large copy. All is in OUT/depthwise.json.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip.kernels import depthwise_triton as kernels
from unskip.kernels.depthwise import depthwise

Squares = tuple[int, int, int]
Shape = tuple[int, int, int]  # side, channels, stride

# The learners of pnnh_mobilenetv2 in their order, as (side of what the convolution reads, stride), with their widths.
SIDES = [(112, 2), (56, 1), (56, 2), (28, 1), (28, 1), (28, 2), *[(14, 1)] * 6, (14, 2), *[(7, 1)] * 3]
WIDTHS = [80, 128, 128, 176, 176, 160, 352, 352, 352, 336, 528, 528, 496, 880, 880, 800]
SHAPES = Counter((side, width, stride) for (side, stride), width in zip(SIDES, WIDTHS, strict=True))
SMALL = Counter([(5, 5, 1), (6, 20, 2)])  # for --check
CALLS, REPLAYS, LONGEST = 20, 3, 15.0  # ms of one replay: fewer calls where it would be longer
TOP = 6.0
WAYS = ("forward", "backward", "cuDNN", "cuDNN's input gradient", "cuDNN's weight gradient")


def tensors(shape: Shape, batch: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    side, channels, stride = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def images(side: int) -> Tensor:
        return normal(batch, channels, side, side).to(dtype).contiguous(memory_format=torch.channels_last)

    return {
        "u": images(side),
        "scale": normal(channels),
        "shift": normal(channels),
        "weight": normal(channels, 1, 3, 3),
        "g": images(side // stride),
    }


def errors(shape: Shape, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Distance from float64, over its size, of the output and of the gradients, for a few images."""
    stride = shape[2]
    given = tensors(shape, 3, device, dtype)
    g = given.pop("g")
    leaves = [t.requires_grad_() for t in given.values()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = depthwise(*leaves, stride, TOP)
    u, scale, shift, weight = exact
    n = u * scale[:, None, None] + shift[:, None, None]
    wanted = F.conv2d(F.hardtanh(n, 0, TOP), weight, None, stride, 1, 1, shape[1])
    y.backward(g)
    wanted.backward(g.double())
    pairs = {"output": (y, wanted)} | {k: (a.grad, b.grad) for k, a, b in zip(given, leaves, exact, strict=True)}
    return {name: ((a.double() - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}


def calls(shape: Shape, given: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed. cuDNN's weight is in bf16, as autocast has it."""
    stride, channels = shape[2], shape[1]
    u, scale, shift, weight, g = given.values()
    y, out, half = torch.empty_like(g), torch.empty_like(u), weight.to(u.dtype)
    numbers = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], channels)

    def gradient(*wanted: bool) -> Callable[[], object]:
        return lambda: torch.ops.aten.convolution_backward(g, u, half, None, *numbers, [*wanted, False])

    found = (
        lambda: kernels.convolve(u, scale, shift, weight, None, y, stride, TOP),
        lambda: kernels.differentiate(g, u, scale, shift, weight, out, stride, TOP),
        lambda: F.conv2d(u, half, None, stride, 1, 1, channels),
        gradient(True, False),
        gradient(False, True),
    )
    return dict(zip(WAYS, found, strict=True))


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call, from replays of a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    once = _events(call)
    count = max(1, min(CALLS, int(LONGEST / max(once, 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    return statistics.median(_events(graph.replay) for _ in range(REPLAYS)) / count


def _events(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def choose(way: str, stride: int, squares: Squares) -> None:
    """The kernels take these from now on."""
    {"forward": kernels.FORWARD, "backward": kernels.BACKWARD}[way][stride] = squares


def warm(job: tuple[str, Shape, Squares, int]) -> None:
    """Compiles one kernel, into Triton's cache."""
    way, shape, squares, batch = job
    choose(way, shape[2], squares)
    calls(shape, tensors(shape, batch, "cuda", torch.bfloat16))[way]()
    torch.cuda.synchronize()


def copy_rate() -> float:
    """Bytes a millisecond, read and written."""
    source = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


def choice(text: str) -> tuple[int, Squares]:
    """STRIDE:ROWSxCOLUMNSxSQUARES."""
    try:
        stride, _, rest = text.partition(":")
        rows, columns, squares = map(int, rest.split("x"))
        if int(stride) in (1, 2) and min(rows, columns, squares) > 0 and squares & (squares - 1) == 0:
            return int(stride), (rows, columns, squares)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} must be like 1:2x4x8, with stride 1 or 2 and a power of 2 squares.")


def choices(way: str, given: list[tuple[int, Squares]]) -> dict[int, list[Squares]]:
    """By stride; where none is given, the one in the tree."""
    usual = {"forward": kernels.FORWARD, "backward": kernels.BACKWARD}[way]
    return {stride: [s for own, s in given if own == stride] or [usual[stride]] for stride in (1, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--forward", type=choice, nargs="*", default=[], help="squares to try, as 1:2x4x8")
    parser.add_argument("--backward", type=choice, nargs="*", default=[], help="squares to try, as 1:2x2x8")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--check", action="store_true", help="small shapes on a CPU, by Triton's interpreter")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    device, shapes = ("cpu", SMALL) if args.check else ("cuda", SHAPES)
    tried = {way: choices(way, getattr(args, way)) for way in ("forward", "backward")}
    machine = {"torch": torch.__version__, "triton": kernels.triton.__version__}
    machine["device"] = "interpreter" if args.check else torch.cuda.get_device_name()
    found: dict = {**machine, "batch": args.batch, "shapes": []}

    def write() -> None:
        found["seconds"] = time.perf_counter() - began
        (args.out / "depthwise.json").write_text(json.dumps(found, indent=1) + "\n")

    if not args.check:
        jobs = [(w, shape, s, args.batch) for shape in shapes for w, by in tried.items() for s in by[shape[2]]]
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            pool.map(warm, jobs, chunksize=2)
        print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
        torch.backends.cudnn.benchmark = True
        found["bytes_per_ms"] = copy_rate()
    for shape, count in shapes.items():
        row: dict = {"shape": shape, "count": count, "errors": {}, "milliseconds": {}}
        found["shapes"].append(row)
        for way, by in tried.items():
            for squares in by[shape[2]]:
                choose(way, shape[2], squares)
                row["errors"][_name(way, squares)] = errors(shape, device, torch.bfloat16)
        if not args.check:
            timed(row, tried, args.batch, found["bytes_per_ms"])
        print(line(row), flush=True)
        write()
    if not args.check:
        for text in totals(found["shapes"]):
            print(text, flush=True)
    write()
    worst = max(e for row in found["shapes"] for by in row["errors"].values() for e in by.values())
    print(f"largest distance from float64 {worst:.1e}; {time.perf_counter() - began:.0f} s")
    if not worst < 0.005:
        raise SystemExit("That is more than bf16's rounding.")


def _name(way: str, squares: Squares) -> str:
    return f"{way} {'x'.join(map(str, squares))}"


def timed(row: dict, tried: dict[str, dict[int, list[Squares]]], batch: int, rate: float) -> None:
    """Adds the times of one shape."""
    shape = row["shape"]
    given = tensors(shape, batch, "cuda", torch.bfloat16)
    large, small = given["u"].nbytes, given["g"].nbytes
    row["floor"] = {"forward": (large + small) / rate, "backward": (2 * large + small) / rate}
    for way, call in calls(shape, given).items():
        if way in tried:
            for squares in tried[way][shape[2]]:
                choose(way, shape[2], squares)
                row["milliseconds"][_name(way, squares)] = milliseconds(call)
        else:
            row["milliseconds"][way] = milliseconds(call)


def line(row: dict) -> str:
    side, channels, stride = row["shape"]
    times = ", ".join(f"{name} {ms:.3f}" for name, ms in row["milliseconds"].items())
    floors = ", ".join(f"{name} {ms:.3f}" for name, ms in row.get("floor", {}).items())
    worst = max(e for by in row["errors"].values() for e in by.values())
    start = f"{side:4} px {channels:4} channels, stride {stride}, {row['count']} times: error {worst:.0e}"
    return f"{start} | {times} | floor {floors}" if times else start


def totals(rows: list[dict]) -> list[str]:
    """Milliseconds of all layers of the network together, by stride and choice; cuDNN's beside them."""
    sums: dict[tuple[int, str], float] = {}
    for row in rows:
        floors = {f"floor, {way}": ms for way, ms in row["floor"].items()}
        for name, ms in {**row["milliseconds"], **floors}.items():
            key = (row["shape"][2], name)
            sums[key] = sums.get(key, 0.0) + row["count"] * ms
    return [f"  stride {stride}  {name:28} {ms:7.2f} ms" for (stride, name), ms in sorted(sums.items())]


if __name__ == "__main__":
    main()
