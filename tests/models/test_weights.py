"""pretrained=True: what is stored comes back, by timm's conventions, and what can't be is said."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import unskip
from unskip.models import ENTRIES, weights
from unskip.models.weights import WeightsInfo, store_weights, weights_of

NAME = "pnnh_resnet20"
ABOUT = WeightsInfo(
    network=NAME, dataset="cifar10", test_error=7.25, test_images=10_000, epochs=300, seed=1,
    mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), record="2026-01-01_none_cpu",
)  # fmt: skip


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A network that is not fresh, as the weights of its name; what is stored of it is float16."""
    monkeypatch.setattr(weights, "FOLDER", tmp_path / "weights")
    network = unskip.create_model(NAME).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        network.norm.running_mean.normal_()
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.half())
    store_weights(network, ABOUT)
    return network


@torch.no_grad()
def test_what_is_stored_comes_back_with_its_error(stored: torch.nn.Module) -> None:
    x = torch.randn(2, 3, 32, 32)
    for create in (unskip.create_model, timm.create_model):
        network = create(NAME, pretrained=True).eval()
        torch.testing.assert_close(network(x), stored(x), rtol=0, atol=0)
        assert network.pretrained_cfg["description"].startswith("7.25 % test error on cifar10 (10,000 images), 300 ep")
        assert network.pretrained_cfg["mean"] == ABOUT.mean
        assert timm.data.resolve_data_config(model=network)["std"] == ABOUT.std
    assert weights_of(NAME) == ABOUT
    assert weights.names_with_weights() == [NAME]
    assert not torch.equal(unskip.create_model(NAME).fc.weight, stored.fc.weight), "without it the network is fresh"


@torch.no_grad()
def test_other_classes_channels_and_features(stored: torch.nn.Module) -> None:
    """timm's conventions: a fresh classifier, an adapted first convolution, feature maps of the trained network."""
    network = unskip.create_model(NAME, pretrained=True, num_classes=7)
    assert network.fc.out_features == 7
    torch.testing.assert_close(network.layer3[2].learner.conv1.weight, stored.layer3[2].learner.conv1.weight)
    gray = unskip.create_model(NAME, pretrained=True, in_chans=1)
    torch.testing.assert_close(gray.conv1.weight, stored.conv1.weight.sum(1, keepdim=True), rtol=1e-3, atol=1e-3)
    x = torch.randn(1, 3, 32, 32)
    features = unskip.create_model(NAME, pretrained=True, features_only=True).eval()(x)
    torch.testing.assert_close(features[-1], torch.nn.Sequential(*list(stored.children())[:6])(x))


def test_what_can_not_be_loaded_is_said(stored: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match=r"'pnnh_resnet32' has no pretrained weights .* these have: pnnh_resnet20"):
        unskip.create_model("pnnh_resnet32", pretrained=True)
    with pytest.raises(ValueError, match="weights of 'pnnh_resnet20' belong to it as it is, and ratio would make"):
        unskip.create_model(NAME, pretrained=True, ratio=0.25)
    with pytest.raises(ValueError, match="and widths would make another network"):
        unskip.create_model(NAME, pretrained=True, widths=(32, 64, 128))
    path = weights.path_of(NAME)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"pnnh_resnet20.safetensors can't be read .* install the package again"):
        unskip.create_model(NAME, pretrained=True)
    big = torch.nn.Linear(3000, 3000)
    with pytest.raises(
        ValueError, match=r"'pnnh_resnet20' has 17.2 MiB of weights, and the package ships at most 8 MiB"
    ):
        store_weights(big, ABOUT)


def test_values_that_float16_does_not_have_are_refused() -> None:
    network = unskip.create_model(NAME)
    torch.nn.init.constant_(network.fc.weight, 1e6)
    with pytest.raises(ValueError, match=r"'pnnh_resnet20' has values that are no numbers in float16: fc\.weight"):
        store_weights(network, ABOUT)


def test_every_file_that_is_shipped_fits_its_name() -> None:
    for name in weights.names_with_weights():
        about = weights_of(name)
        assert about is not None
        assert about.network == name
        assert 0 < about.test_error < 20
        assert "CIFAR" in about.dataset.upper()
        network = unskip.create_model(name, pretrained=True)
        assert all(torch.isfinite(p).all() for p in network.parameters())


@pytest.mark.parametrize("pretrained", [False, True])
def test_the_transform_for_testing_leaves_small_images_as_they_are(pretrained: bool) -> None:
    """timm's default would take 32 of 36 px, and the shipped weights would err far more often."""
    name = "pnnh_resnet20_wide"
    network = unskip.create_model(name, pretrained=pretrained)
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    about = weights_of(name)
    assert about is not None
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (about.mean, about.std))
    wanted = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std
    torch.testing.assert_close(transform(Image.fromarray(pixels)), wanted)


def test_every_name_for_small_images_is_tested_on_whole_ones() -> None:
    small = [name for name, entry in ENTRIES.items() if entry.input_size[-1] <= 32]
    assert {"resnet110", "pnnh_wrn28_10", "cifar_seqnet20", "simplified_plain20", "plainnet_mlp"} <= set(small)
    assert all(timm.get_pretrained_cfg(name).crop_pct == 1.0 for name in small)
    assert timm.get_pretrained_cfg("pnnh_resnet50").crop_pct == 0.875  # timm's default
