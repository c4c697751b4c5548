"""When a PNNH block trains by the kernels of `unskip.kernels.pnnh_triton`, and how it is handed to them.

Narrow blocks (CIFAR's) are many small operations, each far from what a GPU can do; four kernels do a step of such a
block. They are taken wherever they compute what the block's definition says and were measured to be faster: training
with bfloat16 autocast on a CUDA device, small images, in eager (torch.compile traces the definition), while nobody
watches the layers inside by hooks or asks for algorithms that repeat to the last bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from unskip._core.modules import has_global_hooks, has_hooks
from unskip.coders import ClosedFormCoder, SharedCoder
from unskip.kernels.dispatch import TRITON, differentiates_backwards, modern
from unskip.methods.partial import PartialConv2d

PARTS = ("pre", "learner", "coder", "drop_path", "act")  # of a PNNH block
# The kernels were measured up to these sizes (benchmarks/records/2026-11-15_cifar-step_h200):
WIDEST = 256  # channels of a block
MOST = 4096  # a convolution's inputs times its outputs
LARGEST = 32  # px, the side of a feature map


class Layers(NamedTuple):
    """A block as the kernels know it: convolution, norm, convolution, coder."""

    conv1: nn.Conv2d
    norm: nn.BatchNorm2d
    conv2: nn.Conv2d
    coder: ClosedFormCoder


def layers_of(block: nn.Module) -> Layers | None:
    """The layers of a PNNH block; None where it is none that the kernels know."""
    pre, learner, coder, drop_path, last = (block._modules.get(name) for name in PARTS)
    coder = coder.coder if isinstance(coder, SharedCoder) else coder
    if not isinstance(pre, nn.Sequential) or not isinstance(learner, nn.Sequential):
        return None
    if len(pre) or len(learner) != 4 or not isinstance(coder, ClosedFormCoder) or type(drop_path) is not nn.Identity:
        return None
    conv1, norm, act, conv2 = learner
    if not isinstance(conv1, nn.Conv2d) or not isinstance(conv2, nn.Conv2d):
        return None
    if type(norm) is not nn.BatchNorm2d or not type(act) is type(last) is nn.ReLU:
        return None
    if not narrow(conv1, "reads") or not narrow(conv2, "writes"):
        return None
    if coder.enc is not None or coder.spec.paired or coder.spec.linear or type(coder.act) is not nn.ReLU:
        return None
    # A norm without a momentum asks the GPU how many batches there were.
    if norm.momentum is None or not norm.affine or not norm.track_running_stats:
        return None
    same = conv1.in_channels == conv2.out_channels == coder.spec.channels
    return Layers(conv1, norm, conv2, coder) if same and conv1.weight.shape[1] == conv2.weight.shape[0] else None


def narrow(conv: nn.Conv2d, side: str) -> bool:
    """A 3 x 3 convolution of few channels, whole or partial on this side."""
    if type(conv) is PartialConv2d:
        if conv.side != side:
            return False
    elif type(conv) is not nn.Conv2d:
        return False
    plain = (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
    few = conv.in_channels * conv.out_channels <= MOST and max(conv.in_channels, conv.out_channels) <= WIDEST
    return plain and few and conv.groups == 1 and conv.bias is None and conv.padding_mode == "zeros"


def is_eligible(block: nn.Module, device: torch.device) -> bool:
    """Whether a block trains by the kernels on a device, under bfloat16 autocast and channels last."""
    if device.type != "cuda" or not TRITON or not modern(device):
        return False
    return not torch.are_deterministic_algorithms_enabled() and layers_of(block) is not None


def supports(block: nn.Module, x: Tensor) -> Layers | None:
    """The layers to hand to the kernels; None where the block is to run as it is defined."""
    if type(x) is not Tensor or not x.is_cuda or not block.training:  # a tracer's stand-in is no tensor
        return None
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not differentiates_backwards():
        return None
    mixed = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    if not mixed or x.dtype != torch.bfloat16 or not is_eligible(block, x.device):
        return None
    layers = layers_of(block)
    return layers if layers is not None and fits(layers, x) and not inner_layers_hooked(block) else None


def fits(layers: Layers, x: Tensor) -> bool:
    """Whether the kernels can read these tensors: small NHWC images, dense float32 parameters on one device."""
    if x.ndim != 4 or x.shape[1] != layers.conv1.in_channels or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    if x.numel() >= 2**31 or x.shape[0] * x.shape[2] * x.shape[3] < 2 or max(x.shape[2:]) > LARGEST:
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
    """Whether somebody waits for a layer inside the block to be called."""
    inside = [layer for part in block.children() for layer in (part, *part.children())]
    return has_global_hooks() or any(map(has_hooks, inside))


def run(layers: Layers, x: Tensor) -> Tensor:
    """y = σ(W_2 ⊛ σ(norm(W_1 ⊛ x)) + coder(x)), by the kernels."""
    from unskip.kernels import pnnh_triton as kernels

    conv1, norm, conv2, coder = layers
    carried = coder.spec.channels if coder.whole else coder.groups
    path = kernels.Path(carried=carried, group=coder.size, scale=1 / coder.size)
    centre1, centre2 = getattr(conv1, "centre", None), getattr(conv2, "centre", None)
    return kernels.run(x, conv1.weight, centre1, norm, conv2.weight, centre2, path, rectified(x))


def rectified(x: Tensor) -> bool:
    """Whether x is known to come from a ReLU, so that its gradient may be zero wherever x is.

    Nobody can tell by a weight's gradient; whoever has asked for that of x gets the whole of it.
    """
    asked = x.retains_grad or bool(x._backward_hooks)
    return x.grad_fn is not None and x.grad_fn.name() in ("ReluBackward0", "FusedBlockBackward") and not asked
