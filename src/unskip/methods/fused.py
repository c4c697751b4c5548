"""When a PNNH block trains with the kernels of `unskip.kernels.pnnh_triton`, and how they are called.

Narrow blocks (CIFAR's) are many small operations, each far from what a GPU can do; four kernels do a step of such a
block. They run wherever they compute the block's definition and were measured to be faster: training with bfloat16
autocast on a CUDA device, small images, eager mode (torch.compile traces the definition), no hooks on the layers inside
and no request for deterministic algorithms.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from unskip._core.modules import has_global_hooks, has_hooks
from unskip.coders import ClosedFormCoder, SharedCoder
from unskip.kernels.dispatch import TRITON, differentiates_backwards, is_recent_nvidia
from unskip.methods.partial import PartialConv2d

PARTS = ("pre", "learner", "coder", "drop_path", "act")  # of a PNNH block
# The kernels were measured up to these sizes (benchmarks/records/2026-11-15_cifar-step_h200):
MAX_CHANNELS = 256  # channels of a block
MAX_PRODUCT = 4096  # a convolution's inputs times its outputs
MAX_SIDE = 32  # px, the side of a feature map


class FusedLayers(NamedTuple):
    """The layers of a block that the kernels compute."""

    conv1: nn.Conv2d
    norm: nn.BatchNorm2d
    conv2: nn.Conv2d
    coder: ClosedFormCoder


def layers_of(block: nn.Module) -> FusedLayers | None:
    """The layers of a PNNH block, or None if the kernels can't compute it."""
    pre, learner, coder, drop_path, last = (block._modules.get(name) for name in PARTS)
    coder = coder.coder if isinstance(coder, SharedCoder) else coder
    if not isinstance(coder, ClosedFormCoder) or not isinstance(learner, nn.Sequential):
        return None
    match [*learner]:
        case [nn.Conv2d() as conv1, nn.BatchNorm2d() as norm, act, nn.Conv2d() as conv2]:
            usual = (
                not pre  # which every PNNH block has, here an empty one
                and [type(part) for part in (norm, drop_path)] == [nn.BatchNorm2d, nn.Identity]
                and all(type(part) is nn.ReLU for part in (act, last, coder.act))
                # A norm without a momentum asks the GPU how many batches there were.
                and norm.momentum is not None
                and norm.affine
                and norm.track_running_stats
                and coder.enc is None
                and not coder.spec.paired
                and not coder.spec.linear
                and conv1.in_channels == conv2.out_channels == coder.spec.channels
                and conv1.weight.shape[1] == conv2.weight.shape[0]
            )
            if usual and narrow(conv1, "reads") and narrow(conv2, "writes"):
                return FusedLayers(conv1, norm, conv2, coder)
    return None


def narrow(conv: nn.Conv2d, side: str) -> bool:
    """A 3 x 3 convolution of few channels, whole or partial on this side."""
    if type(conv) is not nn.Conv2d and not (type(conv) is PartialConv2d and conv.side == side):
        return False
    plain = (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
    few = (
        conv.in_channels * conv.out_channels <= MAX_PRODUCT and max(conv.in_channels, conv.out_channels) <= MAX_CHANNELS
    )
    return plain and few and conv.groups == 1 and conv.bias is None and conv.padding_mode == "zeros"


def is_eligible(block: nn.Module, device: torch.device) -> bool:
    """Whether the kernels can train a block on a device, under bfloat16 autocast and in channels last."""
    if device.type != "cuda" or not TRITON or not is_recent_nvidia(device):
        return False
    return not torch.are_deterministic_algorithms_enabled() and layers_of(block) is not None


def supports(block: nn.Module, x: Tensor) -> FusedLayers | None:
    """The layers for the kernels, or None if the block must run by its definition."""
    if type(x) is not Tensor or not x.is_cuda or not block.training:  # a tracer's proxy is no Tensor
        return None
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not differentiates_backwards():
        return None
    mixed = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    if not mixed or x.dtype != torch.bfloat16 or not is_eligible(block, x.device):
        return None
    layers = layers_of(block)
    return layers if layers is not None and fits(layers, x) and not inner_layers_hooked(block) else None


def fits(layers: FusedLayers, x: Tensor) -> bool:
    """Whether the kernels can read these tensors: small NHWC images, dense float32 parameters on one device."""
    if x.ndim != 4 or x.shape[1] != layers.conv1.in_channels or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if x.numel() >= 2**31 or x.shape[0] * x.shape[2] * x.shape[3] < 2 or max(x.shape[2:]) > MAX_SIDE:
        return False
    norm = layers.norm
    numbers = [t for layer in layers[:3] for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()]
    return norm.training and all(
        type(p) in (Tensor, nn.Parameter)
        and p.dtype == torch.float32
        and p.device == x.device
        and (p.is_contiguous() or (p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last)))
        for p in numbers
    )


def inner_layers_hooked(block: nn.Module) -> bool:
    """Whether a layer inside the block has hooks, which the kernels would not call."""
    inside = [layer for part in block.children() for layer in (part, *part.children())]
    return has_global_hooks() or any(map(has_hooks, inside))


def run(layers: FusedLayers, x: Tensor) -> Tensor:
    """y = σ(W_2 ⊛ σ(norm(W_1 ⊛ x)) + coder(x)), by the kernels."""
    from unskip.kernels import pnnh_triton as kernels

    conv1, norm, conv2, coder = layers
    carried = coder.spec.channels if coder.whole else coder.groups
    path = kernels.Path(carried=carried, group=coder.size, scale=1 / coder.size)
    return kernels.run(x, conv1, norm, conv2, path, rectified=rectified(x))


def rectified(x: Tensor) -> bool:
    """Whether x is known to come from a ReLU, so that its gradient may be zero wherever x is.

    The gradients of weights don't depend on it. If the gradient of x itself is asked for, it is computed in full.
    """
    observed = x.retains_grad or bool(x._backward_hooks)
    return x.grad_fn is not None and x.grad_fn.name() in ("ReluBackward0", "FusedBlockBackward") and not observed
