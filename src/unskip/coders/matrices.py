"""Weights of coders that are not fitted: W_enc (C_B, C) and W_dec (C, C_B), by a formula or drawn at random.

Zhang et al. 2024, arXiv:2402.08645, Eq. 5 and Appendix C.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from unskip.coders.spec import CoderSpec, embed_kernel

Matrices = tuple[Tensor, Tensor]


def averaging(groups: int, channels: int) -> Tensor:
    """(groups, channels): row g is 1/sqrt(n_g) on the n_g neighbouring channels of group g. Rows are orthonormal."""
    size, larger = divmod(channels, groups)
    rows = [torch.full((1, size + (g < larger)), (size + (g < larger)) ** -0.5, dtype=torch.float64, device="cpu")
            for g in range(groups)]  # fmt: skip
    return torch.block_diag(*rows)


def group_average(spec: CoderSpec) -> Matrices:
    """Channels averaged in groups (pairs at C_B = C/2): on the floor, and idempotent through ReLU."""
    enc = averaging(spec.code, spec.channels)
    return enc, enc.T


def identity(spec: CoderSpec) -> Matrices:
    """Eq. 5: the first C_B channels, as they are; the others are lost."""
    enc = torch.eye(spec.code, spec.channels, dtype=torch.float64, device="cpu")
    return enc, enc.T


def odd_part_is_identity(act: nn.Module, depth: int) -> bool:
    """Whether σ(z) - σ(-z) = z (σ applied `depth` times), which is what a paired coder stands on."""
    z = torch.linspace(0.01, 5, 50, dtype=torch.float64, device="cpu")
    plus, minus = z, -z
    for _ in range(depth):
        plus, minus = act(plus), act(minus)
    return bool(torch.allclose(plus - minus, z, rtol=1e-9, atol=1e-9))


def paired(form: Callable[[CoderSpec], Matrices], spec: CoderSpec) -> Matrices:
    """x+ and x- side by side: where σ(z) - σ(-z) = z (ReLU, GELU, SiLU), C_B/2 directions pass with their sign."""
    half = CoderSpec(channels=spec.channels, code=spec.code // 2, pretext=spec.pretext, act=spec.act)
    enc, dec = form(half)
    return torch.cat([enc, -enc]), torch.cat([dec, -dec], dim=1)


FORMS: dict[str, Callable[[CoderSpec], Matrices]] = {"group_average": group_average, "identity": identity}


def closed_form(spec: CoderSpec) -> tuple[Tensor, Tensor]:
    """The weights of a closed-form coder, in float64."""
    form = FORMS[spec.pretext]
    enc, dec = paired(form, spec) if spec.paired else form(spec)
    return embed_kernel(enc, spec), embed_kernel(dec.contiguous(), spec)


def he_normal(spec: CoderSpec) -> tuple[Tensor, Tensor]:
    """The paper's "no task": both weights from He's normal distribution, never fitted."""
    generator = torch.Generator("cpu").manual_seed(spec.seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        fan_in = math.prod(shape[1:])
        weight = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return weight * math.sqrt(2 / fan_in)

    return draw(spec.enc_shape), draw(spec.dec_shape)
