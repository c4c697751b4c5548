"""What is running, and where: which of a layer's faster ways are open to it."""

import importlib.util

import torch
from torch import Tensor
from torch.autograd import forward_ad

from unskip._core.modules import has_global_hooks

HALF = (torch.bfloat16, torch.float16)
KINDS = (*HALF, torch.float32, torch.float64)
TRITON = importlib.util.find_spec("triton") is not None  # it is imported when it is used for the first time


def has_kernels_for(x: Tensor) -> bool:
    """Whether Triton's kernels run on x. A compiler that traces has asked for as much already."""
    return TRITON and x.is_cuda and x.dtype in KINDS and (torch.compiler.is_compiling() or modern(x.device))


def modern(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU from Ampere on, and is there: a fake tensor's need not be."""
    nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result  # a compiler asks once, where it traces; it traces anew under other transforms
def differentiates_backwards() -> bool:
    """Whether nobody uses the transforms of torch.func or forward mode, which need rules of their own."""
    return not (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


def exporting() -> bool:
    """Whether a program for elsewhere is being made, which is to have PyTorch's own operations."""
    # The flag, which PyTorch 2.6 does not have: where torch.compile traces, some versions call that exporting too.
    return getattr(torch.compiler, "_is_exporting_flag", False) or torch.jit.is_tracing()


def may_fuse_layers() -> bool:
    """Whether layers may be taken together: no export, no transform and no hook on all modules asks for each."""
    hooks = not torch.compiler.is_compiling() and has_global_hooks()
    return differentiates_backwards() and not exporting() and not hooks
