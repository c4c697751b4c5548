"""A network of this folder as the library's: same weights, same function.

The blocks of `networks.py` are the library's with other names; `tests/models/test_wide.py` compares the two in float64.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from unskip.coders import Coder, CoderRef
from unskip.methods import CentredConv2d, PNNHBlock
from unskip.methods.plain import PlainBlock
from unskip.models.cifar import CifarBlock

INSIDE: dict[type[nn.Module], dict[str, str]] = {
    PNNHBlock: {"learner.conv1": "conv1", "learner.norm1": "norm1", "learner.conv2": "conv2"},
    CifarBlock: {"conv1": "conv1", "bn1": "norm1", "conv2": "conv2", "bn2": "norm2"},
    PlainBlock: {"0": "conv1", "1": "norm1", "3": "conv2", "4": "norm2"},
}
NORM = {"weight": "weight", "bias": "bias", "running_mean": "mean", "running_var": "var"}


def names(library: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(path in the library, path here, layer) of every layer with weights."""
    yield "conv1", "stem", library.get_submodule("conv1")
    yield "bn1", "stem_norm", library.get_submodule("bn1")
    blocks = [(path, m) for path, m in library.named_modules() if isinstance(m, tuple(INSIDE))]
    for i, (path, block) in enumerate(blocks):
        for ours, theirs in INSIDE[type(block)].items():
            yield f"{path}.{ours}", f"blocks.{i}.{theirs}", block.get_submodule(ours)
    norm = library.get_submodule("norm")
    if not isinstance(norm, nn.Identity):
        yield "norm", "head_norm", norm
    yield "fc", "head", library.get_submodule("fc")


def without_coders(library: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with fitted coders cut off from the convolutions that hold them here; the library has its own."""
    state = dict(state)
    blocks = [m for m in library.modules() if isinstance(m, tuple(INSIDE))]
    for i, block in enumerate(blocks):
        coder = getattr(block, "coder", None)
        coder = coder.coder if isinstance(coder, CoderRef) else coder
        names = f"blocks.{i}.conv1.weight", f"blocks.{i}.conv2.weight"
        hidden = len(state[f"blocks.{i}.norm1.weight"])
        if len(state[names[0]]) == hidden:
            continue
        first, second = (state[name] for name in names)
        if not isinstance(coder, Coder) or not all(
            # They are stored in bfloat16.
            torch.allclose(ours.to(theirs.dtype), theirs, rtol=1e-2, atol=1e-6)
            for ours, theirs in ((coder.enc, first[hidden:]), (coder.dec, second[:, hidden:]))
        ):
            raise ValueError(f"blocks.{i}: its fitted coder is not that of the library's block.")
        state[names[0]], state[names[1]] = first[:hidden], second[:, :hidden]
    return state


@torch.no_grad()
def load(library: nn.Module, state: dict[str, Tensor]) -> None:
    """Puts the weights of a network of this folder (`Trainer.weights`, or its `state_dict`) into the library's."""
    state = without_coders(library, state)
    left = {name for name in state if not name.endswith((".matrix", ".decoder"))}
    for path, name, layer in names(library):
        if isinstance(layer, CentredConv2d):
            weight = state[f"{name}.weight"]
            reads, full = layer.side == "reads", layer.weight.shape[layer.side == "reads"]
            carried, rest = (weight[:, :full], weight[:, full:]) if reads else (weight[:full], weight[full:])
            k = weight.shape[-1] // 2
            outside = rest.clone()
            outside[:, :, k, k] = 0
            if outside.any():
                raise ValueError(f"{name}: weights around the centre are not zero, so this network is not centred.")
            layer.weight.copy_(carried)
            layer.centre.copy_(rest[:, :, k : k + 1, k : k + 1])
            left.discard(f"{name}.weight")
            continue
        tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        for ours, tensor in tensors.items():
            if ours != "num_batches_tracked":
                theirs = f"{name}.{NORM[ours]}"
                assert tensor.shape == state[theirs].shape, f"{path}.{ours} and {theirs} differ in shape"
                tensor.copy_(state[theirs])
                left.discard(theirs)
    if left:
        raise ValueError(f"The library's network has no place for {', '.join(sorted(left))}.")
