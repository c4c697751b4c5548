"""LiteRT's own interpreter on real files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unskip
from tests.targets.networks import akamaster_resnet20, cifar10, normalised, plain
from unskip.models.cifar import cifar_resnet
from unskip.ship.targets import Tflite
from unskip.ship.targets.tflite import TfliteInt8

pytestmark = pytest.mark.targets
pytest.importorskip("litert_torch")


def by_hand(file: Path, images: Tensor) -> Tensor:
    """LiteRT on images as PyTorch has them, without our runner."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(file))
    run = interpreter.get_signature_runner()
    (name,) = run.get_input_details()
    outputs = [run(**{name: image[None].permute(0, 2, 3, 1).contiguous().numpy()}) for image in images]
    return torch.from_numpy(np.concatenate([next(iter(output.values())) for output in outputs]))


def test_resnet20_by_rm_in_one_call(tmp_path: Path) -> None:
    images = normalised(cifar10("test", 8)[0])
    network = plain(akamaster_resnet20(), images[:4])
    done = unskip.export(network, tmp_path / "net.tflite", example=images, target="tflite")
    print(f"\n{done}")
    assert done.error <= 2e-5
    expected = network(images).detach()
    assert (by_hand(tmp_path / "net.tflite", images) - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(("name", "points"), [("resnet20, rm", 0.5), ("pnnh_resnet20_wide", 0.5)])
def test_int8_keeps_the_accuracy_on_all_test_images(name: str, points: float, tmp_path: Path) -> None:
    calibrate, (images, labels) = cifar10("train", 512)[0], cifar10("test", 10_000)
    if name == "resnet20, rm":
        calibrate, images = normalised(calibrate), normalised(images)
        network = plain(akamaster_resnet20(), images[:4])
    else:
        trained = unskip.create_model(name, pretrained=True).eval()
        mean, std = (trained.pretrained_cfg[key] for key in ("mean", "std"))
        calibrate, images = normalised(calibrate, mean, std), normalised(images, mean, std)
        network = unskip.fold(trained)
    target = Tflite(calibrate=calibrate, test=(images, labels), limit=points)
    done = unskip.export(network, tmp_path / "net.tflite", example=images[:4], target=target)
    print(f"\n{done}")
    assert isinstance(done, TfliteInt8)
    assert done.error <= 2e-5
    assert done.accuracy.inputs == 10_000
    assert done.accuracy.before is not None
    assert done.accuracy.before > 85
    assert done.accuracy.loss <= points


def test_a_residual_network_of_option_a_is_right_too(tmp_path: Path) -> None:
    images = torch.randn(4, 3, 32, 32)
    network = cifar_resnet(8, num_classes=10).eval()
    assert unskip.export(network, tmp_path / "net.tflite", example=images, target="tflite").error <= 2e-5


def test_int8_that_loses_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    images = torch.randn(2000, 3, 8, 8)  # of a loss on few inputs nobody can say that it is one
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).eval()
    with torch.no_grad():
        network[0].weight[0, 0, 0, 0] = 1e3  # one channel takes all the range of the activations
    target = Tflite(calibrate=images[:64], test=(images, network(images).argmax(1)), limit=0)
    with pytest.raises(ValueError, match=r"INT8 loses [\d.]+ points"):
        unskip.export(network, tmp_path / "net.tflite", example=images[:2], target=target)
    assert not list(tmp_path.iterdir())
