"""Delta-orthogonal kernels keep norms: through one real layer, and through a chain of bottlenecks."""

import pytest
import torch
from torch import nn

from unskip.methods.delta_orthogonal import delta_orthogonal_, frame


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(12, 12, 3, padding=1, bias=False),
        nn.Conv2d(12, 20, 3, padding=1, bias=False),  # orthonormal columns: Algorithm 2
        nn.Conv2d(12, 12, 1, bias=False),
        nn.Conv2d(12, 12, 3, padding=2, dilation=2, bias=False),
        nn.Conv2d(12, 24, 3, padding=1, groups=4, bias=False),
        nn.Conv2d(12, 12, 5, padding=2, groups=12, bias=False),
        nn.Linear(12, 30, bias=False),
    ],
    ids=["square", "wider", "1x1", "dilated", "grouped", "depthwise", "linear"],
)
@torch.no_grad()
def test_a_layer_keeps_the_norm_times_its_gain(layer: nn.Module) -> None:
    layer = layer.double()
    delta_orthogonal_(layer, gain=1.5)
    x = torch.randn(3, 12, dtype=torch.float64) if isinstance(layer, nn.Linear) else torch.randn(3, 12, 6, 7).double()
    torch.testing.assert_close(layer(x).flatten(1).norm(dim=1), 1.5 * x.flatten(1).norm(dim=1), rtol=1e-12, atol=0)


@torch.no_grad()
def test_a_narrower_layer_keeps_the_norm_of_a_gradient() -> None:
    """W W^T = I: what comes back through it has the norm of what went in."""
    conv = nn.Conv2d(20, 12, 3, padding=1, bias=False).double()
    delta_orthogonal_(conv)
    W = conv.weight[:, :, 1, 1]
    torch.testing.assert_close(W @ W.T, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-12)
    assert conv.weight.count_nonzero() == W.count_nonzero()


@torch.no_grad()
def test_a_chain_of_bottlenecks_loses_nothing_after_its_first_layer() -> None:
    chain = [nn.Conv2d(i, o, 1, bias=False).double() for _ in range(8) for i, o in ((32, 8), (8, 32))]
    for conv in chain:
        delta_orthogonal_(conv)
    x = chain[0](torch.randn(4, 32, 3, 3, dtype=torch.float64))
    y = nn.Sequential(*chain[1:])(x)
    torch.testing.assert_close(y.norm(), x.norm(), rtol=1e-12, atol=0)
    for conv in chain:  # what independent draws would do: 3/4 of the energy is lost in each of seven blocks
        nn.init.orthogonal_(conv.weight)
    assert nn.Sequential(*chain[1:])(x).norm() < 0.1 * x.norm()


def test_frames_are_the_same_each_time_and_nested() -> None:
    one = frame(24, 10).clone()
    frame.cache_clear()
    assert torch.equal(frame(24, 10), one)
    torch.testing.assert_close(frame(24, 16)[:, :10], one, rtol=0, atol=1e-12)


def test_layers_of_one_width_differ() -> None:
    a, b = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
    delta_orthogonal_(a)
    delta_orthogonal_(b)
    assert not torch.allclose(a.weight, b.weight, atol=0.01)
    delta_orthogonal_(a, identity=True)
    torch.testing.assert_close(a.weight.data, nn.init.dirac_(torch.empty(8, 8, 3, 3)))
