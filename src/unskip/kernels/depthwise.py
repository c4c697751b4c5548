"""A norm, its activation and a 3 x 3 depthwise convolution as one operation on a GPU.

    y = w ⊛ σ(s u + t)      s, t: the norm, as it acts on each channel      σ: ReLU, or ReLU6
    y = σ(w ⊛ σ(u + t) + b)     inference, with the norms folded; t: the bias of the convolution before

In an inverted bottleneck these are the widest activations, and all three layers do little more than read and write
them. Here u is read once and y is written (`unskip.kernels.depthwise_triton`); what the convolution reads never
exists, so that nothing but u is kept for the backward pass, which has one operation too:

    g_n = (0 < n < top) Σ_k w[k] g[p - k]     the gradient of n = s u + t, from g, that of y
    s g_n,  Σ g_n u,  Σ g_n,  Σ σ(n) g[p - k]     the gradients of u, s, t and w

The statistics of the batch are differentiated by autograd, as s and t depend on them.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from unskip._core.layers import Fast
from unskip._core.modules import as_class, has_hooks, square
from unskip.kernels.dispatch import HALF, has_kernels_for, may_fuse_layers

TOPS: dict[type[nn.Module], float] = {nn.ReLU: 0.0, nn.ReLU6: 6.0}  # 0: no bound
PRECISIONS = HALF  # in which the kernels were measured
MAX_PIXELS = 2**30  # of a batch, which the kernels count in 32 bits


def empty_output(u: Tensor, stride: int) -> Tensor:
    batch, channels, high, wide = u.shape
    shape = (batch, channels, high // stride, wide // stride)
    return torch.empty(shape, dtype=u.dtype, device=u.device, memory_format=torch.channels_last)


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("unskip::depthwise", mutates_args=())
def depthwise(u: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, stride: int, top: float) -> Tensor:
    """w ⊛ σ(s u + t), 3 x 3, padded by one.

    Args:
        u: (B, C, H, W), with even sides where the stride is 2.
        scale, shift: (C).
        weight: (C, 1, 3, 3).
        stride: 1 or 2.
        top: the bound of σ; 0 is none.
    """
    from unskip.kernels.depthwise_triton import convolve

    y = empty_output(u, stride)
    convolve(last(u), scale.contiguous(), shift.contiguous(), weight.contiguous(), None, y, stride, top)
    return y


@depthwise.register_fake
def _(u: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, stride: int, top: float) -> Tensor:
    return empty_output(u, stride)


@torch.library.custom_op("unskip::depthwise_gradient", mutates_args=())
def depthwise_gradient(
    g: Tensor, u: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, stride: int, top: float
) -> tuple[Tensor, Tensor]:
    """The gradient of u, and (11, C): those of the nine weights, of shift and of scale."""
    from unskip.kernels.depthwise_triton import differentiate

    out = torch.empty_like(u, memory_format=torch.channels_last)
    tensors = (last(g), last(u), scale.contiguous(), shift.contiguous(), weight.contiguous())
    return out, differentiate(*tensors, out, stride, top)


@depthwise_gradient.register_fake
def _(
    g: Tensor, u: Tensor, scale: Tensor, shift: Tensor, weight: Tensor, stride: int, top: float
) -> tuple[Tensor, Tensor]:
    sums = u.new_empty(11, u.shape[1], dtype=torch.promote_types(u.dtype, torch.float32))
    return torch.empty_like(u, memory_format=torch.channels_last), sums


@torch.library.custom_op("unskip::depthwise_folded", mutates_args=())
def depthwise_folded(u: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, stride: int, top: float) -> Tensor:
    """σ(w ⊛ σ(u + t) + b), 3 x 3, padded by one; arguments as in `depthwise`. It has no gradient."""
    from unskip.kernels.depthwise_triton import convolve

    y = empty_output(u, stride)
    shift = None if shift is None else shift.contiguous()
    convolve(last(u), None, shift, weight.contiguous(), bias.contiguous(), y, stride, top)
    return y


@depthwise_folded.register_fake
def _(u: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, stride: int, top: float) -> Tensor:
    return empty_output(u, stride)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.stride, ctx.top = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    u, scale, shift, weight = ctx.saved_tensors
    # Outside of the operator, so that a compiler writes the gradient in this layout in the first place.
    gradient, sums = depthwise_gradient(last(g), u, scale, shift, weight, ctx.stride, ctx.top)
    weights = sums[:9].T.reshape(weight.shape).to(weight.dtype)
    return gradient, sums[10].to(scale.dtype), sums[9].to(shift.dtype), weights, None, None


depthwise.register_autograd(_backward, setup_context=_keep)


def joined(layers: list[nn.Module], x: Tensor) -> tuple[Tensor, int] | None:
    """The result of the first few layers as one operation, and how many they are; None if they can't be one."""
    if not supports(x):
        return None
    norm = split_norm(layers[0])
    count = 4 - len(norm)
    ways: tuple[tuple[Callable[..., Tensor | None], int, list[nn.Module]], ...] = (
        (normed, count, [*norm, *layers[1:count]]),
        (folded, 3, layers[:3]),
        (folded_behind, 4, layers[:4]),
    )
    for join, count, first in ways:
        if len(layers) >= count and not any(map(has_hooks, first)) and (y := join(*first, x)) is not None:
            return y, count
    return None


def normed(norm: nn.Module, act: nn.Module, conv: nn.Module, x: Tensor) -> Tensor | None:
    """Training. Under torch.compile alone: it is the compiler that makes one pass of the batch's statistics."""
    if not torch.compiler.is_compiling() or type(act) not in TOPS or not isinstance(norm, nn.BatchNorm2d):
        return None
    if type(norm) is BatchNormAct2d and norm.act is not act:
        return None
    if not is_depthwise(conv, x, x.shape[1]) or conv.bias is not None or not plain(norm, x):
        return None
    scale, shift = as_affine(norm, x)
    return depthwise(x, scale, shift, conv.weight, conv.stride[0], TOPS[type(act)])


def folded(act: nn.Module, conv: nn.Module, behind: nn.Module, x: Tensor) -> Tensor | None:
    """Inference, with the norms folded."""
    if not is_folded(conv, act, behind, x, x.shape[1]):
        return None
    return depthwise_folded(x, None, conv.weight, conv.bias, conv.stride[0], TOPS[type(act)])


def folded_behind(first: nn.Module, act: nn.Module, conv: nn.Module, behind: nn.Module, x: Tensor) -> Tensor | None:
    """The same with the convolution before, whose bias would be one more pass over the widest activation."""
    if not is_pointwise(first, x) or not is_folded(conv, act, behind, x, first.out_channels):
        return None
    u = first._conv_forward(x, first.weight, None)
    return depthwise_folded(u, first.bias, conv.weight, conv.bias, conv.stride[0], TOPS[type(act)])


def is_folded(conv: nn.Module, act: nn.Module, behind: nn.Module, x: Tensor, channels: int) -> TypeGuard[nn.Conv2d]:
    """A depthwise convolution with a bias, between two activations of one kind, in inference."""
    acts = type(act) is type(behind) and type(act) in TOPS
    return acts and not torch.is_grad_enabled() and is_depthwise(conv, x, channels) and conv.bias is not None


def supports(x: Tensor) -> bool:
    """Whether the kernels apply to x: images in channels last and half precision on a GPU, and no global hooks."""
    return (
        isinstance(x, Tensor)
        and x.ndim == 4
        and x.dtype in PRECISIONS
        and has_kernels_for(x)
        and may_fuse_layers()
        and x.is_contiguous(memory_format=torch.channels_last)
        and 0 < x.numel() <= MAX_PIXELS * x.shape[1]
    )


def is_pointwise(conv: nn.Module, x: Tensor) -> TypeGuard[nn.Conv2d]:
    """A 1 x 1 convolution with a bias, of images like x."""
    return (
        type(conv) is nn.Conv2d
        and conv.bias is not None
        and conv.kernel_size == conv.stride == (1, 1)
        and conv.padding == (0, 0)
        and x.dtype == precision(x, conv.weight)
    )


def is_depthwise(conv: nn.Module, x: Tensor, channels: int) -> TypeGuard[nn.Conv2d]:
    """A supported convolution of so many channels whose stride divides the sides of x."""
    return (
        supports_conv(conv)
        and conv.groups == channels
        and all(side % conv.stride[0] == 0 for side in x.shape[2:])
        and x.dtype == precision(x, conv.weight)
    )


def supports_conv(conv: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether the kernels can compute this convolution: 3 x 3, depthwise, as many channels out as in, stride 1 or 2."""
    return (
        type(conv) is nn.Conv2d
        and square(conv)
        and conv.kernel_size == (3, 3)
        and conv.dilation == (1, 1)
        and conv.groups == conv.in_channels == conv.out_channels
        and conv.stride[0] in (1, 2)
    )


def split_norm(layer: nn.Module) -> list[nn.Module]:
    """timm's norm with an activation inside as [norm, activation]; any other layer as [layer]."""
    if type(layer) is not BatchNormAct2d or type(layer.drop) is not nn.Identity or has_hooks(layer.drop):
        return [layer]
    assert isinstance(layer.act, nn.Module)
    return [layer, layer.act]


def precision(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype that a convolution computes in: autocast's, or that of its weight."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def plain(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Whether a norm has its usual parts, not in half precision, and x has more than one value per channel."""
    usual = norm.affine and norm.track_running_stats and norm.momentum is not None
    whole = type(norm) in (nn.BatchNorm2d, BatchNormAct2d) and norm.num_features == x.shape[1]
    return whole and usual and norm.weight.dtype not in HALF and x.numel() > x.shape[1]


class Moments(torch.autograd.Function):
    """Mean and variance of each channel. PyTorch's own rule reads u once more to have its mean for the gradient."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(u.to(dtype), (0, 2, 3), correction=0)
        ctx.save_for_backward(u, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, g_mean: Tensor, g_var: Tensor) -> tuple[Tensor, None]:
        u, mean = ctx.saved_tensors
        count = u.numel() // u.shape[1]
        slope = 2 * g_var / count
        offset = g_mean / count - mean * slope
        gradient = u.to(mean.dtype) * slope.view(-1, 1, 1) + offset.view(-1, 1, 1)
        return gradient.to(u.dtype), None


def as_affine(norm: nn.BatchNorm2d, u: Tensor) -> tuple[Tensor, Tensor]:
    """s and t of the norm; in training from the batch, whose statistics its running ones move towards."""
    mean, var = norm.running_mean, norm.running_var
    assert mean is not None
    assert var is not None
    if norm.training:
        assert norm.momentum is not None
        assert norm.num_batches_tracked is not None
        batch_mean, batch_var = Moments.apply(u, mean.dtype)
        count, momentum = u.numel() // u.shape[1], norm.momentum
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            mean.mul_(1 - momentum).add_(batch_mean.detach(), alpha=momentum)
            var.mul_(1 - momentum).add_(batch_var.detach(), alpha=momentum * count / (count - 1))
        mean, var = batch_mean, batch_var
    rate = torch.rsqrt(var + norm.eps)
    # Not by way of the scale: Triton 3.6 can't compile a kernel that stores it and goes on with it.
    return norm.weight * rate, norm.bias - mean * rate * norm.weight


def open_sequences(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers in order, those inside an nn.Sequential too, without nn.Identity. A layer with hooks stays whole."""
    found: list[nn.Module] = []
    may_open = may_fuse_layers()
    for layer in layers:
        if may_open and is_plain_sequence(layer):
            found += open_sequences(layer)
        elif type(layer) is not nn.Identity or has_hooks(layer):
            found.append(layer)
    return found


def is_plain_sequence(layer: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether calling the layer is calling its layers: no hooks, no forward of its own, not compiled by itself."""
    sequence = isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward
    return sequence and not has_hooks(layer) and layer._compiled_call_impl is None


def advance(layers: list[nn.Module], x: Tensor) -> tuple[Tensor, int]:
    """The result of the first few layers as one operation, else of the first layer, and how many layers that was."""
    found = joined(layers, x)
    return (layers[0](x), 1) if found is None else found


def run_layers(
    layers: list[nn.Module],
    x: Tensor,
    advance: Callable[[list[nn.Module], Tensor], tuple[Tensor, int]] = advance,
) -> Tensor:
    """Runs the layers one after another; each call of `advance` is one operation."""
    while layers:
        x, done = advance(layers, x)
        layers = layers[done:]
    return x


class JoinedSequential(Fast, nn.Sequential):
    """An nn.Sequential that runs some layers as one operation, where that is the same function and faster."""

    def forward(self, x: Tensor) -> Tensor:
        return run_layers(open_sequences(self), x, self.advance)

    def advance(self, layers: list[nn.Module], x: Tensor) -> tuple[Tensor, int]:
        """The result of the first few layers, and how many they were."""
        return advance(layers, x)

    def to_ordinary(self) -> nn.Sequential:
        """The same layers as an nn.Sequential."""
        return as_class(nn.Sequential, self)
