"""Quantisation-aware training: it wins back what few bits cost, and the INT8 file agrees with what was trained."""

from pathlib import Path

import onnxruntime
import pytest
import torch

import unskip
from unskip.data.config import DataConfig
from unskip.data.sets import DataSet, load
from unskip.models.cifar import cifar_resnet
from unskip.ship import FakeQuantized, fake_quantized, fold, quantize
from unskip.train import Recipe, run


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return load(DataConfig(dataset="digits", val_fraction=0.0))


@pytest.fixture(scope="module")
def trained(digits: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "float"
    run(recipe(lr=0.05, epochs=2), data=digits, out=out, silent=True)
    return out


def recipe(**more: object) -> Recipe:
    return Recipe.of(
        model="resnet20",
        options={"widths": [8, 8, 8]},
        dataset="digits",
        val_fraction=0.0,
        batch=64,
        device="cpu",
        **more,
    )


@pytest.mark.full
def test_training_in_few_bits_wins_accuracy_back(trained: Path, digits: DataSet, tmp_path: Path) -> None:
    """Rounded to 3 bits after training, the network loses much; two epochs in 3 bits win most of it back."""
    start = recipe(init_from=str(trained), quantize=3, lr=0.0001, epochs=1)
    rounded = run(start, data=digits, out=tmp_path / "rounded", silent=True)
    trained_so = run(start.replace(lr=0.01, epochs=2), data=digits, out=tmp_path / "trained", silent=True)
    assert trained_so.test_loss < 0.8 * rounded.test_loss
    network = unskip.load(tmp_path / "trained")  # the network file of the run
    layers = [module for module in network.modules() if isinstance(module, FakeQuantized)]
    assert len(layers) == 20
    for layer in layers:
        weight = layer.layer.weight.detach()
        step = weight.abs().flatten(1).amax(1).view(-1, *[1] * (weight.ndim - 1)) / 3
        found = torch.fake_quantize_per_channel_affine(weight, step.flatten(), torch.zeros(len(step)).int(), 0, -3, 3)
        assert (weight - found).abs().max() > 0.01 * weight.abs().max()  # the float weights are kept


def test_random_weights_are_refused(digits: DataSet, tmp_path: Path) -> None:
    """Their norms have no statistics, and their ranges say nothing."""
    with pytest.raises(ValueError, match=r"quantize=8 needs a trained network to start from, and resnet20"):
        run(recipe(quantize=8), data=digits, out=tmp_path / "run", silent=True)


def test_the_file_agrees_with_the_network_that_was_trained(digits: DataSet, tmp_path: Path) -> None:
    """onnxruntime's integers beside PyTorch's fake quantisation: the same ranges, the same weights."""
    torch.manual_seed(0)
    net = unskip.plainify(cifar_resnet(8, in_chans=1), "plain").eval()
    images = digits.train.images
    assert isinstance(images, torch.Tensor)
    x = (images[:256].permute(0, 3, 1, 2).float() / 255 - 0.3) * 3
    net.train()(x)
    folded = fold(net.eval(), example=x[:2])
    for bits in (7, 8):
        network = fake_quantized(folded, x[:64] / 2, bits=bits)  # ranges that calibration on x would not find
        file = tmp_path / f"{bits}.onnx"
        quantize(network, file, calibrate=x, bits=bits, limit=100.0)
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
        with torch.no_grad():
            expected, plain = network(x), folded(x)
        error = (found - expected).norm() / expected.norm()
        assert error < 0.02  # the file rounds its output too
        assert (plain - expected).norm() / plain.norm() > 3 * error  # and the ranges are not calibration's
    with pytest.raises(ValueError, match="bits=7, and the network was trained with weights of 8 bits"):
        quantize(network, tmp_path / "other.onnx", calibrate=x, bits=7)
