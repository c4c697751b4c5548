"""Activation statistics by hand and against numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from unskip.measures import measure
from unskip.measures.activation import dead_units, fraction_above, survival


def test_by_hand() -> None:
    x = torch.tensor([[0.0, -1.0, 0.04, 60.0], [0.0, 3.0, -0.06, 0.0]])
    assert survival(x) == 3 / 8
    assert fraction_above(x, 0.05) == 4 / 8
    assert fraction_above(x, 50) == 1 / 8
    assert dead_units(x) == 1 / 4  # the first column never moves
    assert dead_units(torch.full((5, 3), 7.0)) == 1.0


def test_units_of_an_image_are_its_channels() -> None:
    x = torch.rand(4, 3, 5, 5)
    x[:, 1] = 0
    assert dead_units(x, axis=1) == pytest.approx(1 / 3)


def test_statistics_are_numpys() -> None:
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))
    x = torch.randn(50, 6)
    series = measure(model, x, families=["activation"]).series
    for index, output in enumerate([model[0](x), model[:2](x), model(x)]):
        y = output.detach().double().numpy()
        assert series["activation_mean"].values[index] == pytest.approx(y.mean(), rel=1e-4)
        assert series["activation_variance"].values[index] == pytest.approx(y.var(), rel=1e-4)
        assert series["activation_maximum"].values[index] == pytest.approx(np.abs(y).max(), rel=1e-5)
    assert series["surviving_units"].layers == ("1",)
    assert series["surviving_units"].values == pytest.approx([(model[:2](x) > 0).double().mean().item()])


def test_dead_units_leave_out_layers_without_units() -> None:
    """A layer with one number per sample has no fraction of dead units."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.act, self.head = nn.Sigmoid(), nn.ReLU(), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.gate(x.mean(1))[:, None] * self.act(x * torch.tensor([1.0, 1.0, 1.0, 0.0])))

    assert measure(Gate(), torch.randn(16, 4), families=["activation"]).numbers["dead_units"] == 1 / 4
