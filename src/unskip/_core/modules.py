"""A network under measurement and what must be as before afterwards: mode, buffers, gradients, random state."""

import copy
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.modules.lazy import LazyModuleMixin as Lazy
from torch.nn.parameter import is_lazy

from unskip._core.errors import reason
from unskip._core.rng import own_generators_preserved

_ONE_AT_A_TIME = threading.RLock()
M = TypeVar("M", bound=nn.Module)


def unwrap(network: nn.Module) -> nn.Module:
    """The network itself, out of torch.compile's, DataParallel's and DistributedDataParallel's wrappers."""
    distributed = isinstance(network, nn.parallel.DistributedDataParallel | nn.DataParallel)
    inner = getattr(network, "module" if distributed else "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else network


def checked_model(command: str, model: object, argument: str = "model") -> nn.Module:
    """The model out of its wrappers; refused if it is no nn.Module, or one whose code can't be seen."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{command}: {argument}={model!r} is not an nn.Module; build the network first, for instance with "
            "timm.create_model(name)."
        )
    model = unwrap(model)
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{command}: {path or argument!r} is a ScriptModule, whose code can't be seen; give the module that "
                "it was made from."
            )
    return model


def copied(command: str, model: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy of the model, or a sentence that says why there is none."""
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # attributes may be anything: a lock, a generator, an open file, a tensor of a graph
        raise ValueError(
            f"{command}: {type(model).__name__} can't be copied: {reason(error)}. Take away attributes that can't be "
            "copied (locks, generators, open files); weights that are made from others must become plain ones, for "
            "instance with torch.nn.utils.prune.remove(layer, 'weight')."
        ) from error


@contextmanager
def preserved(network: nn.Module) -> Iterator[None]:
    """Whatever happens inside, the network and the random generators are afterwards as they were.

    Attributes and training mode of every module, the values of buffers (and which tensors they are), `.grad` and
    `requires_grad` of every parameter; the generators of PyTorch (CPU, and CUDA where it is in use), numpy and Python,
    and those that modules hold as attributes.

    One thread at a time: the mode of a network, its buffers and the generators belong to the whole process.
    """
    with _ONE_AT_A_TIME, own_generators_preserved(network):
        modes = [(module, module.training) for module in network.modules()]
        # A lazy module becomes another class when it first runs, with other attributes.
        attributes = [(module, dict(vars(module))) for module in network.modules() if not isinstance(module, Lazy)]
        buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in network.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)  # which has no value yet
        ]
        parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in network.parameters()]
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        python, numbers = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
            for module, mode in modes:
                module.training = mode
            for module, before in attributes:
                for name in vars(module).keys() - before.keys():
                    del vars(module)[name]
                vars(module).update(before)
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer
            for parameter, requires_grad, grad in parameters:
                parameter.requires_grad_(requires_grad)
                parameter.grad = grad


def has_global_hooks(*, backward: bool = True) -> bool:
    """Whether a forward hook (or a backward hook) is registered for all modules of the process.

    PyTorch 2.6 has no function that says so.
    """
    registries = ("forward_pre", "forward", *(("backward_pre", "backward") if backward else ()))
    return any(getattr(nn_module, f"_global_{kind}_hooks") for kind in registries)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody waits for the module itself to be called: by a hook, or by a `forward` of its own.

    The latter is Accelerate's way, which may bring the weights only then.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names) or "forward" in module.__dict__


def vocabulary(model: nn.Module) -> int:
    """How many tokens a network knows whose first layer is an embedding; 0 for any other network."""
    layers = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.Linear | nn.modules.conv._ConvNd))
    first = next(layers, None)
    return first.num_embeddings if isinstance(first, nn.Embedding) else 0


def square(conv: nn.Conv2d) -> bool:
    """A square, odd kernel with one stride, one dilation and the zero padding that keeps the size at stride 1."""
    k, d = conv.kernel_size[0], conv.dilation[0]
    same = (d * (k - 1) // 2,) * 2
    return (
        conv.kernel_size == (k, k)
        and k % 2 == 1
        and conv.dilation == (d, d)
        and conv.stride[0] == conv.stride[1]
        and conv.padding_mode == "zeros"
        and conv.padding == same
    )


def as_class(kind: type[M], module: nn.Module) -> M:
    """A copy of `module` as another class, with the same parameters, buffers, children and hooks."""
    new = kind.__new__(kind)
    new.__dict__ = {**module.__dict__}
    for name in ("_parameters", "_buffers", "_modules"):
        new.__dict__[name] = module.__dict__[name].copy()
    return new
