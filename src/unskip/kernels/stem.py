"""The stem of a network, faster on a GPU: the same convolution and the same pooling, computed another way.

    y[o] = Σ_k w[k] x[2 o + k - p]     a convolution of stride 2 over few channels. With x cut into 2 x 2 squares, whose
                                       four pixels stand side by side as channels, it is one of stride 1 over 4 C
                                       channels with half the kernel: no arithmetic is wasted on channels of padding.
    code[o] = argmax_k x[2 o + k - 1]  3 x 3 max pooling of stride 2. From the code of the winner, one byte for each
                                       output, the gradient of each of the four pixels of a square is a sum over the
                                       1, 2, 2 and 4 windows that the pixel stands in (`unskip.kernels.stem_triton`).
    max σ(u + b) = σ(max u + b)        for a bias b and ReLU σ, which rise with u, rounded or not: once norms are folded
                                       they can stand behind the pooling, where a quarter of the numbers is left.

The first two are modules with the parameters, the names in `state_dict` and the class of the ordinary ones, whose path
they take wherever the input is not what they are made for. No method depends on them, and their effect is measured
separately (docs/bench.md).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._core.layers import Fast, ordinary
from unskip._core.modules import as_class, has_hooks, square
from unskip.kernels.dispatch import HALF, differentiates_backwards, has_kernels_for, may_fuse_layers

ALIGNED = 16  # channels that tensor cores take as they are; fewer are padded by a kernel of its own


def space_to_depth_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, channels: int = ALIGNED) -> Tensor:
    """A convolution of stride 2 with odd kernel k and padding (k - 1) / 2 of an image with even sides.

    Args:
        x: (B, C, H, W).
        weight: (O, C, k, k).
        bias: (O).
        channels: how many the cut image is filled up to with zeros, beside its own 4 C.
    """
    kernel = weight.shape[-1]
    pad = kernel // 2
    front = pad % 2  # a column of zeros before the kernel, where it begins in the middle of a square, else behind it
    before, taps = (pad + front) // 2, (kernel + 1) // 2
    after = taps - 1 - before
    batch, inner, height, width = x.shape
    fill = max(0, channels - 4 * inner)
    squares = x.permute(0, 2, 3, 1).reshape(batch, height // 2, 2, width // 2, 2, inner)
    squares = squares.transpose(2, 3).reshape(batch, height // 2, width // 2, 4 * inner)
    squares = F.pad(squares, (0, fill, before, after, before, after)).permute(0, 3, 1, 2)
    w = F.pad(weight, (front, 1 - front) * 2).unflatten(3, (taps, 2)).unflatten(2, (taps, 2))  # (O, C, k, 2, k, 2)
    w = F.pad(w.permute(0, 2, 4, 3, 5, 1).flatten(3), (0, fill)).permute(0, 3, 1, 2)
    return F.conv2d(squares, w, bias)


@torch.library.custom_op("unskip::max_pool", mutates_args=())
def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """3 x 3 max pooling, stride 2, padding 1, of images with even sides, and which of the nine was the largest."""
    from unskip.kernels.stem_triton import pool

    largest, code = empty_pooled(x)
    pool(x.contiguous(memory_format=torch.channels_last), largest, code)
    return largest, code


@torch.library.custom_op("unskip::max_pool_gradient", mutates_args=())
def max_pool_gradient(gradient: Tensor, code: Tensor) -> Tensor:
    """The gradient of the images, from that of what was pooled."""
    from unskip.kernels.stem_triton import pool_gradient

    image = empty_image(gradient, code)
    layout = torch.channels_last
    pool_gradient(gradient.contiguous(memory_format=layout), code.contiguous(memory_format=layout), image)
    return image


@max_pool.register_fake
def empty_pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors for what pooling gives, in channels last."""
    batch, channels, height, width = x.shape
    shape = (batch, channels, height // 2, width // 2)
    return (
        torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last),
        torch.empty(shape, dtype=torch.int8, device=x.device, memory_format=torch.channels_last),
    )


@max_pool_gradient.register_fake
def empty_image(gradient: Tensor, code: Tensor) -> Tensor:
    batch, channels, high, wide = code.shape
    shape = (batch, channels, 2 * high, 2 * wide)
    return torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)


def winners(image: Tensor, code: Tensor) -> Tensor:
    """For each window, the pixel of `image` where the largest was. `max_pool_gradient` is the transpose of this."""
    high, wide = code.shape[2:]
    rows, columns = (torch.arange(side, device=code.device) * 2 - 1 for side in (high, wide))
    which = code.to(torch.int64)
    index = (rows[:, None] + which // 3) * (2 * wide) + columns + which % 3
    return image.flatten(2).gather(2, index.flatten(2)).unflatten(2, (high, wide))


def _keep(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> Tensor:
    (code,) = ctx.saved_tensors
    # Out here, where a compiler sees it and writes the gradient in this layout in the first place.
    return max_pool_gradient(gradient.contiguous(memory_format=torch.channels_last), code)


def _keep_code(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward_of_gradient(ctx: Any, image: Tensor) -> tuple[Tensor, None]:
    (code,) = ctx.saved_tensors
    return winners(image, code), None


max_pool.register_autograd(_backward, setup_context=_keep)
max_pool_gradient.register_autograd(_backward_of_gradient, setup_context=_keep_code)


def on_tensor_cores(x: Tensor) -> bool:
    """Whether a convolution of x runs where more channels cost nothing: in half precision on a GPU."""
    return x.is_cuda and (x.dtype in HALF or torch.is_autocast_enabled("cuda"))


def even(x: Tensor) -> bool:
    """Whether x is a batch of images with even sides. A symbolic trace (torch.fx) is not."""
    return isinstance(x, Tensor) and x.ndim == 4 and x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0 and x.numel() > 0


def is_stem(conv: nn.Conv2d) -> bool:
    """A square convolution of stride 2 with 'same' padding over few channels."""
    return (
        square(conv)
        and conv.stride == (2, 2)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.kernel_size[0] > 1
        and 4 * conv.in_channels <= ALIGNED
    )


def is_stem_pool(pool: nn.MaxPool2d) -> bool:
    """3 x 3 max pooling of stride 2 and padding 1 that gives nothing else."""
    settings = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    wanted = all(value in (number, (number, number)) for value, number in zip(settings, (3, 2, 1, 1), strict=True))
    return wanted and not pool.ceil_mode and not pool.return_indices


class StemConv2d(Fast, nn.Conv2d):
    """A convolution of stride 2, computed over squares of 2 x 2 pixels: in half precision on a GPU, for even sides."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if even(input) and on_tensor_cores(input) and is_stem(self):
            return space_to_depth_conv(input, weight, bias)
        return super()._conv_forward(input, weight, bias)

    def to_ordinary(self) -> nn.Conv2d:
        """The same convolution as an nn.Conv2d, with the same parameters."""
        return as_class(nn.Conv2d, self)


class StemPool(Fast, nn.MaxPool2d):
    """3 x 3 max pooling that keeps one byte for each output: on a GPU, in channels last, while training."""

    def forward(self, x: Tensor) -> Tensor:
        if (
            even(x)
            and is_stem_pool(self)
            and torch.is_grad_enabled()
            and x.requires_grad
            and x.is_contiguous(memory_format=torch.channels_last)
            and differentiates_backwards()
            and has_kernels_for(x)
        ):
            return max_pool(x)[0]
        return super().forward(x)

    def to_ordinary(self) -> nn.MaxPool2d:
        """The same pooling as an nn.MaxPool2d."""
        return as_class(nn.MaxPool2d, self)


class PooledStem(Fast, nn.Sequential):
    """A folded stem: convolution, ReLU and max pooling; in half precision on a GPU bias and ReLU behind the pooling.

    Elsewhere, in exported programs, and if one of the three has hooks, they run one after another.
    """

    def forward(self, x: Tensor) -> Tensor:
        conv, _, pool = self
        assert isinstance(conv, nn.Conv2d)
        apart = (
            not isinstance(x, Tensor) or not on_tensor_cores(x) or not may_fuse_layers() or any(map(has_hooks, self))
        )
        if apart or conv.bias is None:
            return super().forward(x)
        u = pool(conv._conv_forward(x, conv.weight, None))
        return F.relu_(u + conv.bias.to(u.dtype).view(-1, 1, 1))

    def to_ordinary(self) -> nn.Sequential:
        return nn.Sequential(*map(ordinary, self))


def is_folded_stem(conv: nn.Module, act: nn.Module, pool: nn.Module) -> bool:
    """Whether these layers, one after another, can be a PooledStem."""
    return type(conv) is StemConv2d and conv.bias is not None and type(act) is nn.ReLU and type(pool) is StemPool
