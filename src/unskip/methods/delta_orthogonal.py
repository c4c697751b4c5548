"""Delta-orthogonal kernels: zero but for an orthogonal matrix at the centre (Xiao et al. 2018, Algorithm 2).

    K[:, :, centre] = W,   W orthogonal: such a convolution keeps the norm of its input, at any depth

The paper widens and never narrows. A bottleneck narrows in each block, and a random projection of 4d channels to d
loses 3/4 of the energy there, so that nothing is left after a few blocks. Here a change of width goes through a frame
Q(D, d) with orthonormal columns that all layers share: d -> D is W = Q U and D -> d is W = U Q^T, with a random
orthogonal U of d x d for each layer. Then Q^T Q = I, and a chain of bottlenecks is as orthogonal as a chain of squares.
The frames of one D are nested: Q(D, d) is the first d columns of Q(D, D).
"""

from functools import lru_cache

import torch
from torch import Tensor, nn

from unskip.methods.spec import Conv, centre_tap


@lru_cache(maxsize=32)
def frame(D: int, d: int) -> Tensor:
    """Q(D, d): d orthonormal columns of length D in float64, the same ones at each call."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    normal = torch.randn(D, D, generator=generator, dtype=torch.float64, device="cpu")
    Q, R = torch.linalg.qr(normal[:, :d])
    return Q * R.diagonal().sign()  # unique, and so nested


def orthogonal(rows: int, columns: int, *, identity: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    """W (rows x columns): a random orthogonal U (or the identity), and a frame where the widths differ."""
    d = min(rows, columns)
    square = torch.empty(d, d, dtype=dtype, device="cpu")
    U = nn.init.eye_(square) if identity else nn.init.orthogonal_(square)
    if rows > columns:
        return frame(rows, d).to(dtype) @ U
    return U @ frame(columns, d).T.to(dtype) if rows < columns else U


@torch.no_grad()
def delta_orthogonal_(conv: Conv, *, gain: float = 1.0, identity: bool = False, mirrored: bool = False) -> None:
    """Makes the weight of a convolution (each group by itself) or a linear layer delta-orthogonal, in place.

    Args:
        conv: the layer. A depthwise convolution becomes the identity, for a random sign would be no more orthogonal.
        gain: the singular values of W.
        identity: U = I instead of a random one.
        mirrored: W is [V, -V] with an orthogonal V, for an input that comes out of a CReLU.
    """
    weight = conv.weight
    if weight.is_meta:
        return
    groups = 1 if isinstance(conv, nn.Linear) else conv.groups
    rows, columns = weight.shape[0] // groups, weight.shape[1]
    identity = identity or rows == columns == 1
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    weight.zero_()
    centre = centre_tap(weight)
    for group in range(groups):
        if mirrored:
            V = orthogonal(rows, columns // 2, identity=identity, dtype=dtype)
            W = torch.cat([V, -V], dim=1)
        else:
            W = orthogonal(rows, columns, identity=identity, dtype=dtype)
        centre[group * rows : (group + 1) * rows] = gain * W.to(weight)
