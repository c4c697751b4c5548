"""Weights of coders that are not fitted: W_enc (C_B, C) and W_dec (C, C_B), by a formula or drawn at random.

Zhang et al. 2024, arXiv:2402.08645, Eq. 5 and Appendix C.
"""

import math

import torch
from torch import Tensor, nn

from unskip.coders.spec import CoderSpec, embed_kernel

# group_average: channels averaged in groups (pairs at C_B = C/2): on the floor, and idempotent through ReLU.
# identity (Eq. 5): the first C_B channels, as they are; the others are lost.
FORMS = ("group_average", "identity")


def averaging(groups: int, channels: int) -> Tensor:
    """(groups, channels): row g is 1/sqrt(n_g) on the n_g neighbouring channels of group g. Rows are orthonormal."""
    size, larger = divmod(channels, groups)
    sizes = [size + (g < larger) for g in range(groups)]
    return torch.block_diag(*[torch.full((1, n), n**-0.5, dtype=torch.float64, device="cpu") for n in sizes])


def closed_form(spec: CoderSpec) -> tuple[Tensor, Tensor]:
    """W_enc and W_dec of a closed-form coder, in float64. W_dec is the transpose of W_enc.

    A paired coder has x+ and x- side by side: where σ(z) - σ(-z) = z (ReLU, GELU, SiLU), C_B/2 directions pass with
    their sign.
    """
    directions = spec.code // 2 if spec.paired else spec.code
    if spec.pretext == "identity":
        enc = torch.eye(directions, spec.channels, dtype=torch.float64, device="cpu")
    else:
        enc = averaging(directions, spec.channels)
    enc = torch.cat([enc, -enc]) if spec.paired else enc
    return embed_kernel(enc, spec), embed_kernel(enc.T.contiguous(), spec)


def odd_part_is_identity(act: nn.Module, depth: int) -> bool:
    """Whether σ(z) - σ(-z) = z (σ applied `depth` times), which is what a paired coder stands on."""
    z = torch.linspace(0.01, 5, 50, dtype=torch.float64, device="cpu")
    plus, minus = z, -z
    for _ in range(depth):
        plus, minus = act(plus), act(minus)
    return bool(torch.allclose(plus - minus, z, rtol=1e-9, atol=1e-9))


def he_normal(spec: CoderSpec) -> tuple[Tensor, Tensor]:
    """The paper's "no task": both weights from He's normal distribution, never fitted."""
    generator = torch.Generator("cpu").manual_seed(spec.seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        weight = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return weight * math.sqrt(2 / math.prod(shape[1:]))

    return draw(spec.enc_shape), draw(spec.dec_shape)
