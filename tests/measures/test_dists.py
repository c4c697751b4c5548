"""DISTS: what happens without its parts, and that equal pictures score 0 with a VGG-16 (of random weights)."""

import sys

import pytest
import torch
import torchvision
from torch import nn

from unskip.measures import measure, measure_names
from unskip.measures.dists import dissimilarity, picture


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def test_without_torchmetrics_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.image", None)
    measured = measure(network(), torch.randn(4, 3, 16, 16), families=["dists"])
    assert measured.series["dists"].values == ()
    assert any(note.startswith("DISTS is not measured, since torchmetrics") for note in measured.notes)
    assert "dists" not in measure_names(default=True)
    assert "dists" in measure_names()


def test_vectors_are_no_pictures() -> None:
    measured = measure(nn.Linear(4, 3), torch.randn(5, 4), families=["dists"])
    assert any("no pictures" in note for note in measured.notes)


def test_a_picture_spans_its_range() -> None:
    grey = picture(torch.randn(3, 5, 7, 7), 1, (32, 32))
    assert grey.shape == (3, 3, 32, 32)
    assert grey.amin((1, 2, 3)).tolist() == [0.0] * 3
    assert grey.amax((1, 2, 3)).tolist() == [1.0] * 3


@pytest.mark.full
def test_layers_that_keep_the_input_are_nearer_than_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of VGG-16 can't be downloaded in a test; random ones order pictures too."""
    module = pytest.importorskip("torchmetrics.functional.image.dists")
    vgg = torchvision.models.vgg16(weights=None)
    monkeypatch.setattr(module, "vgg16", lambda weights: vgg)
    grey = picture(torch.randn(4, 3, 32, 32).cumsum(2).cumsum(3), 1, (32, 32))
    assert dissimilarity(grey, grey).abs().max() < 1e-4
    keeps = network()
    nn.init.dirac_(keeps[0].weight)
    measured = measure(keeps, torch.randn(4, 3, 32, 32).cumsum(2).cumsum(3), families=["dists"])
    assert measured.series["dists"].layers == ("0", "1")
    assert measured.series["dists"].values[0] < 0.3 * measured.numbers["dists_noise"]
