"""INT8 files: small, close to the network, refused where they are not, and honest about each layer."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import unskip
from unskip.data.config import DataConfig
from unskip.data.sets import Split, load
from unskip.models.cifar import cifar_resnet
from unskip.ship import quantize


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images to train on and to test on, with their classes."""
    data = load(DataConfig(dataset="digits", val_fraction=0.0))

    def tensors(split: Split) -> tuple[Tensor, Tensor]:
        assert isinstance(split.images, Tensor)
        return (split.images.permute(0, 3, 1, 2).float() / 255 - 0.3) * 3, split.labels

    return (*tensors(data.train), *tensors(data.test))


@pytest.fixture(scope="module")
def trained(digits: tuple[Tensor, Tensor, Tensor, Tensor]) -> nn.Module:
    """An 8-layer PNNH that has learnt its digits, folded."""
    torch.manual_seed(0)
    network = unskip.plainify(cifar_resnet(8, in_chans=1, num_classes=10), "pnnh")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    x, y = digits[:2]
    for _ in range(2):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[index]), y[index]).backward()
            optimizer.step()
    return unskip.fold(network.eval())


def test_a_trained_network_keeps_its_accuracy(
    trained: nn.Module, digits: tuple[Tensor, Tensor, Tensor, Tensor], tmp_path: Path
) -> None:
    x, _, x_test, y_test = digits
    file = tmp_path / "net.onnx"
    loader = [(part, None) for part in x[:256].split(50)]  # as a DataLoader gives them
    quantized = quantize(trained, file, calibrate=loader, test=(x_test, y_test), limit=2.0, metadata={"mean": "0.3"})
    # By hand: what onnxruntime makes of the file.
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    answers = session.run(None, {"input": x_test.numpy()})[0].argmax(1)
    after = 100 * float((answers == y_test.numpy()).mean())
    with torch.no_grad():
        before_answers = trained(x_test).argmax(1)
    before = 100 * float((before_answers == y_test).float().mean())
    assert before > 80  # it has learnt something
    accuracy = quantized.accuracy
    assert accuracy.after == pytest.approx(after)
    assert accuracy.before == pytest.approx(before, abs=0.01)
    assert accuracy.agreement == pytest.approx(100 * float((answers == before_answers.numpy()).mean()), abs=0.3)
    assert accuracy.inputs == len(x_test)
    assert quantized.calibrated == 256
    assert quantized.bytes_after == file.stat().st_size < 0.5 * quantized.bytes_before

    model = onnx.load(file)
    weights = [t for t in model.graph.initializer if t.name.endswith(".weight_quantized")]
    assert len(weights) == 8  # stem, six convolutions, classifier
    for tensor in weights:
        assert tensor.data_type == onnx.TensorProto.INT8
        assert np.abs(onnx.numpy_helper.to_array(tensor)).max() <= 64  # 7 bits
    assert {e.key: e.value for e in model.metadata_props}.items() >= quantized.metadata.items()
    assert quantized.metadata["mean"] == "0.3"
    assert quantized.metadata["calibrated on"] == "256 inputs"

    paths = [layer.path for layer in quantized.layers]
    assert len(paths) == 8
    assert (paths[0], paths[-1]) == ("conv1", "fc")
    # By hand for the stem: what the file's integers and scales say against the weights.
    weight = trained.conv1.weight.detach().numpy()
    stored = {
        t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name.startswith("conv1.weight")
    }
    scale = stored["conv1.weight_scale"].reshape(-1, 1, 1, 1)
    assert np.allclose(scale, np.abs(weight).max((1, 2, 3), keepdims=True) / 64, rtol=0.02)  # 7 bits of every channel
    noise = weight - stored["conv1.weight_quantized"] * scale
    expected = 10 * np.log10(np.square(weight).sum() / np.square(noise).sum())
    assert quantized.layers[0].weights == pytest.approx(expected, abs=0.01)
    assert all(layer.output is not None and 10 < layer.output < 60 for layer in quantized.layers)
    text = str(quantized)
    assert f"{before:.2f} % before" in text
    assert "layer3.0.2" in text


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


def test_more_loss_than_allowed_is_refused_with_the_table(tmp_path: Path) -> None:
    """Calibrated on inputs that are far too small, the ranges are wrong."""
    file = tmp_path / "net.onnx"
    file.write_text("old")
    network, x = tiny(), torch.randn(200, 3, 8, 8)
    answers = network(x).argmax(1)
    with pytest.raises(ValueError, match=r"points of accuracy would be lost, more than limit=0\.5.*\n.*\n.*\n\nlayer"):
        quantize(network, file, calibrate=x[:64] * 0.02, test=[(x, answers)], force=True)
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]
    quantized = quantize(network, file, calibrate=x[:64], limit=20, bits=8, force=True)
    assert quantized.accuracy.before is None
    assert "no labels given" in str(quantized)
    assert quantized.accuracy.loss == 100 - quantized.accuracy.agreement
    assert [layer.path for layer in quantized.layers] == ["0", "3"]
    stem = next(t for t in onnx.load(file).graph.initializer if t.name == "0.weight_quantized")
    assert np.abs(onnx.numpy_helper.to_array(stem)).max() > 120  # 8 bits


X = torch.ones(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "net.pt2"}, r"path='.*net\.pt2' must end in \.onnx"),
        ({"path": "there.onnx"}, "is there already"),
        ({"bits": 4}, r"bits=4 must be 7 .* or 8"),
        ({"limit": -1}, "limit=-1 must be a number of points"),
        ({"calibrate": []}, "calibrate has no inputs"),
        ({"calibrate": X.long()}, r"calibrate has torch.int64 \(2, 3, 8, 8\)"),
        ({"calibrate": "digits"}, "calibrate has 'digits' where a batch"),
        ({"calibrate": X / 0}, "calibrate has inputs that are not finite"),
        ({"calibrate": torch.ones(2, 1, 8, 8)}, r"can't run on an example of shape \(2, 1, 8, 8\)"),
        ({"test": (X, torch.ones(2))}, r"one whole number for each input is expected"),
        ({"test": [X]}, r"test must be inputs and their classes"),
        ({"test": []}, r"test has no inputs"),
        ({"calibrate": [X, X[..., :4]]}, r"inputs of shape \(3, 8, 8\) and of \(3, 8, 4\); bring them to one size"),
        ({"test": (X[..., :4], torch.ones(2).long())}, r"test has inputs of shape \(3, 8, 4\), and calibrate of"),
        ({"test": (X / 0, torch.ones(2).long())}, "test has inputs that are not finite"),
        ({"test": (X, torch.tensor([0, 99]))}, r"test has classes from 0 to 99, and the network knows \d+"),
    ],
)
def test_what_is_wrong_gets_a_sentence_and_leaves_no_file(options: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "there.onnx").write_text("old")
    asked = {"path": "net.onnx", "calibrate": X, **options}
    with pytest.raises(ValueError, match=message):
        quantize(tiny(), tmp_path / asked.pop("path"), **asked)
    assert [p.name for p in tmp_path.iterdir()] == ["there.onnx"]


def test_a_network_that_answers_for_each_pixel(tmp_path: Path) -> None:
    """Its answers are as many as its pixels, and all of them count."""
    torch.manual_seed(0)
    network, x = nn.Conv2d(3, 4, 3, padding=1).eval(), torch.randn(8, 3, 6, 6)
    quantized = quantize(network, tmp_path / "pixels.onnx", calibrate=x, limit=100.0)
    session = onnxruntime.InferenceSession(str(tmp_path / "pixels.onnx"), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        same = session.run(None, {"input": x.numpy()})[0].argmax(1) == network(x).argmax(1).numpy()
    assert quantized.accuracy.agreement == pytest.approx(100 * same.mean())
    assert quantized.accuracy.inputs == 8
    with pytest.raises(ValueError, match=r"output of shape \(8, 4, 6, 6\) is no score for each class of each input"):
        quantize(network, tmp_path / "a.onnx", calibrate=x, test=(x, torch.zeros(8, dtype=torch.int64)))


def test_a_network_with_one_number_for_each_input_is_refused(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).eval()
    with pytest.raises(ValueError, match=r"output of shape \(8,\) is no score for each class, so that"):
        quantize(network, tmp_path / "a.onnx", calibrate=torch.randn(8, 3))
    with pytest.raises(ValueError, match="test=5 must be inputs and their classes"):
        quantize(network, tmp_path / "a.onnx", calibrate=torch.randn(8, 3), test=5)  # type: ignore[arg-type]
    assert not (tmp_path / "a.onnx").exists()
