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
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

aten = torch.ops.aten
Shape = Sequence[int]


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


def work(network: nn.Module, images: tuple[int, ...], *, train: bool) -> Work:
    """Counts one step on a batch of this shape, on the meta device: neither memory nor time is spent."""
    shadow = copy.deepcopy(network).to("meta").train(train)
    macs = FlopCounterMode(display=False, custom_mapping={aten.convolution_backward: _flops_backward})
    traffic = FlopCounterMode(display=False, custom_mapping=MOVED)
    with macs, traffic, torch.set_grad_enabled(train):
        out = shadow(torch.empty(images, device="meta"))
        if train:
            out.sum().backward()
    return Work(macs=macs.get_total_flops() // 2, numbers=traffic.get_total_flops(), output=tuple(out.shape[1:]))


def _flops_backward(gradient: Shape, x: Shape, weight: Shape, *settings: Any, **_outputs: object) -> int:
    """Of a convolution's two gradients, each of which multiplies what the convolution did.

    PyTorch's own count takes the weight's gradient of a convolution in groups for that of one without: 384 times too
    much for a depthwise one of 384 channels.
    """
    *_, transposed, _output_padding, _groups, (of_input, of_weight, _of_bias) = settings
    positions = math.prod((x if transposed else gradient)[2:])
    return 2 * (bool(of_input) + bool(of_weight)) * gradient[0] * positions * math.prod(weight)


def _moved(*arguments: Any, out_shape: Shape, **_options: object) -> int:
    """The numbers that a convolution or a matrix product reads and writes."""
    tensors = [shape for shape in arguments if isinstance(shape, torch.Size) and len(shape) >= 2]
    return sum(map(math.prod, [*tensors, out_shape]))


def _moved_backward(gradient: Shape, x: Shape, weight: Shape, *settings: Any, **_outputs: object) -> int:
    of_input, of_weight, _of_bias = settings[-1]
    return (bool(of_input) + bool(of_weight)) * sum(map(math.prod, (gradient, x, weight)))


MOVED = dict.fromkeys(flop_registry, lambda *_, **__: 0)  # by operation; what is not listed below counts nothing
MOVED |= dict.fromkeys((aten.convolution, aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _moved)
MOVED[aten.convolution_backward] = _moved_backward


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
