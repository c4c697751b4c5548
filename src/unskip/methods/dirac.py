"""Method `dirac`: the skip inside of the weights.

The DiracNet rows of Zhang et al. 2024, arXiv:2402.08645 and Hu, github.com/hukkai/no-residual-network.

Zagoruyko and Komodakis 2017, *DiracNets: Training Very Deep Neural Networks Without Skip-Connections*:

    Ŵ = diag(a) I + diag(b) W_norm       a = 1, b = 0.1 at initialisation and trained, one for each output channel

I is the identity of convolution, W_norm has filters of norm 1. Trained, Ŵ is one ordinary weight (`to_ordinary`).
Where the width changes, I carries input channel o mod C_in to output channel o; at stride 2, every second pixel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from unskip._core.modules import square
from unskip.coders import CoderBank
from unskip.methods.plain import Plain, PlainBlock
from unskip.methods.registry import BlockMethod, register_method
from unskip.methods.seq import TiedConv
from unskip.methods.spec import (
    LAYERS,
    BlockSpec,
    Conv,
    Unsupported,
    centred,
    conv_arguments,
    describe,
    factory,
    replace_weight,
)


def identity_kernel(weight: Tensor, groups: int = 1) -> Tensor:
    """I in the shape (out, in / groups, ...) of a weight: channel o reads channel o mod C_in of its group."""
    rows, columns = weight.shape[0] // groups, weight.shape[1]
    eye = torch.eye(columns, device=weight.device, dtype=weight.dtype)
    kernel = eye.repeat(-(-rows // columns), 1)[:rows].repeat(groups, 1)  # (out, in / groups)
    return kernel if weight.ndim == 2 else centred(kernel[..., None, None], weight.shape[-1])


@fx.wrap  # a trace (torchvision's create_feature_extractor) calls it whole, for it asks for the weight's shape
def dirac_weight(W: Tensor, a: Tensor, b: Tensor, groups: int = 1) -> Tensor:
    """Ŵ = diag(a) I + diag(b) W_norm."""
    column = (-1, *[1] * (W.ndim - 1))
    W_norm = W / W.flatten(1).norm(dim=1).clamp_min(1e-12).view(column)
    return a.view(column) * identity_kernel(W, groups) + b.view(column) * W_norm


class DiracConv2d(nn.Conv2d):
    """A convolution with the weight Ŵ, computed from `weight`, `a` and `b` at each call."""

    a: Tensor
    b: Tensor

    def __init__(self, like: nn.Conv2d, a: float, b: float) -> None:
        if not square(like):
            raise ValueError(f"DiracConv2d: like={like} must be a square, odd convolution with 'same' zero padding.")
        settings = {**conv_arguments(like), "groups": like.groups, "bias": like.bias is not None}
        super().__init__(like.in_channels, like.out_channels, **settings)
        start(self, a, b)

    def dirac_weight(self) -> Tensor:
        return dirac_weight(self.weight, self.a, self.b, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.dirac_weight(), self.bias)

    def to_ordinary(self) -> Conv:
        return replace_weight(self, self.dirac_weight(), self.bias, groups=self.groups)


class DiracLinear(nn.Linear):
    """A linear layer with the weight Ŵ: a convolution of one tap."""

    a: Tensor
    b: Tensor

    def __init__(self, like: nn.Linear, a: float, b: float) -> None:
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None, **factory(like))
        start(self, a, b)

    def dirac_weight(self) -> Tensor:
        return dirac_weight(self.weight, self.a, self.b)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dirac_weight(), self.bias)

    def to_ordinary(self) -> Conv:
        return replace_weight(self, self.dirac_weight(), self.bias)


def start(layer: DiracConv2d | DiracLinear, a: float, b: float) -> None:
    """Gives a layer its `a` and `b`, and a normal W, of which only the direction counts."""
    nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    channels = layer.weight.shape[0]
    layer.a = nn.Parameter(layer.weight.new_full((channels,), a))
    layer.b = nn.Parameter(layer.weight.new_full((channels,), b))


@register_method("dirac")
@dataclass(frozen=True, kw_only=True)
class Dirac(BlockMethod):
    """The block's branch without its shortcut, its convolutions Dirac-parameterised; norms and activations stay.

    Blocks without a skip stay as they are.
    """

    a: float = 1.0  # of the identity, at initialisation
    b: float = 0.1  # of the normalised weight, at initialisation

    def rebuild(self, spec: BlockSpec, bank: CoderBank) -> nn.Module:
        return PlainBlock(*[self._layer(module) for module in Plain().rebuild(spec, bank)])

    def _layer(self, module: nn.Module) -> nn.Module:
        if type(module) is nn.Linear:
            return DiracLinear(module, self.a, self.b)
        if type(module) is nn.Conv2d:
            if not square(module):
                raise Unsupported(f"{describe(module)} is not a square convolution with 'same' zero padding")
            return DiracConv2d(module, self.a, self.b)
        if isinstance(module, LAYERS):
            raise Unsupported(f"{describe(module)} has no Dirac-parameterised form")
        if isinstance(module, TiedConv):
            raise Unsupported("its tied convolution has no weight of its own to parameterise; tie='none' has")
        return module
