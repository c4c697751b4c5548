"""Method `delta_tanh`: convolution and tanh, nothing else, at the critical Delta-orthogonal initialisation.

Xiao et al. 2018, *Dynamical Isometry and a Mean Field Theory of CNNs: How to Train 10,000-Layer Vanilla Convolutional
Neural Networks* (reference [17] of Oyedotun et al. 2020). With weights of gain σ_w and biases of deviation σ_b, the
variance q of pre-activations and the growth χ of a gradient over one layer are, for z ~ N(0, 1),

    q* = σ_w² E[tanh(√q* z)²] + σ_b²       χ = σ_w² E[tanh'(√q* z)²]

and signals pass to any depth where χ = 1.
"""

import math
from dataclasses import dataclass

from torch import nn

from unskip.coders import CoderBank
from unskip.methods.delta_orthogonal import delta_orthogonal_
from unskip.methods.norm_free import norm_free
from unskip.methods.registry import BlockMethod, register_method
from unskip.methods.spec import BlockSpec, Conv


@register_method("delta_tanh")
@dataclass(frozen=True, kw_only=True)
class DeltaTanh(BlockMethod):
    """y = tanh(W_2 tanh(W_1 x + b_1) + b_2), W_i Delta-orthogonal. Blocks without a skip stay as they are."""

    gain: float = math.sqrt(1.05)  # σ_w; with σ_b on the critical line χ = 1
    bias: float = math.sqrt(2.01e-5)  # σ_b

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gain > 0:
            raise ValueError(f"delta_tanh: gain={self.gain} must be above 0; 1 keeps the norm of small signals.")
        if not self.bias >= 0:
            raise ValueError(f"delta_tanh: bias={self.bias} is a standard deviation and must not be negative.")

    def rebuild(self, spec: BlockSpec, bank: CoderBank) -> nn.Module:
        return norm_free(spec, act=lambda channels: nn.Tanh(), initialise=self.initialise, bias=True)

    def initialise(self, conv: Conv) -> None:
        delta_orthogonal_(conv, gain=self.gain)
        assert conv.bias is not None
        nn.init.normal_(conv.bias, std=self.bias)
