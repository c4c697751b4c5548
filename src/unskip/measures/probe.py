"""Recording what modules put out, without leaving a trace in the network."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def record_outputs(network: nn.Module, paths: Iterable[str], x: Tensor) -> dict[str, Tensor]:
    """The outputs of the modules at `paths` in one forward pass, in the mode that the network is in.

    Buffers (BatchNorm's running statistics) are as before afterwards, and the hooks are gone, also after an error.
    """
    outputs: dict[str, Tensor] = {}

    def recorder(path: str) -> Callable[[nn.Module, object, Tensor], None]:
        def record(module: nn.Module, args: object, output: Tensor) -> None:
            outputs[path] = output.detach().clone()

        return record

    known = dict(network.named_modules())
    paths = list(paths)
    for path in paths:
        if path not in known:
            raise ValueError(f"record_outputs: {type(network).__name__} has no module {path!r}; see named_modules().")
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    hooks = []
    try:
        for path in paths:
            hooks.append(network.get_submodule(path).register_forward_hook(recorder(path)))
        network(x)
    finally:
        for hook in hooks:
            hook.remove()
        for name, buffer in network.named_buffers():
            buffer.copy_(before[name])
    return outputs
