"""The flow of a forward pass: who reads what, in place and outside of modules too."""

import pytest
import torch
from torch import Tensor, nn

from unskip.surgery.tracing import trace


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.norm = nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.conv(x))) + x


def test_an_activation_in_place_stands_between_a_layer_and_its_norm() -> None:
    """Though all of them hold the same tensor."""
    network = Mixed()
    conv, relu, norm, add = trace(network.eval(), torch.randn(2, 3, 4, 4))
    assert [step.function for step in (conv, relu, norm, add)] == ["conv2d", "relu", "batch_norm", "add"]
    assert [step.path for step in (conv, relu, norm, add)] == ["conv", "act", "norm", ""]
    assert add.where == "Mixed"
    assert conv.sources == [None]
    assert conv.readers == [relu]
    assert norm.sources == [relu]
    assert add.sources == [norm, None]


def test_hooks_go_after_an_error_too() -> None:
    network = Mixed()
    with pytest.raises(RuntimeError):
        trace(network, torch.randn(2, 5, 4, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
