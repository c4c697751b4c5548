"""Method `looks_linear`: concatenated ReLUs behind mirrored weights, linear at initialisation.

Balduzzi et al. 2017, *The Shattered Gradients Problem: If resnets are the answer, then what is the question?*
(Hu compares with it in sections 4.1 and B.2):

    CReLU(x) = [ReLU(x), ReLU(-x)]       W = [V, -V] at initialisation, so that W CReLU(x) = V x

CReLU doubles the channels, so the layer before it has half of the block's width, and the network around the blocks
stays as it is. V is Delta-orthogonal, the choice here: the paper's orthogonal V for a convolution as for a matrix.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskip.coders import CoderBank
from unskip.methods.delta_orthogonal import delta_orthogonal_
from unskip.methods.norm_free import has_activation
from unskip.methods.plain import PlainBlock
from unskip.methods.registry import BlockMethod, register_method
from unskip.methods.spec import BlockSpec, Unsupported
from unskip.methods.widths import conv_like


class CReLU(nn.Module):
    """[ReLU(x), ReLU(-x)] along the channels: twice as many come out."""

    is_activation = True

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim  # of the channels: 1 behind a convolution, -1 behind a linear layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.relu(), (-x).relu()], dim=self.dim)


@register_method("looks_linear")
@dataclass(frozen=True, kw_only=True)
class LooksLinear(BlockMethod):
    """y = CReLU([V_2, -V_2] CReLU([V_1, -V_1] x)), without norms in the branch. Blocks without a skip stay as they are.

    A pre-activation block begins with a CReLU of x and ends without one; its norm goes. An MLP reads LN(x) as before.
    """

    gain: float = 1.0  # the singular values of V at initialisation

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gain > 0:
            raise ValueError(f"looks_linear: gain={self.gain} must be above 0; 1 keeps the norm of what passes.")

    def rebuild(self, spec: BlockSpec, bank: CoderBank) -> nn.Module:
        mlp = spec.family == "mlp"
        dim = -1 if mlp else 1
        preact = any(has_activation(module) for module in spec.pre)
        parts: list[nn.Module] = [CReLU(dim)] if preact else [*spec.pre]
        width = 2 * spec.in_features if preact else spec.in_features
        # Without a pre-activation a block reads what a block like itself has written.
        mirrored = preact or spec.out_act is not None
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.conv, nn.Conv2d) and layer.conv.groups > 1:
                raise Unsupported(
                    f"its convolution of {layer.conv.groups} groups can't subtract the two halves of a CReLU, which "
                    "lie in different groups"
                )
            act = spec.out_act if i == len(spec.layers) - 1 else layer.act
            if layer.out_features % 2 and act is not None:
                raise Unsupported(f"its width {layer.out_features} is odd, and a CReLU has an even number of channels")
            if mirrored and width % 2:
                raise Unsupported(f"it reads {width} channels, and what comes out of a CReLU is an even number of them")
            conv = conv_like(layer, width, layer.out_features // (1 if act is None else 2))
            delta_orthogonal_(conv, gain=self.gain, mirrored=mirrored)
            if conv.bias is not None:
                nn.init.zeros_(conv.bias)
            parts.append(conv)
            width = layer.out_features
            mirrored = act is not None
            if act is not None:
                parts.append(CReLU(dim))
            if layer.drop:
                parts.append(nn.Dropout(layer.drop))
        return PlainBlock(*parts)
