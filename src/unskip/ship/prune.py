"""prune: takes channels away that are dead, and nothing else; the function stays.

A channel between two layers is dead if nobody reads it (the next layer's weights for it are zero), or if it is the same
number for every input (its own weights are zero) and that number is 0 or can go into the next layer's bias, which must
not pad: the zeros of a padded convolution are not that number. Channels that rm carries die with those that they copy.

Of a network that was folded in form 'fast', what a depthwise convolution reads stays a multiple of 8 channels, so that
the zeros stay that `fold` has filled it up with.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from unskip._core.layers import behaves_as, has_ordinary_weight
from unskip._core.modules import unwrap
from unskip.methods import CappedReLU, SReLU
from unskip.methods.pnnh import ALIGNED
from unskip.methods.spec import Conv, is_activation
from unskip.surgery.proof import find_example, hidden_decisions, in_float64, proven
from unskip.surgery.tracing import TraceStep, trace
from unskip.surgery.verify import Check

RELU = {"relu", "relu_"}
# Pooling gives each channel back; of a constant only those that never mix it with zeros.
KEEPS_ZERO = {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "mean", "amax", "flatten"}
KEEPS_CONSTANT = KEEPS_ZERO - {"avg_pool2d"}


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """What `prune` did. It stays with the network as its attribute `pruning`."""

    removed: dict[str, int]  # channels that are gone, by the path of the layer that wrote them
    exact: float  # relative error of the output in float64, before the weights were stored
    check: Check  # of the network that is returned, in its own dtype


def prune(model: nn.Module, *, example: Tensor | None = None) -> nn.Module:
    """The same function without its dead channels.

    Between two layers there may be activations, pooling and depthwise convolutions; norms end the search, so `fold`
    comes first. After `fold(network, form="fast")` a depthwise convolution keeps as many dead channels as make its
    number a multiple of 8, which is faster on a GPU. A network without dead channels comes back as it is.

    Args:
        model: in eval mode, as `fold` returns it. It stays untouched.
        example: a batch of inputs to check the result on; without it small random images that the network takes.

    Returns:
        A new network in the same dtype and on the same device. Its attribute `pruning` says what is gone, and holds
        the proof.
    """
    original = in_float64("prune", model)
    if why := hidden_decisions(original):
        raise ValueError(f"prune: {type(original).__name__!r} {why}")
    model = unwrap(model)
    x = find_example("prune", original, example)
    pruned = copy.deepcopy(original)
    removed = Counter[str]()
    multiple = ALIGNED if getattr(getattr(model, "folding", None), "form", "dense") == "fast" else 1
    while True:  # what a dead channel fed alone is dead the next time
        found = Counter(dict(_cut(chain, multiple) for chain in _chains(pruned, x)))
        if not found.total():
            break
        removed += found
    pruned, exact, check = proven("prune", model, original, pruned, x)
    pruned.pruning = Pruning(removed=dict(removed), exact=exact, check=check)  # type: ignore[assignment]
    return pruned


@dataclass
class _Chain:
    """A layer, what each of its channels passes alone, and the layer that alone reads them."""

    path: str
    writer: Conv
    between: list[TraceStep] = field(default_factory=list)
    reader: Conv | None = None

    @property
    def channels(self) -> int:
        return self.writer.weight.shape[0]


def _chains(model: nn.Module, x: Tensor) -> list[_Chain]:
    steps = trace(model, x.clone())
    runs = Counter(step.module for step in steps)
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)

    def alone(step: TraceStep) -> bool:
        """A layer that runs once and shares no weight."""
        module = step.module
        return (
            has_ordinary_weight(module) and runs[module] == 1 and all(holders[id(p)] == 1 for p in module.parameters())
        )

    chains = []
    for step in steps:
        if not alone(step) or _groups(step.module) > 1:
            continue
        assert isinstance(step.module, nn.Conv2d | nn.Linear)
        chain = _Chain(step.path, step.module)
        while len(step.readers) == 1:
            step = step.readers[0]
            if len(step.shape) < 2 or len(step.sources) != 1:
                break
            module = step.module
            if alone(step) and _groups(module) == 1:
                assert isinstance(module, nn.Conv2d | nn.Linear)
                if module.weight.shape[1] == chain.channels and len(step.shape) in (2, 4):
                    chain.reader = module
                    chains.append(chain)
                break
            depthwise = alone(step) and _groups(module) == chain.channels == step.shape[1]
            acts = _activates(module) and runs[module] <= _steps_of_one_call(module)
            if step.shape[1] != chain.channels or not (depthwise or acts or step.function in RELU | KEEPS_ZERO):
                break
            chain.between.append(step)
    return chains


def _groups(module: nn.Module) -> int:
    return module.groups if isinstance(module, nn.Conv2d) else 1


def _activates(module: nn.Module) -> bool:
    return is_activation(module) or behaves_as(module, CappedReLU, SReLU)


def _steps_of_one_call(module: nn.Module) -> float:
    """An activation with numbers for each channel belongs to one place, so it may run once; others may be shared."""
    if isinstance(module, CappedReLU):
        return 2  # its relu and its minimum
    return 1 if isinstance(module, SReLU | nn.PReLU) else float("inf")


@torch.no_grad()
def _cut(chain: _Chain, multiple: int = 1) -> tuple[str, int]:
    """Takes the dead channels of a chain away, and says how many there were.

    Where it has a depthwise convolution, so many of them stay that a multiple of `multiple` is left.
    """
    writer, reader = chain.writer, chain.reader
    assert reader is not None
    constant = ~writer.weight.flatten(1).any(1)
    value = torch.zeros(chain.channels, dtype=torch.float64) if writer.bias is None else writer.bias.clone()
    seen: list[nn.Module] = []
    for step in chain.between:
        module = step.module
        if isinstance(module, nn.Conv2d):
            own = module.weight.flatten(1).sum(1) * value.masked_fill(~constant, 0)
            bias = torch.zeros_like(value) if module.bias is None else module.bias
            padded = _pads(module)
            constant = ~module.weight.flatten(1).any(1) | (constant & ((value == 0) | (not padded)))
            value = own + bias
        elif step.function in RELU:
            value = value.relu()
        elif _activates(module):
            if module not in seen:
                value = copy.deepcopy(module)(value.view(1, -1, 1, 1)).flatten()
        elif step.function not in KEEPS_CONSTANT:
            constant = constant & (value == 0)
        seen.append(module)
    unread = ~reader.weight.transpose(0, 1).flatten(1).any(1)
    absorbed = constant & (value != 0) & (not _pads(reader))
    dead = unread | (constant & (value == 0)) | absorbed
    if dead.all():
        dead[0] = False  # a layer has at least one channel
    if any(isinstance(step.module, nn.Conv2d) for step in chain.between):
        spare = -int((~dead).sum()) % multiple
        dead[dead.nonzero()[max(0, int(dead.sum()) - spare) :]] = False
    if not dead.any():
        return chain.path, 0
    moved = value.masked_fill(~(absorbed & dead), 0)
    if moved.any():
        shift = (reader.weight.flatten(2).sum(2) if reader.weight.ndim > 2 else reader.weight) @ moved
        reader.bias = nn.Parameter(shift if reader.bias is None else reader.bias + shift)
    keep = ~dead
    _narrow(writer, keep, dim=0)
    for module in dict.fromkeys(step.module for step in chain.between):
        if isinstance(module, nn.Conv2d):
            _narrow(module, keep, dim=0)
            module.in_channels = module.groups = module.out_channels
        elif isinstance(module, nn.PReLU) and module.num_parameters > 1:
            module.weight = nn.Parameter(module.weight[keep])
            module.num_parameters = len(module.weight)
        elif isinstance(module, CappedReLU):
            module.cap = module.cap[keep]
        elif isinstance(module, SReLU):
            module.b = nn.Parameter(module.b[keep])
    _narrow(reader, keep, dim=1)
    return chain.path, int(dead.sum())


def _pads(layer: Conv) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.padding not in ("valid", (0, 0))


def _narrow(layer: Conv, keep: Tensor, *, dim: int) -> None:
    """Leaves only these channels of a layer: those that it writes (dim=0) or reads (dim=1)."""
    layer.weight = nn.Parameter(layer.weight[keep] if dim == 0 else layer.weight[:, keep])
    if dim == 0 and layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias[keep])
    count = int(keep.sum())
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif dim == 0:
        layer.out_channels = count
    else:
        layer.in_channels = count
