"""PNNH for gated MLPs (SwiGLU): W_2 (σ(W_g x) * W_1 x).

A constant gate carries exactly: a hidden unit whose gate reads nothing, σ(b), times x_c / σ(b), is x_c for any σ with
σ(b) ≠ 0. One unit carries a channel with its sign, where an MLP without gates takes two.
"""

from collections.abc import Callable

import torch
from timm.layers import SwiGLU
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.methods.inits import orthogonal_like
from unskip.methods.spec import BlockSpec, Unsupported, factory

GATE = 1.0  # b


class GatedCarryBlock(nn.Module):
    """y = learner(pre(x)) + the first C_B channels of pre(x), a gated MLP of width H."""

    skip_free = True

    def __init__(self, pre: nn.Sequential, learner: SwiGLU, carried: int) -> None:
        super().__init__()
        self.pre, self.learner, self.carried = pre, learner, carried

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre(x)
        return self.learner(x) + F.pad(x[..., : self.carried], (0, x.shape[-1] - self.carried))

    @torch.no_grad()
    def to_ordinary(self) -> nn.Sequential:
        """`pre` and one gated MLP, whose last hidden units carry."""
        gate, first, last = self.learner.fc1_g, self.learner.fc1_x, self.learner.fc2
        stacked = gated_mlp(gate.in_features, gate.out_features + self.carried, self.learner.act, gate)
        for new, old in ((stacked.fc1_g, gate), (stacked.fc1_x, first), (stacked.fc2, last)):
            nn.init.zeros_(new.weight)
            nn.init.zeros_(new.bias)
            new.weight[: len(old.weight), : old.in_features] = old.weight
            new.bias[: len(old.bias)] = old.bias
        stacked.fc1_g.bias[gate.out_features :] = GATE
        carry = torch.eye(self.carried, gate.in_features).to(first.weight)
        stacked.fc1_x.weight[gate.out_features :] = carry / stacked.act(torch.full_like(carry[:, :1], GATE))
        stacked.fc2.weight[:, gate.out_features :] = carry.T
        return nn.Sequential(*self.pre, stacked)


def gated_mlp(features: int, hidden: int, act: nn.Module, like: nn.Linear) -> SwiGLU:
    """timm's SwiGLU, W_2 (σ(W_g x) * W_1 x), with biases, in dtype and place of `like`."""
    mlp = SwiGLU(features, hidden, bias=True).to(**factory(like))
    mlp.act = act
    return mlp


def is_gated(spec: BlockSpec) -> bool:
    """Whether the branch is a gated MLP."""
    return len(spec.branch) == 1 and isinstance(spec.branch[0], SwiGLU)


@torch.no_grad()
def build_gated(
    spec: BlockSpec, carried: int, scale: float, hidden_width: Callable[[int, int], int]
) -> GatedCarryBlock:
    """The skip-free block of a gated MLP. Its learner starts by passing on what is not carried, through open gates.

    Args:
        spec: of a block whose branch is a SwiGLU.
        carried: C_B.
        scale: of the last layer at initialisation.
        hidden_width: the learner's width, from that of the block and the one that the coder leaves.
    """
    old = spec.branch[0]
    assert isinstance(old, SwiGLU)
    features = old.fc1_x.in_features
    width = hidden_width(features, old.fc1_x.out_features - carried)
    n = features - carried
    if width < n or not isinstance(old.norm, nn.Identity):
        raise Unsupported(f"its gated MLP of {old.fc1_x.out_features} hidden units is too narrow, or has a norm inside")
    learner = gated_mlp(features, width, old.act, old.fc1_x)
    for layer, gain in ((learner.fc1_g, 1.0), (learner.fc1_x, 1.0), (learner.fc2, scale)):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
        layer.weight.mul_(gain)
        nn.init.zeros_(layer.bias)
    Q = orthogonal_like(learner.fc1_x.weight[:n, carried:])
    learner.fc1_g.weight[:n] = 0
    learner.fc1_g.bias[:n] = GATE
    learner.fc1_x.weight[:n, :carried] = 0
    learner.fc1_x.weight[:n, carried:] = Q / learner.act(torch.full_like(Q[:, :1], GATE))
    learner.fc2.weight[:, :n] = 0
    learner.fc2.weight[carried:, :n] = Q.T
    return GatedCarryBlock(nn.Sequential(*spec.pre), learner, carried)
