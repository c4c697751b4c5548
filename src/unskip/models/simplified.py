"""Simplified networks: one convolution a block, no norm, with or without a skip.

Yu and Tomasi 2019, arXiv:1905.10944, A and D.3.

A network of L = 3N + 2 layers is a stem, three stages of N blocks with 16, 32 and 64 channels, average pooling and a
linear classifier. Its block with the parameters p (plain) or r (residual) computes

    y = relu(p * x)    or    y = relu(x + r * x)

where a block that doubles the channels and halves the image adds every second pixel of x and zeros for new channels.
Both are the same functions: p = T(r) = r + rho with rho = 1 at the ID entries, Eq. (1); `unskip.models.equivalence`.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip.methods.pieces import PadShortcut
from unskip.methods.spec import BlockSpec, Unsupported, parts, replace_weight
from unskip.models.cifar import HE_WIDTHS, CifarNet
from unskip.models.named import CIFAR
from unskip.models.registry import register_network
from unskip.surgery import register_reader

Init = Literal["kwi", "hmwi"]
Lower = Literal["diagonal", "dense"]

ABOUT = {"family": "simplified", **CIFAR}


def sigma_p(S: int) -> float:
    """Kaiming weight initialisation, Eq. (3): sigma_p = sqrt(2 / S), S = CUV the size of a kernel."""
    return math.sqrt(2 / S)


def sigma_r(S: int) -> float:
    """Hardt-Ma weight initialisation, Eq. (4): sigma_r = 1 / S."""
    return 1 / S


class OneLayerBlock(nn.Module, ABC):
    """y = relu(p(x)) or, with a skip, y = relu(skip(x) + p(x)); p is one layer with a bias, `layer`."""

    conv: nn.Conv2d  # its kernel holds the ID entries
    skip_remedy = "unskip.models.to_plain makes this network plain, exactly"

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.skip: nn.Module | None = None

    @property
    def skip_free(self) -> bool:
        return self.skip is None

    @property
    def keeps_skip(self) -> bool:
        return self.skip is not None

    def layer(self, x: Tensor) -> Tensor:
        return self.conv(x)

    @abstractmethod
    def make_skip(self) -> nn.Module:
        """What the residual form adds to `layer`."""

    def rho(self) -> Tensor:
        """rho of Eq. (1) for `conv.weight`: 1 at the ID entries (c, c, 0, 0), c = 1 ... min(C, D), else 0."""
        return nn.init.dirac_(torch.zeros_like(self.conv.weight, requires_grad=False), self.conv.groups)

    def forward(self, x: Tensor) -> Tensor:
        response = self.layer(x)
        return self.act(response if self.skip is None else response + self.skip(x))


class SimplifiedBlock(OneLayerBlock):
    """One 3 x 3 convolution (Figure 5)."""

    def __init__(self, in_chs: int, out_chs: int, stride: int, *, residual: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chs, out_chs, 3, stride, 1)
        self.skip = self.make_skip() if residual else None

    def make_skip(self) -> nn.Module:
        stride, extra = self.conv.stride[0], self.conv.out_channels - self.conv.in_channels
        return PadShortcut(stride, extra) if stride > 1 or extra else nn.Identity()


@register_reader(SimplifiedBlock)
def read_simplified_block(block: nn.Module, path: str) -> BlockSpec:
    assert isinstance(block, SimplifiedBlock)
    shortcut = block.skip if isinstance(block.skip, PadShortcut) else None
    branch, skip = parts(block, "conv"), block.skip is not None
    return BlockSpec(path=path, branch=branch, shortcut=shortcut, skip=skip, out_act=block.act)


class RepeatShortcut(nn.Module):
    """Every stride-th pixel, and all channels `times` times: (x_1, ..., x_n, x_1, ..., x_n)."""

    def __init__(self, stride: int, times: int) -> None:
        super().__init__()
        self.stride = stride
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, :: self.stride, :: self.stride].repeat(1, self.times, 1, 1)


class DominantBlock(OneLayerBlock):
    """A block of which only the dominant path is left (D.3): each channel reads the channel of its own number.

    The kernel T_s is diagonal. T_r of a transition, 2n x n, has two diagonal halves, and both hold an identity: its
    channels c and n + c read channel c. With lower='dense' the lower half is a whole n x n kernel without an identity.
    """

    def __init__(self, in_chs: int, out_chs: int, stride: int, *, lower: Lower, residual: bool) -> None:
        super().__init__()
        dense = lower == "dense" and out_chs > in_chs
        self.times = 1 if dense else out_chs // in_chs
        diagonal = in_chs * self.times
        self.conv = nn.Conv2d(diagonal, diagonal, 3, stride, 1, groups=diagonal)
        self.lower = nn.Conv2d(in_chs, out_chs - in_chs, 3, stride, 1) if dense else None
        self.skip = self.make_skip() if residual else None

    def layer(self, x: Tensor) -> Tensor:
        upper = self.conv(x.repeat(1, self.times, 1, 1) if self.times > 1 else x)
        return upper if self.lower is None else torch.cat([upper, self.lower(x)], 1)

    def make_skip(self) -> nn.Module:
        stride = self.conv.stride[0]
        if self.lower is not None:
            return PadShortcut(stride, self.lower.out_channels)
        return RepeatShortcut(stride, self.times) if stride > 1 or self.times > 1 else nn.Identity()

    @torch.no_grad()
    def to_ordinary(self) -> nn.Sequential:
        """relu(p * x), p zero but where a channel reads the one of its own number, or all of them by `lower`."""
        if self.keeps_skip:
            raise Unsupported(f"keeps its skip connection; {self.skip_remedy}.")
        conv, lower = self.conv, self.lower
        if self.times == 1 and lower is None:
            return nn.Sequential(conv, self.act)
        inputs = conv.in_channels // self.times
        c = torch.arange(conv.out_channels, device=conv.weight.device)
        kernel = conv.weight.new_zeros(conv.out_channels, inputs, *conv.kernel_size)
        kernel[c, c % inputs] = conv.weight[:, 0]
        bias = conv.bias
        if lower is not None:
            assert bias is not None
            assert lower.bias is not None
            kernel, bias = torch.cat([kernel, lower.weight]), torch.cat([bias, lower.bias])
        return nn.Sequential(replace_weight(conv, kernel, bias), self.act)


class SimplifiedNet(CifarNet):
    """A simplified plain network or, with skips, a simplified ResNet (Figure 4).

    The initialisation belongs to the function, not to the form: KWI draws the plain weights p, HMWI draws the residual
    weights r, and the other form gets their image under T or its inverse. So one seed gives equivalent networks.
    """

    def __init__(
        self,
        *,
        blocks: int,  # N, in each stage
        residual: bool,  # whether blocks have skips
        init: Init | None = None,  # None: 'kwi' for a plain network, 'hmwi' for a residual one, as in section A
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,  # dropout before the classifier
        global_pool: str = "avg",  # '' for unpooled features, without a classifier
    ) -> None:
        super().__init__()
        init = init or ("hmwi" if residual else "kwi")
        if init not in ("kwi", "hmwi"):
            raise ValueError(f"SimplifiedNet: init={init!r} must be 'kwi' (Kaiming) or 'hmwi' (Hardt and Ma).")
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.conv1 = nn.Conv2d(in_chans, HE_WIDTHS[0], 3, 1, 1)
        self.bn1, self.norm, self.act = nn.Identity(), nn.Identity(), nn.Identity()
        self.act1 = nn.ReLU(inplace=True)

        def make(in_chs: int, out_chs: int, stride: int, index: int) -> nn.Module:
            return SimplifiedBlock(in_chs, out_chs, stride, residual=residual)

        self.add_stages(blocks, HE_WIDTHS[0], HE_WIDTHS, make)
        self.reset_classifier(num_classes, global_pool)
        sigma = sigma_p if init == "kwi" else sigma_r
        for conv in (self.conv1, *(block.conv for block in simplified_blocks(self))):
            nn.init.normal_(conv.weight, std=sigma(conv.weight[0].numel()))
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        if residual != (init == "hmwi"):
            shift(self, 1 if init == "hmwi" else -1)

    @property
    def skip_free(self) -> bool:
        return all(block.skip_free for block in simplified_blocks(self))

    def make_classifier(self, num_classes: int) -> nn.Module:
        """The paper does not say how it starts; what Table 4 leaves for its weights before training is sigma = 1/16."""
        fc = super().make_classifier(num_classes)
        if isinstance(fc, nn.Linear):
            nn.init.normal_(fc.weight, std=0.5 / math.sqrt(self.num_features))
            nn.init.zeros_(fc.bias)
        return fc


def simplified_blocks(model: nn.Module) -> Iterator[OneLayerBlock]:
    """The blocks of simplified networks in a module, in order."""
    return (module for module in model.modules() if isinstance(module, OneLayerBlock))


@torch.no_grad()
def shift(model: nn.Module, sign: int) -> None:
    """Adds sign times rho to the weights of each block, in place."""
    for block in simplified_blocks(model):
        block.conv.weight += sign * block.rho()


def simplified_net(depth: int, *, residual: bool, **kwargs: Any) -> SimplifiedNet:
    """The simplified network of this depth for CIFAR."""
    if depth % 3 != 2 or depth < 5:
        raise ValueError(f"simplified_net: depth={depth} must be 3N + 2 with N >= 1, for instance 20, 32 or 44.")
    return SimplifiedNet(blocks=depth // 3, residual=residual, **kwargs)


@torch.no_grad()
def dominant_paths(model: nn.Module, *, lower: Lower = "diagonal") -> nn.Module:
    """The network T' of D.3: a copy of a simplified network that keeps the weights on the dominant paths and no others.

    A channel reads the channel of its own number alone; the channels that a transition adds (n + c) read channel c and
    have an identity there too. Stem, biases and classifier stay. The copy has skips where the network has them.

    Args:
        model: a simplified network, plain or residual.
        lower: 'dense' keeps all weights of the channels that a transition adds (the end of D.3).
    """
    if lower not in ("diagonal", "dense"):
        raise ValueError(f"dominant_paths: lower={lower!r} must be 'diagonal' or 'dense'.")
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    blocks = {path: block for path, block in named if isinstance(block, OneLayerBlock)}
    if any(isinstance(block, DominantBlock) for block in blocks.values()):
        raise ValueError(f"dominant_paths: {type(model).__name__} has only its dominant paths already.")
    if not blocks:
        raise ValueError(
            f"dominant_paths: {type(model).__name__} has no block of a simplified network; build one with "
            "unskip.create_model('simplified_resnet20') or another depth."
        )
    copied = copy.deepcopy(model)
    for path, block in blocks.items():
        conv = block.conv
        n, out_chs = conv.in_channels, conv.out_channels
        new = DominantBlock(n, out_chs, conv.stride[0], lower=lower, residual=block.skip is not None).to(conv.weight)
        kept = new.conv.out_channels
        c = torch.arange(kept)
        new.conv.weight.copy_(conv.weight[c, c % n][:, None])
        if block.skip is None:
            new.conv.weight[n:] += new.rho()[n:]  # where rho of the whole kernel has no entry
        new.conv.bias.copy_(conv.bias[:kept])  # type: ignore[union-attr, index]
        if new.lower is not None:
            new.lower.weight.copy_(conv.weight[kept:])
            new.lower.bias.copy_(conv.bias[kept:])  # type: ignore[union-attr, index]
        copied.set_submodule(path, new.train(block.training))
    return copied


def dominant_net(
    depth: int,
    *,
    lower: Lower = "diagonal",
    num_classes: int = 10,
    in_chans: int = 3,
    drop_rate: float = 0.0,
    global_pool: str = "avg",
) -> nn.Module:
    """The network T' of this depth, in plain form, its R drawn as a simplified ResNet's (HMWI)."""
    sizes: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans, "drop_rate": drop_rate}
    sizes["global_pool"] = global_pool
    return dominant_paths(simplified_net(depth, residual=False, init="hmwi", **sizes), lower=lower)


for depth in (20, 32, 44):
    for form in ("plain", "resnet"):
        build = partial(simplified_net, depth, residual=form == "resnet")
        register_network(f"simplified_{form}{depth}", build, options=("init",), **ABOUT)
    register_network(f"simplified_dominant{depth}", partial(dominant_net, depth), options=("lower",), **ABOUT)
