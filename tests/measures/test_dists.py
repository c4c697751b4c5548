"""DISTS: notes if a dependency is missing, and a score of 0 for equal images with a randomly initialised VGG-16."""

import sys

import pytest
import torch
import torchvision
from torch import nn

from unskip.measures import measure, measure_names
from unskip.measures.dists import as_image, dissimilarity


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def test_without_torchmetrics_there_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.image", None)
    measured = measure(model(), torch.randn(4, 3, 16, 16), families=["dists"])
    assert measured.series["dists"].values == ()
    assert any(note.startswith("DISTS is not measured, because torchmetrics") for note in measured.notes)
    assert "dists" not in measure_names(default=True)
    assert "dists" in measure_names()


def test_vectors_are_not_images() -> None:
    measured = measure(nn.Linear(4, 3), torch.randn(5, 4), families=["dists"])
    assert any("are not images" in note for note in measured.notes)


def test_images_span_the_range_0_to_1() -> None:
    grey = as_image(torch.randn(3, 5, 7, 7), 1, (32, 32))
    assert grey.shape == (3, 3, 32, 32)
    assert grey.amin((1, 2, 3)).tolist() == [0.0] * 3
    assert grey.amax((1, 2, 3)).tolist() == [1.0] * 3


@pytest.mark.full
def test_layers_that_keep_the_input_are_nearer_than_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of VGG-16 can't be downloaded in a test; random weights rank images too."""
    module = pytest.importorskip("torchmetrics.functional.image.dists")
    vgg = torchvision.models.vgg16(weights=None)
    monkeypatch.setattr(module, "vgg16", lambda weights: vgg)
    grey = as_image(torch.randn(4, 3, 32, 32).cumsum(2).cumsum(3), 1, (32, 32))
    assert dissimilarity(grey, grey).abs().max() < 1e-4
    keeps = model()
    nn.init.dirac_(keeps[0].weight)
    measured = measure(keeps, torch.randn(4, 3, 32, 32).cumsum(2).cumsum(3), families=["dists"])
    assert measured.series["dists"].layers == ("0", "1")
    assert measured.series["dists"].values[0] < 0.3 * measured.numbers["dists_noise"]
