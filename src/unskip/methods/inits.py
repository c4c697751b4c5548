"""Initialisations as pure functions: of two layers around a ReLU, y = M σ(W x), and orthogonal matrices.

Hu, github.com/hukkai/no-residual-network, sections 4 and B.2.

W is D x d_in and M is d_out x D, with D at least 2 max(d_in, d_out). The paper has d_in = d_out = d and M = Wᵀ. Where
the widths differ, W and M are cut from one draw for the larger of them, so that the channels that both have are tied.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

Init = Literal["R", "O", "L"]


def pair_weights(init: Init, D: int, d_in: int, d_out: int) -> tuple[Tensor, Tensor]:
    """W and M of a pair d_in -> D -> d_out, in float64."""
    if init == "L":
        return _looks_linear(D, d_in, d_out)
    G = tall_weight(init, D, max(d_in, d_out))
    return G[:, :d_in], G[:, :d_out].T


def tall_weight(init: Literal["R", "O"], D: int, d: int, *, generator: torch.Generator | None = None) -> Tensor:
    """W, D x d. R-Init: W_ij ~ N(0, 2/D). O-Init: W = √2 R with Rᵀ R = I_d."""
    if init == "O":
        return math.sqrt(2) * _orthogonal(D, d, generator)
    return math.sqrt(2 / D) * torch.randn(D, d, dtype=torch.float64, device="cpu", generator=generator)


def _looks_linear(D: int, d_in: int, d_out: int) -> tuple[Tensor, Tensor]:
    """L-Init: W = √2 [R; -R] and M = [Nᵀ, -Nᵀ], so that M ReLU(W x) = √2 Nᵀ R x, which is linear. N = R for one width.

    (The paper prints M = Rᵀ, which has half the columns that W has rows.) More outputs than inputs can't come from
    further orthogonal columns of R: these would be exactly 0, and a norm would divide by that. They are a rotation of
    the inputs instead, N = [R, R Q] with an orthogonal Q.
    """
    R = _orthogonal(D // 2, d_in)
    N = R[:, :d_out]
    if d_out > d_in:
        N = torch.cat([R, R @ _orthogonal(d_in, d_out - d_in)], dim=1)
    return math.sqrt(2) * torch.cat([R, -R]), torch.cat([N, -N]).T


def orthogonal_like(weight: Tensor, gain: float = 1.0) -> Tensor:
    """A random matrix in shape, dtype and place of `weight`, with orthonormal rows or columns, times `gain`.

    Drawn in float32 at least: PyTorch has no QR decomposition in half precision.
    """
    wide = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    return nn.init.orthogonal_(wide, gain=gain).to(weight.dtype)


def _orthogonal(rows: int, columns: int, generator: torch.Generator | None = None) -> Tensor:
    """A random matrix with orthonormal columns, or rows where there are fewer of them."""
    empty = torch.empty(rows, columns, dtype=torch.float64, device="cpu")
    return nn.init.orthogonal_(empty, generator=generator)
