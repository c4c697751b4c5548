"""The stem of a ResNet (7x7 convolution, norm, ReLU, max pooling), computed in three ways: milliseconds of each, and
whether it is the same function.

    python benchmarks/stem.py OUT                                  # a GPU: bf16 autocast, channels last, 256 at 224 px
    python benchmarks/stem.py OUT --device cpu --batch 2 --size 32 --eager   # to try it out: all ways are the first one

Forward and backward of the stem alone, compiled, as one CUDA graph; each is timed in rounds beside the others. All
numbers are in OUT/stem.json, with the kernels of each way.
"""

import argparse
import collections
import copy
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from unskip.kernels.stem import StemConv2d, StemPool, conv_as, pool_as

WAYS = {
    "timm": (nn.Conv2d, nn.MaxPool2d),
    "squares": (StemConv2d, nn.MaxPool2d),
    "squares + Triton": (StemConv2d, StemPool),
}
ROUNDS = 7


def stem_of(network: nn.Module, conv: type[nn.Conv2d], pool: type[nn.MaxPool2d]) -> nn.Sequential:
    """A copy of the network's stem with these classes in it."""
    network = copy.deepcopy(network)
    return nn.Sequential(conv_as(conv, network.conv1), network.bn1, network.act1, pool_as(pool, network.maxpool))


def equality(ordinary: nn.Module, other: nn.Module, x: Tensor) -> dict[str, float]:
    """Largest differences of output, gradients and statistics, over the largest value of each."""
    found = []
    for network in (ordinary, other):
        network = copy.deepcopy(network).to(x.dtype).train()
        y = network(x)
        generator = torch.Generator(x.device).manual_seed(1)
        y.backward(torch.randn(y.shape, generator=generator, device=x.device, dtype=x.dtype))
        numbers = {"output": y.detach()}
        numbers |= {name: p.grad for name, p in network.named_parameters()}
        found.append(numbers | dict(network.named_buffers()))
    first, second = found
    return {k: ((second[k] - v).abs().max() / v.abs().max().clamp(min=1e-30)).item() for k, v in first.items()}


class Timed:
    """Forward and backward of one way, compiled, as one CUDA graph."""

    def __init__(self, network: nn.Module, x: Tensor, *, compiled: bool) -> None:
        self.network, self.x = network, x
        self.call: Callable = torch.compile(network, dynamic=False, fullgraph=True) if compiled else network
        self.rounds: list[float] = []
        self.graph = None
        self.memory = 0
        shape = (len(x), 64, x.shape[2] // 4, x.shape[3] // 4)
        gradient = torch.randn(shape, generator=torch.Generator(x.device).manual_seed(1), device=x.device)
        self.gradient = gradient.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        if not x.is_cuda:
            self.found = self.results()
            return
        # On the stream that records later: a gradient that was made on another one can't be recorded.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.found = self.results()
            for _ in range(3):
                self.step()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            self.memory = torch.cuda.max_memory_allocated() - before
            self.network.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=side):
            self.step()

    def results(self) -> list[Tensor]:
        """Output and gradients of one step, for a comparison."""
        y = self.step()
        return [y.clone(), *(p.grad.clone() for p in self.network.parameters())]

    def step(self) -> Tensor:
        self.network.zero_grad(set_to_none=True)
        with torch.autocast(self.x.device.type, torch.bfloat16):
            y = self.call(self.x)
        y.backward(self.gradient.to(y.dtype))
        return y.detach()

    def round(self, steps: int) -> None:
        once = self.step if self.graph is None else self.graph.replay
        if self.x.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            once()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        self.rounds.append(1e3 * (time.perf_counter() - began) / steps)

    def kernels(self) -> list[tuple[str, float]]:
        """Names and milliseconds, the slowest first."""
        if not self.x.is_cuda:
            return []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                self.graph.replay()
            torch.cuda.synchronize()
        total: collections.Counter = collections.Counter()
        for event in profile.key_averages():
            total[event.key[:110]] += event.self_device_time_total / 3e3
        return total.most_common(14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    network = timm.create_model("resnet34").to(args.device).to(memory_format=torch.channels_last).train()
    nn.init.uniform_(network.bn1.weight, 0.5, 1.5)
    nn.init.normal_(network.bn1.bias, 0, 0.3)
    images = torch.randn(args.batch, 3, args.size, args.size, device=args.device)
    x = images.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    few = images[:4].double().contiguous(memory_format=torch.channels_last)
    rows: dict[str, dict] = {}
    ready: dict[str, Timed] = {}

    def write() -> None:
        about = {"torch": torch.__version__, "batch": args.batch, "size": args.size, "device": args.device}
        (args.out / "stem.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")

    for name, classes in WAYS.items():
        row = rows[name] = {}
        try:
            row["equal, float64"] = equality(stem_of(network, *WAYS["timm"]), stem_of(network, *classes), few)
            torch._dynamo.reset()
            ready[name] = Timed(stem_of(network, *classes), x, compiled=not args.eager)
            row["memory GiB"] = ready[name].memory / 2**30
            if "timm" in ready:
                pairs = zip(ready["timm"].found, ready[name].found, strict=True)
                row["equal, bf16"] = max(((b - a).norm() / a.norm()).item() for a, b in pairs)
        except Exception as error:  # one that fails must not take the others with it
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        write()
    for i in range(ROUNDS):
        for timed in list(ready.values())[:: 1 if i % 2 == 0 else -1]:
            timed.round(20 if x.is_cuda else 1)
    for name, timed in ready.items():
        rows[name] |= {
            "rounds ms": timed.rounds,
            "ms": sorted(timed.rounds)[ROUNDS // 2],
            "kernels ms": timed.kernels(),
        }
        write()
    for name, row in rows.items():
        worst = max(row.get("equal, float64", {"": float("nan")}).values())
        print(
            f"{name:18} {row.get('ms', 0):7.3f} ms  {row.get('memory GiB', 0):6.3f} GiB  float64 off by {worst:.1e}, "
            f"bf16 by {row.get('equal, bf16', float('nan')):.1e}  {row.get('error', '')[:150]}"
        )
        for kernel, ms in row.get("kernels ms", ())[:9]:
            print(f"      {ms:6.3f} {kernel[:100]}")


if __name__ == "__main__":
    main()
