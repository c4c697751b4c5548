"""Networks of timm's that are listed beside ours: they are there, and are what the papers' tables mean."""

import pytest
import timm
import torch
from timm.utils.model import reparameterize_model

import unskip
from unskip.models import ENTRIES, OTHERS, about


@pytest.mark.parametrize("name", OTHERS)
def test_timm_builds_it_and_we_do_not(name: str) -> None:
    assert timm.is_model(name)
    assert name not in ENTRIES
    with torch.device("meta"):
        assert type(unskip.create_model(name)).__module__.startswith("timm.")


@torch.no_grad()
def test_repvgg_folds_to_the_printed_parameters_and_has_no_skip_then() -> None:
    """Zhang et al. 2024, Table 1: RepVGG-A2 with 24.1 M for CIFAR's ten classes."""
    network = timm.create_model("repvgg_a2", num_classes=10).eval()
    folded = reparameterize_model(network)
    assert round(sum(p.numel() for p in folded.parameters()) / 1e6, 1) == 24.1
    assert sum(p.numel() for p in network.parameters()) > 26e6
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(folded(x), network(x), rtol=1e-3, atol=1e-4)


def test_densenet_keeps_its_skips() -> None:
    line = about("densenet121")
    assert line.skips == "all, concatenated"
    assert round(line.trained / 1e6, 2) == 7.98  # torchvision's documentation prints 7,978,856
    assert line.frozen == 0
