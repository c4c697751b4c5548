"""R-, O- and L-Init, through the real layers that they end in (Hu, section 4 and B.2)."""

import math

import pytest
import torch
from torch import Tensor, nn

from unskip.methods.inits import pair_weights, tall_weight
from unskip.methods.seq import set_centre

PAIRS = [(128, 64, 64), (256, 64, 64), (256, 64, 128), (128, 64, 48)]  # D, d_in, d_out


def response(layer: nn.Module, d: int) -> Tensor:
    """The matrix that a layer really applies, D x d: its answers to each input channel being 1 at one pixel."""
    if isinstance(layer, nn.Linear):
        return layer(torch.eye(d)).T
    x = torch.zeros(d, d, 5, 5)
    x[torch.arange(d), torch.arange(d), 2, 2] = 1
    y = layer(x)
    assert torch.count_nonzero(y) == torch.count_nonzero(y[:, :, 2, 2]), "only the centre of the kernel has weights"
    return y[:, :, 2, 2].T


def layers(d: int, D: int) -> list[nn.Module]:
    return [nn.Linear(d, D, bias=False), nn.Conv2d(d, D, 3, padding=1, bias=False), nn.Conv2d(d, D, 1, bias=False)]


@pytest.mark.parametrize("init", ["O", "L"])
@pytest.mark.parametrize(("D", "d_in", "d_out"), PAIRS)
@torch.no_grad()
def test_columns_are_orthogonal_through_real_layers(init: str, D: int, d_in: int, d_out: int) -> None:
    for wide in layers(d_in, D):
        W, _ = pair_weights(init, D, d_in, d_out)
        set_centre(wide, W)
        R = response(wide, d_in) / math.sqrt(2)
        gram = R.T @ R / (2 if init == "L" else 1)  # W = sqrt(2) [R; -R] has the columns of R twice
        assert (gram - torch.eye(d_in)).abs().max() < 1e-5


@torch.no_grad()
def test_r_init_has_variance_2_over_D() -> None:
    W = tall_weight("R", 1024, 512)
    assert W.var().item() == pytest.approx(2 / 1024, rel=0.01)  # the standard error is 0.2 %
    assert abs(W.mean().item()) < 4 * math.sqrt(2 / 1024 / W.numel())


@pytest.mark.parametrize("init", ["R", "O"])
def test_the_second_weight_is_the_firsts_transpose_and_shares_what_it_can(init: str) -> None:
    W, M = pair_weights(init, 128, 64, 64)
    assert torch.equal(M, W.T)
    W, M = pair_weights(init, 256, 64, 128)  # widening
    assert torch.equal(M[:64], W.T)
    assert torch.count_nonzero(M[64:])
    W, M = pair_weights(init, 256, 128, 64)
    assert torch.equal(M, W[:, :64].T)


@pytest.mark.parametrize(("D", "d_in", "d_out"), PAIRS)
def test_l_init_is_linear_and_the_print_is_not_a_product(D: int, d_in: int, d_out: int) -> None:
    W, M = pair_weights("L", D, d_in, d_out)
    x = torch.randn(200, d_in, dtype=torch.float64)
    y = torch.relu(x @ W.T) @ M.T
    shared = min(d_in, d_out)
    torch.testing.assert_close(y[:, :shared], math.sqrt(2) * x[:, :shared], rtol=0, atol=1e-12)
    # Further outputs are inputs mixed anew: linear, and of the inputs' size, so that a norm does not divide by nothing.
    if d_out > d_in:
        torch.testing.assert_close(y[:, d_in:].norm(dim=1), y[:, :d_in].norm(dim=1))
    # As printed, M = R^T has kd/2 columns, and W has kd rows.
    assert M.shape == (d_out, D)
    assert W[: D // 2].T.shape[1] != W.shape[0]


@pytest.mark.parametrize("init", ["R", "O", "L"])
def test_draws_are_those_of_the_global_generator(init: str) -> None:
    torch.manual_seed(3)
    one = pair_weights(init, 32, 8, 8)
    torch.manual_seed(3)
    assert all(map(torch.equal, one, pair_weights(init, 32, 8, 8)))
    assert not torch.equal(one[0], pair_weights(init, 32, 8, 8)[0])
