"""Input dissipation at initialisation (Zhang et al. 2024, section 3)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.measures import noise_to_signal, record_outputs

IMAGES = 32


def real_images() -> Tensor:
    """Scikit-learn's digits, enlarged to 32 px and three channels, mean 0, deviation 1."""
    images = torch.tensor(load_digits().images[:IMAGES], dtype=torch.float32)[:, None]
    images = F.interpolate(images, 32, mode="bilinear", align_corners=False)
    return ((images - images.mean()) / images.std()).repeat(1, 3, 1, 1)


def cifar_images() -> Tensor:
    sprite = Path(__file__).parents[3] / "shared" / "data" / "cifar10" / "test_batch.jpg"
    if not sprite.exists():
        pytest.skip("needs the CIFAR-10 pictures, which are not part of the repository")
    from PIL import Image

    row = np.asarray(Image.open(sprite))[:32, : 32 * IMAGES].copy()
    images = torch.tensor(row).view(32, IMAGES, 32, 3).permute(1, 3, 0, 2).float()
    return (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)


def random_images() -> Tensor:
    return torch.randn(IMAGES, 3, 32, 32)


def ratio(model: nn.Module, images: Tensor) -> float:
    """Noise-to-signal ratio at the last block, 1 % noise, BatchNorm in training mode."""
    noisy = images + 0.01 * images.std() * torch.randn_like(images)
    last = f"layer3.{len(model.layer3) - 1}"
    features = record_outputs(model.train(), [last], torch.cat([images, noisy]))[last]
    return noise_to_signal(*features.chunk(2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("images", [random_images, real_images, cifar_images])
def test_the_input_survives_110_layers_of_pnnh_and_not_of_a_plain_network(images: object, seed: int) -> None:
    torch.manual_seed(seed)
    x = images()
    assert ratio(unskip.create_model("pnnh_resnet110"), x) < 0.3
    assert ratio(unskip.create_model("plain_resnet110"), x) > 0.7


def test_the_papers_scale_loses_more() -> None:
    """At He's scale and with whole transitions most of the input is lost; ours starts at 0.3 of that scale."""
    x = random_images()
    ours = ratio(unskip.create_model("pnnh_resnet110"), x)
    literal = ratio(unskip.create_model("pnnh_resnet110", scale=1.0, transition="whole"), x)
    assert literal > 0.4 > 0.3 > ours


def test_noise_to_signal_by_hand() -> None:
    clean = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 10.0]])
    noisy = clean + torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 4.0]])
    # distances between images: 5, 10, sqrt(9 + 36); to the copies: 1, 2, 4
    assert noise_to_signal(clean, noisy) == pytest.approx(2 / 45**0.5)


def test_images_that_have_become_one_are_lost() -> None:
    assert noise_to_signal(torch.ones(3, 4), torch.ones(3, 4)) == 1.0


@pytest.mark.parametrize("shapes", [((1, 4), (1, 4)), ((3, 4), (3, 5))])
def test_noise_to_signal_refuses_what_it_can_not_compare(shapes: tuple) -> None:
    with pytest.raises(ValueError, match="same shape and at least two samples"):
        noise_to_signal(*(torch.zeros(shape) for shape in shapes))


def test_recording_leaves_no_trace() -> None:
    model = unskip.create_model("pnnh_resnet20").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    record_outputs(model, ["layer1.0", "layer3"], torch.randn(2, 3, 32, 32))
    with pytest.raises(RuntimeError):
        record_outputs(model, ["layer1.0", "layer3"], torch.randn(2, 5, 32, 32))
    with pytest.raises(ValueError, match="has no module 'layer9'"):
        record_outputs(model, ["layer1.0", "layer9"], torch.randn(2, 3, 32, 32))
    assert not any(module._forward_hooks for module in model.modules())
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
