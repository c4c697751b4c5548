"""The stacked form: learner and coder as the one ordinary block that they are.

    W_1' = [W_1; W_enc],  W_2' = [W_2, W_dec]     a vanilla block or an MLP
    and between them the learner's k x k beside the coder's identity, as one block-diagonal convolution

BatchNorm is absorbed, so a block must be in eval mode. What comes out is convolution + bias + activation, nothing else.
"""

import copy
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from unskip._core.layers import fast_form, ordinary
from unskip.methods.spec import BlockSpec, Conv, Unsupported, centred, replace_weight, ungrouped


def stacked(model: nn.Module, *, fast: bool = False, dense: Collection[str] = (), command: str = "stack") -> nn.Module:
    """A copy of the model with every special layer as its ordinary one (`unskip._core.layers.SpecialLayer`).

    PNNH blocks become their stacked form, blocks of rm lose their norms, Dirac, tied and partial layers become plain.

    Args:
        model: in eval mode.
        fast: keep the layers that are faster than their ordinary ones.
        dense: paths of layers that become ordinary even then.
        command: the function that the user has called, for messages.
    """
    done: dict[nn.Module, nn.Module] = {}

    def form(module: nn.Module, path: str) -> nn.Module:
        if module not in done:
            kept = fast_form(module) if fast and path not in dense else None
            new = stack(module, path or "the block", command) if kept is None else kept
            done[module] = done[new] = new
            for name, child in new._modules.items():
                if child is not None:
                    new._modules[name] = form(child, f"{path}.{name}".lstrip("."))
        return done[module]

    return form(copy.deepcopy(model), "")


def stack(module: nn.Module, path: str = "the block", command: str = "stack") -> nn.Module:
    """A special layer as its ordinary one, for instance a PNNH block in its stacked form; any other as it is."""
    try:
        return ordinary(module)
    except Unsupported as reason:
        raise ValueError(f"{command}: {path} {reason}") from reason


def replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The model with every occurrence of the module `old` replaced by `new`."""
    if model is old:
        return new
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return model


def absorb(norm: nn.Module, layer: Conv) -> Conv:
    """A layer and the BatchNorm after it, in eval mode, as one layer. It is trainable if the given layer is.

    PyTorch's functions freeze the bias of a layer that had none, although the norm's shift in it was trained.
    """
    fuse = fuse_conv_bn_eval if isinstance(layer, nn.Conv2d) else fuse_linear_bn_eval
    fused: Conv = fuse(layer, norm)  # type: ignore[type-var, arg-type]
    if layer.bias is None and fused.bias is not None:
        fused.bias.requires_grad_(layer.weight.requires_grad)
    return fused


@torch.no_grad()
def stacked_layers(learner: Iterable[nn.Module], coder: nn.Module | None, multiple: int = 1) -> list[nn.Module]:
    """Learner and coder as convolution, activation, (convolution, activation,) convolution.

    Args:
        learner: its layers in eval mode.
        coder: a special layer.
        multiple: hidden channels of a depthwise convolution are filled up to a multiple of this, with zeros.
    """
    try:
        layers = BlockSpec(path="", branch=tuple(map(ordinary, learner))).layers
    except Unsupported as reason:
        raise Unsupported(
            f"can't become one ordinary block: {reason}. A layer whose weight is made from others is an ordinary "
            "one after torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')."
        ) from reason
    convs = []
    for layer in layers:
        if layer.norm is not None and getattr(layer.norm, "running_mean", None) is None:
            raise Unsupported(f"has a {type(layer.norm).__name__} that depends on its input; it can't be absorbed.")
        convs.append(layer.conv if layer.norm is None else absorb(layer.norm, layer.conv))
    if coder is not None:
        convs = stack_weights(convs, coder_kernels(coder, convs))
    if len(convs) == 3 and isinstance(middle := convs[1], nn.Conv2d) and middle.groups == middle.in_channels:
        spare = -middle.in_channels % multiple
        convs = stack_weights(convs, zero_weights(convs, spare)) if spare else convs
    found: list[nn.Module] = []
    for layer, conv in zip(layers, convs, strict=True):
        found += [conv] if layer.act is None else [conv, layer.act]
    return found


def coder_kernels(coder: nn.Module, convs: list[Conv]) -> list[Tensor]:
    """The weights of the coder's ordinary layers, one for each convolution of the learner, with that one's kernel."""
    weights = [layer.weight for layer in ordinary(coder).modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    if len(weights) == 2 and len(convs) == 3:
        weights.insert(1, nn.Parameter(weights[0].new_ones(len(weights[0]), 1, 1, 1)))  # the identity between the two
    return [centred(weight, conv.weight.shape[-1]) for weight, conv in zip(weights, convs, strict=True)]


def zero_weights(convs: list[Conv], channels: int) -> list[Tensor]:
    """The weights of hidden channels that do nothing, for the first convolution, the depthwise one and the last."""
    first, middle, last = (conv.weight for conv in convs)
    shapes = (channels, *first.shape[1:]), (channels, *middle.shape[1:]), (len(last), channels, *last.shape[2:])
    return [first.new_zeros(shape) for shape in shapes]


def stack_weights(convs: list[Conv], coder: list[Tensor]) -> list[Conv]:
    """The learner's convolutions with the coder's weights set beside them."""
    first = replace_weight(convs[0], torch.cat([convs[0].weight, coder[0]]), convs[0].bias)
    last = replace_weight(convs[-1], torch.cat([convs[-1].weight, coder[-1]], dim=1), convs[-1].bias)
    if len(convs) == 2:
        return [first, last]
    middle = convs[1]
    assert isinstance(middle, nn.Conv2d)
    weight, groups = stack_grouped(middle, coder[1])
    return [first, replace_weight(middle, weight, middle.bias, groups=groups), last]


def stack_grouped(conv: nn.Conv2d, pointwise: Tensor) -> tuple[Tensor, int]:
    """A grouped convolution beside one on each channel alone: block-diagonal, in as many groups as it can be."""
    size = conv.in_channels // conv.groups  # channels of a group
    code = pointwise.shape[0]
    if conv.in_channels == conv.out_channels and code % size == 0 and conv.groups > 1:
        identity = torch.eye(size, device=pointwise.device, dtype=pointwise.dtype).repeat(code // size, 1)
        return torch.cat([conv.weight, identity[..., None, None] * pointwise]), conv.groups + code // size
    weight = F.pad(ungrouped(conv.weight, conv.groups), (0, 0, 0, 0, 0, code, 0, code))
    index = torch.arange(code, device=weight.device)
    weight[conv.out_channels + index, conv.in_channels + index] = pointwise[:, 0]
    return weight, 1
