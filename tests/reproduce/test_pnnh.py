"""Zhang et al. 2024, Figure 1: where networks lose their input."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import vgg19_bn

import unskip
from unskip.coders import CoderSpec, make_coder
from unskip.models.cifar import cifar_resnet
from unskip.reproduce import reproduce
from unskip.reproduce.images import load_set, sample_images
from unskip.reproduce.pnnh_figure1 import losses, outputs
from unskip.reproduce.pnnh_reconstruction import losses as coder_losses
from unskip.surgery import plainify


def test_outputs_are_in_order_of_depth() -> None:
    resnet = outputs(cifar_resnet(20))
    assert [depth for depth, _ in resnet] == [1, *range(3, 20, 2)]
    assert resnet[-1] == (19, "layer3.2")
    with torch.device("meta"):
        vgg = outputs(vgg19_bn())
    assert [depth for depth, _ in vgg] == list(range(1, 17))


def test_a_plain_network_loses_its_input_and_pnnh_keeps_it() -> None:
    x = sample_images(load_set("digits", None, size=16), 48, channels=3)
    noisy = x + 0.01 * torch.randn_like(x)
    lost = {}
    for method in ("plain", "pnnh"):
        torch.manual_seed(0)
        _, found = losses(plainify(cifar_resnet(44), method), x, noisy)
        lost[method] = (found["noise_to_signal"][-1], found["recovery"][-1])
        assert found["noise_to_signal"][0] < 0.1  # the stem knows
        assert found["recovery"][0] > 0.6
    assert lost["plain"][0] > 0.5 > 0.3 > lost["pnnh"][0]
    assert lost["plain"][1] < 0.2 < 0.4 < lost["pnnh"][1]


def test_sample_images_are_standardised_spread_and_repeated(tmp_path: Path) -> None:
    data = load_set("digits", None)
    x = sample_images(data, len(data.test), channels=3)
    assert x.shape[1:] == (3, 32, 32)
    assert torch.equal(x[:, 0], x[:, 2])
    assert abs(x.mean().item()) < 0.1
    assert x.std().item() == pytest.approx(1, abs=0.1)
    rgb = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "set.npz", x_train=rgb, y_train=np.arange(40) % 4, x_test=rgb, y_test=np.arange(40) // 10)
    some = load_set("npz", tmp_path / "set.npz", size=8)
    assert sample_images(some, 4).shape == (4, 3, 8, 8)
    with pytest.raises(ValueError, match="41 images are asked for and npz has 40"):
        sample_images(some, 41)
    with pytest.raises(ValueError, match="dataset='imagefolder' must be one of digits"):
        load_set("imagefolder", tmp_path)


@pytest.mark.full
def test_the_figure_is_drawn(tmp_path: Path) -> None:
    written = reproduce("pnnh-figure1", out=tmp_path, depth=20, images=24, seeds=1)
    assert 10_000 < written.files[0].stat().st_size < 150_000
    assert len(written.outcome.lines) == 4


def test_dists_without_its_parts_is_a_sentence_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.image", None)  # as where it is not installed
    with pytest.raises(ValueError, match="--dists needs torchmetrics and the weights of VGG-16"):
        reproduce("pnnh-figure1", out=tmp_path, dists=True)


def test_what_a_user_gets_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="images=4 must be between 16 and"):
        reproduce("pnnh-figure1", out=tmp_path, images=4)


def test_activations_by_theory_and_simulation(tmp_path: Path) -> None:
    written = reproduce("pnnh-activations", out=tmp_path, layers=3, width=128, repeats=6)
    for name, found in written.outcome.numbers.items():
        assert found["theory"][0] == 0
        for layer in range(1, 4):
            error = found["standard error"][layer]
            assert abs(found["theory"][layer] - found["simulated"][layer]) < 5 * error + 0.02, (name, layer)
    alike = {name: found["alike after"] for name, found in written.outcome.numbers.items()}
    assert alike["ReLU"] < alike["PReLU 0 to 0.5"] < alike["LReLU 0.3"]


def test_what_coders_lose() -> None:
    """Identity loses the channels that it drops; the pair average half of a difference; neither loses more later."""
    x = torch.randn(4, 8, 5, 5).relu()
    for pretext, lost in (
        ("identity", x[:, 4:].square().sum() / x.numel()),
        ("group_average", (x.reshape(4, 4, 2, 25).diff(dim=2) / 2).square().mean()),
    ):
        coder = make_coder(CoderSpec(channels=8, code=4, pretext=pretext, act="ReLU()"), nn.ReLU())
        assert coder_losses(coder, x, 3) == pytest.approx([lost.item()] * 3, rel=1e-5)


def test_half_of_a_path_is_a_thinner_stream() -> None:
    """docs/notes/streams.md: with the identity coder the first half of the channels is a stream, the rest is not."""
    net = unskip.create_model("pnnh_resnet20").eval()
    block = net.get_submodule("layer1.1")
    x = torch.randn(2, 16, 8, 8).relu()
    learned = block.learner(x)
    y = block(x)
    assert torch.allclose(y[:, :8], (x[:, :8] + learned[:, :8]).relu(), atol=1e-6)
    assert torch.allclose(y[:, 8:], learned[:, 8:].relu(), atol=1e-6)
