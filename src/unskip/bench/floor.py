"""The floor: what a step must compute and move, over the rates that this device reaches.

    arithmetic   2 x multiply-accumulates of all convolutions and matrix products / measured rate of a large one
    traffic      bytes of their inputs, outputs and weights, each read or written once / measured rate of a copy

Everything else (norms, activations, sums, pooling) is taken to be fused into them and free. Training is counted from a
real backward pass: the gradient of the input reads the output's gradient and the weight, that of the weight reads the
output's gradient and the input, and frozen weights and the first layer's input have none. No kernel at those rates is
faster than the larger of the two; a step in several kernels is slower, since they do not overlap perfectly.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step must do."""

    macs: int  # multiply-accumulates
    numbers: int  # read and written
    output: tuple[int, ...]  # shape of what the network gives for one image

    def floors(self, rates: "DeviceRates", itemsize: int) -> tuple[float, float]:
        """Seconds by arithmetic and by traffic."""
        return 2 * self.macs / rates.flops, self.numbers * itemsize / rates.bytes


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a device reaches."""

    flops: float  # floating-point operations a second in a large product or convolution, at the comparison's precision
    bytes: float  # read plus written a second in a large copy


class _Traffic(TorchDispatchMode):
    """Counts the numbers that convolutions and matrix products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is aten.convolution.default:
            x, weight = args[:2]
            self.numbers += x.numel() + weight.numel() + out.numel()
        elif func is aten.convolution_backward.default:
            gradient, x, weight = args[:3]
            of_input, of_weight, _ = args[-1]
            self.numbers += of_input * (gradient.numel() + weight.numel() + x.numel())
            self.numbers += of_weight * (gradient.numel() + weight.numel() + x.numel())
        elif func in PRODUCTS:
            matrices = [a for a in args if isinstance(a, Tensor) and a.ndim >= 2]
            self.numbers += sum(a.numel() for a in matrices) + out.numel()
        return out


def work(network: nn.Module, images: tuple[int, ...], *, train: bool) -> Work:
    """Counts one step on a batch of this shape, on the meta device: neither memory nor time is spent."""
    shadow = copy.deepcopy(network).to("meta").train(train)
    traffic = _Traffic()
    counter = FlopCounterMode(display=False, custom_mapping={aten.convolution_backward: _flops_backward})
    with counter as flops, traffic, torch.set_grad_enabled(train):
        out = shadow(torch.empty(images, device="meta"))
        if train:
            out.sum().backward()
    return Work(macs=flops.get_total_flops() // 2, numbers=traffic.numbers, output=tuple(out.shape[1:]))


def _flops_backward(
    gradient: Sequence[int],
    x: Sequence[int],
    weight: Sequence[int],
    _bias: object,
    _stride: object,
    _padding: object,
    _dilation: object,
    transposed: bool,
    _output_padding: object,
    _groups: int,
    wanted: Sequence[bool],
    **_outputs: object,
) -> int:
    """Of a convolution's two gradients, each of which multiplies what the convolution did.

    PyTorch's own count takes the weight's gradient of a convolution in groups for that of one without: 384 times too
    much for a depthwise one of 384 channels.
    """
    of_input, of_weight, _ = wanted
    positions = math.prod((x if transposed else gradient)[2:])
    return 2 * (of_input + of_weight) * gradient[0] * positions * math.prod(weight)


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Arithmetic: the better of a large matrix product and a large convolution; traffic: a large copy.

    Each is the median of ten, on random numbers. Some CPUs have a fast convolution in bfloat16 and no fast product.
    """
    gpu = device.type == "cuda"
    n = 8192 if gpu else 512
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = a @ b
    multiplied = _median_seconds(lambda: torch.mm(a, b, out=product), device)
    batch, side, channels = (256, 28, 512) if gpu else (8, 28, 128)
    kernel = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype)
    images = torch.randn(batch, channels, side + 2, side + 2, device=device, dtype=dtype)
    images, kernel = (x.to(memory_format=torch.channels_last) for x in (images, kernel))
    convolved = _median_seconds(lambda: F.conv2d(images, kernel), device)
    source = torch.randn((1 << 28) if gpu else (1 << 25), device=device)  # 1 GiB, 128 MiB
    target = torch.empty_like(source)
    copied = _median_seconds(lambda: target.copy_(source), device)
    return DeviceRates(
        flops=max(2 * n**3 / multiplied, 2 * batch * side**2 * kernel.numel() / convolved),
        bytes=2 * source.numel() * source.itemsize / copied,
    )


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(13):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
