"""The stacked form: learner and coder as the one ordinary block that they are.

    W_1' = [W_1; W_enc],  W_2' = [W_2, W_dec]     a vanilla block or an MLP
    and between them the learner's k x k beside the coder's identity, as one block-diagonal convolution

BatchNorm is absorbed, so a block must be in eval mode. What comes out is convolution + bias + activation, nothing else.
"""

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from unskip.coders import Coder, CoderRef, TransitionCoder
from unskip.kernels.depthwise import JoinedSequential
from unskip.methods.dirac import DiracConv2d, DiracLinear, fold_dirac
from unskip.methods.partial import PartialConv2d
from unskip.methods.pnnh import PNNHBlock
from unskip.methods.rm import RMBlock, absorbed
from unskip.methods.seq import TiedConv
from unskip.methods.spec import BlockSpec, Conv, Unsupported, replace_weight


def stacked(network: nn.Module, *, keep: Collection[str] = (), multiple: int = 1) -> nn.Module:
    """A copy of the network with every PNNH block in its stacked form, every Dirac, tied or centred layer a plain one.

    Blocks of rm come without their norms.

    Args:
        network: in eval mode.
        keep: paths of PNNH blocks that stay as they are.
        multiple: hidden channels of a depthwise convolution are filled up to a multiple of this, with zeros.
    """
    network = copy.deepcopy(network)
    for path, module in list(network.named_modules()):
        if isinstance(module, PNNHBlock) and path not in keep:
            plain: nn.Module = stack(module, path or "the block", multiple)
        elif isinstance(module, RMBlock):
            plain = absorbed(module).train(module.training)
        else:
            plain = plain_layer(module)
        if plain is module:
            continue
        network = replaced(network, module, plain)
    return network


def plain_layer(module: nn.Module) -> nn.Module:
    """A layer whose weight is made from others as the ordinary one that it is; any other module as it is."""
    if isinstance(module, DiracConv2d | DiracLinear):
        return fold_dirac(module).train(module.training)
    if isinstance(module, TiedConv):
        return module.untied().train(module.training)
    return module.plain().train(module.training) if isinstance(module, PartialConv2d) else module


def replaced(network: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The network with one module in the place of another, wherever that stands."""
    if network is old:
        return new
    for parent in network.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return network


def absorb(norm: nn.Module, layer: Conv) -> Conv:
    """A layer and the BatchNorm behind it, in eval mode, as one layer, which trains on if the given one does.

    PyTorch's functions freeze the bias of a layer that had none, although the norm's shift in it was trained.
    """
    fuse = fuse_conv_bn_eval if isinstance(layer, nn.Conv2d) else fuse_linear_bn_eval
    fused: Conv = fuse(layer, norm)  # type: ignore[type-var, arg-type]
    if layer.bias is None and fused.bias is not None:
        fused.bias.requires_grad_(layer.weight.requires_grad)
    return fused


def stack(block: PNNHBlock, path: str = "the block", multiple: int = 1) -> nn.Sequential:
    """One PNNH block as pre, convolution, activation, (convolution, activation,) convolution, activation.

    `multiple` is that of `stacked`.
    """
    if block.training:
        raise ValueError(
            f"stack: {path} is in training mode, where BatchNorm depends on the batch; call .eval() first."
        )
    try:
        layers = BlockSpec(path=path, branch=tuple(map(plain_layer, block.learner))).layers
    except Unsupported as reason:
        raise ValueError(
            f"stack: {path} can't become one ordinary block, for {reason}. A layer whose weight is made from others is "
            "an ordinary one after torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')."
        ) from reason
    convs = []
    for layer in layers:
        if layer.norm is None:
            convs.append(layer.conv)
        elif getattr(layer.norm, "running_mean", None) is not None:
            convs.append(absorb(layer.norm, layer.conv))
        else:
            raise ValueError(
                f"stack: the {type(layer.norm).__name__} in {path} depends on its input; it can't be absorbed."
            )
    if block.coder is not None:
        convs = beside(convs, stackable(block.coder, convs))
    if len(convs) == 3 and isinstance(middle := convs[1], nn.Conv2d) and middle.groups == middle.in_channels:
        spare = -middle.in_channels % multiple
        convs = beside(convs, zeros(convs, spare)) if spare else convs
    parts: list[nn.Module] = [*block.pre]
    for layer, conv in zip(layers, convs, strict=True):
        parts += [conv] if layer.act is None else [conv, layer.act]
    kind = JoinedSequential if isinstance(block.learner, JoinedSequential) else nn.Sequential
    return kind(*parts, block.act).eval()


def stackable(coder: nn.Module, convs: list[Conv]) -> list[Tensor]:
    """The coder's weights, one for each convolution of the learner, with that convolution's kernel."""
    kernels = [1 if isinstance(conv, nn.Linear) else conv.kernel_size[0] for conv in convs]
    if isinstance(coder, TransitionCoder):
        target, stride = held(coder.target), coder.stride
        dec = target.dec if coder.spread is None else torch.einsum("ob...,bc->oc...", target.dec, coder.spread)
        code = dec.shape[1]
        mix = torch.eye(code, device=dec.device, dtype=dec.dtype) if coder.mix is None else coder.mix
        if dec.ndim == 2:
            return [mix, dec]
        if len(convs) == 2:
            return [mix[..., None, None] * pooling_taps(dec, kernels[0], stride), widen(dec, kernels[1])]
        middle = dec.new_ones(code, 1, 1, 1) * pooling_taps(dec, kernels[1], stride)
        return [mix[..., None, None], middle, widen(dec, kernels[2])]
    weights = held(coder)
    if len(convs) == 2:
        return [widen(weights.enc, kernels[0]), widen(weights.dec, kernels[1])]
    middle = widen(weights.enc.new_ones(weights.enc.shape[0], 1, 1, 1), kernels[1])
    return [weights.enc, middle, weights.dec]


def zeros(convs: list[Conv], channels: int) -> list[Tensor]:
    """The weights of hidden channels that do nothing, for the first convolution, the depthwise one and the last."""
    first, middle, last = (conv.weight for conv in convs)
    shapes = (channels, *first.shape[1:]), (channels, *middle.shape[1:]), (len(last), channels, *last.shape[2:])
    return [first.new_zeros(shape) for shape in shapes]


def held(coder: nn.Module) -> Coder:
    coder = coder.coder if isinstance(coder, CoderRef) else coder
    assert isinstance(coder, Coder)
    return coder


def widen(weight: Tensor, kernel: int) -> Tensor:
    """A kernel in the middle of a larger one."""
    if weight.ndim == 2 or weight.shape[-1] == kernel:
        return weight
    return F.pad(weight, [(kernel - weight.shape[-1]) // 2] * 4)


def pooling_taps(like: Tensor, kernel: int, stride: int) -> Tensor:
    """Average pooling of stride x stride windows as a k x k kernel: the taps from the centre on."""
    taps = like.new_zeros(kernel, kernel)
    centre = kernel // 2
    taps[centre : centre + stride, centre : centre + stride] = 1 / stride**2
    return taps


def beside(convs: list[Conv], coder: list[Tensor]) -> list[Conv]:
    """The learner's convolutions with the coder's weights set beside them."""
    first = replace_weight(convs[0], torch.cat([convs[0].weight, coder[0]]), extra_bias=coder[0].shape[0])
    last = replace_weight(convs[-1], torch.cat([convs[-1].weight, coder[-1]], dim=1))
    if len(convs) == 2:
        return [first, last]
    middle = convs[1]
    assert isinstance(middle, nn.Conv2d)
    weight, groups = beside_grouped(middle, coder[1])
    return [first, replace_weight(middle, weight, extra_bias=coder[1].shape[0], groups=groups), last]


def beside_grouped(conv: nn.Conv2d, pointwise: Tensor) -> tuple[Tensor, int]:
    """A grouped convolution beside one on each channel alone: block-diagonal, in as many groups as it can be."""
    size = conv.in_channels // conv.groups  # channels of a group
    code = pointwise.shape[0]
    if conv.in_channels == conv.out_channels and code % size == 0 and conv.groups > 1:
        own = (
            torch.eye(size, device=pointwise.device, dtype=pointwise.dtype).repeat(code // size, 1)[..., None, None]
            * pointwise
        )
        return torch.cat([conv.weight, own]), conv.groups + code // size
    rows = conv.out_channels // conv.groups
    weight = conv.weight.new_zeros(conv.out_channels + code, conv.in_channels + code, *conv.kernel_size)
    for g in range(conv.groups):
        own_rows = slice(g * rows, (g + 1) * rows)
        weight[own_rows, g * size : (g + 1) * size] = conv.weight[own_rows]
    index = torch.arange(code, device=weight.device)
    weight[conv.out_channels + index, conv.in_channels + index] = pointwise[:, 0]
    return weight, 1
