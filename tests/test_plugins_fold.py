"""A block of another package folds by its `to_ordinary()`."""

import pytest
import torch
from torch import nn

import unskip
from tests.test_plugins import residual, site, toy  # noqa: F401 - fixtures


@pytest.mark.usefixtures("toy")
def test_a_block_of_another_package_folds() -> None:
    plain = unskip.plainify(residual(), "scaled", scale=0.5)
    for _ in range(3):
        plain(torch.randn(32, 1, 8, 8))  # norms get statistics
    plain.eval()
    x = torch.randn(4, 1, 8, 8)
    folded = unskip.fold(plain, example=x)
    assert torch.allclose(folded(x), plain(x), rtol=1e-4, atol=1e-5)
    assert not [m for m in folded.modules() if type(m).__name__ == "ScaledBlock" or isinstance(m, nn.BatchNorm2d)]
