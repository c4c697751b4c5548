"""Weight statistics (Yu and Tomasi 2019, Table 3)."""

import pytest
import torch
from torch import nn

from unskip.measures import measure
from unskip.measures.weights import id_entries, mass


def test_id_entries_are_where_a_skip_adds_one() -> None:
    dirac = nn.init.dirac_(torch.empty(5, 4, 3, 3))  # PyTorch's own identity kernel
    assert id_entries(dirac).tolist() == [1.0] * 4
    assert mass(dirac) == 4
    assert id_entries(torch.eye(3, 6)).tolist() == [1.0] * 3
    assert id_entries(torch.ones(4, 4, 2, 2)).numel() == 0


def test_table_of_a_network() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, bias=False), nn.Flatten(), nn.Linear(3 * 36, 4))
    nn.init.dirac_(model[0].weight)
    nn.init.constant_(model[2].weight, 0.1)
    measured = measure(model, torch.randn(4, 3, 8, 8), families=["weights"])
    assert measured.series["id_fraction"].values == pytest.approx([1.0, 4 / 432])
    assert measured.numbers["weight_mass"] == pytest.approx(3 + 43.2)
    assert measured.numbers["weight_mass_large"] == pytest.approx(3)
    assert measured.numbers["weight_mass_id"] == pytest.approx(3.4)
    weights = torch.cat([model[0].weight.flatten(), model[2].weight.flatten()])
    assert measured.numbers["weight_mean"] == pytest.approx(weights.mean().item())
    assert measured.numbers["weight_deviation"] == pytest.approx(weights.std(unbiased=False).item())
