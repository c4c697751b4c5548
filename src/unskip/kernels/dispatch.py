"""Which fast implementations may run: by device, precision, compilation, export and autograd mode."""

import importlib.util

import torch
from torch import Tensor
from torch.autograd import forward_ad

from unskip._core.modules import has_global_hooks

HALF = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (*HALF, torch.float32, torch.float64)
TRITON = importlib.util.find_spec("triton") is not None  # it is imported when it is used for the first time


def has_kernels_for(x: Tensor) -> bool:
    """Whether the Triton kernels run on x. While torch.compile traces, the device is taken to be recent enough."""
    return (
        TRITON
        and x.is_cuda
        and x.dtype in KERNEL_DTYPES
        and (torch.compiler.is_compiling() or is_recent_nvidia(x.device))
    )


def is_recent_nvidia(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU from Ampere on that exists; the device of a fake tensor need not."""
    nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result  # a compiler asks once, where it traces; it traces anew under other transforms
def differentiates_backwards() -> bool:
    """Whether gradients are taken by backward alone: torch.func and forward mode need rules of their own."""
    return not (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


def exporting() -> bool:
    """Whether a model is being exported; exported programs hold PyTorch's own operations only."""
    # The flag, which PyTorch 2.6 does not have: where torch.compile traces, some versions call that exporting too.
    return getattr(torch.compiler, "_is_exporting_flag", False) or torch.jit.is_tracing()  # type: ignore[attr-defined]


def may_fuse_layers() -> bool:
    """Whether layers may run as one operation: no export, no torch.func transform, no global module hook."""
    hooks = not torch.compiler.is_compiling() and has_global_hooks()
    return differentiates_backwards() and not exporting() and not hooks
