"""The ONNX files that devices' tools read, without the tools; and what is said where they are missing."""

import importlib
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.io.shipping import Int8, ModelSource, export_to_file
from unskip.models.cifar import cifar_resnet
from unskip.ship.targets import TARGETS, Hls4ml
from unskip.ship.targets.layers import as_layers, named_layers

X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MODULES = {"hls4ml": "hls4ml", "tflite": "litert_torch", "executorch": "executorch"}


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return unskip.fold(unskip.plainify(cifar_resnet(8).eval(), "rm"), example=X)


@pytest.mark.parametrize("target", ["hls4ml", "qonnx"])
def test_the_file_for_a_targets_tools_is_static_plain_layers(target: str, plain: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    done = unskip.export(plain, file, example=X, target=target)
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version <= 13
    kinds = {node.op_type for node in model.graph.node}
    assert kinds == {"Conv", "Relu", "AveragePool", "Reshape", "Gemm"}  # no Identity, no ReduceMean
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
    assert all(shape and all(shape) for shape in shapes.values())  # every size is known
    assert shapes["input"] == [1, 3, 16, 16]
    assert {name for node in model.graph.node for name in node.output} <= shapes.keys()
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    y = torch.cat([torch.from_numpy(session.run(None, {"input": x.numpy()})[0]) for x in X.split(1)])
    torch.testing.assert_close(y, plain(X).detach(), rtol=1e-4, atol=1e-5)
    said = {entry.key: entry.value for entry in model.metadata_props}
    assert said["target"] == target
    assert said["input"].startswith("1 x 3 x 16 x 16")
    assert f"for {target}" in str(done)


@pytest.mark.parametrize("target", MODULES)
def test_a_missing_tool_is_named_with_the_extra_that_installs_it(
    target: str, plain: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[target], None)  # cannot be imported
    path = tmp_path / f"net{TARGETS[target].suffix}"
    with pytest.raises(ValueError, match=rf"needs {MODULES[target]}.*pip install 'unskip\[{target}\]'"):
        unskip.export(plain, path, example=X, target=target)
    assert not list(tmp_path.iterdir())


def test_the_file_for_qonnx_says_that_its_executor_did_not_run(
    plain: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "qonnx", None)
    said = str(unskip.export(plain, tmp_path / "net.onnx", example=X, target="qonnx"))
    assert "its executor did not run it: `pip install 'unskip[qonnx]'`" in said


class ByFunctions(nn.Module):
    """Whatever is a layer, written as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.off, self.fc = nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.off(F.relu6(self.conv(F.leaky_relu(x, 0.3))))
        x = F.adaptive_avg_pool2d(x.relu(), 2).mean((-1, -2), keepdim=True)
        return self.fc(x.view(x.size(0), -1).contiguous())


def test_functions_become_layers() -> None:
    network = ByFunctions().eval()
    layers = as_layers(network, X)
    torch.testing.assert_close(layers(X), network(X))
    kinds = [type(layer).__name__ for _, layer in named_layers(layers)]
    assert kinds == ["LeakyReLU", "Conv2d", "ReLU6", "ReLU", "AvgPool2d", "AvgPool2d", "Flatten", "Linear"]


def test_pooling_over_windows_of_unequal_size_stays_a_function() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten()).eval()
    assert [type(layer).__name__ for _, layer in named_layers(as_layers(network, X))][1] == "AdaptiveAvgPool2d"


REFUSED = {
    "groups": (nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten()), "'0': it has 3 groups"),
    "layer": (nn.Sequential(nn.Conv2d(3, 6, 3), nn.GELU(), nn.Flatten()), "'1': hls4ml has no GELU"),
    "padding": (nn.Sequential(nn.Conv2d(3, 6, 3, padding="same"), nn.Flatten()), "'0': hls4ml takes zero padding"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hls4ml_refuses_a_layer_that_it_has_not_by_name(name: str, tmp_path: Path) -> None:
    network, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        unskip.export(network.eval(), tmp_path / "net.onnx", example=X, target="hls4ml")


class Shortcut(nn.Module):
    """Option A: zeros beside the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))).flatten(1)


class Decides(nn.Module):
    """Not to be followed by torch.fx."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).relu() if x.shape[2] > 4 else x.flatten(1)


def test_a_shortcut_of_option_a_is_refused_for_hls4ml_alone(tmp_path: Path) -> None:
    network = Shortcut().eval()
    with pytest.raises(ValueError, match=r"'getitem': hls4ml has no getitem"):
        unskip.export(network, tmp_path / "net.onnx", example=X, target="hls4ml")
    assert unskip.export(network, tmp_path / "net.onnx", example=X, target="tflite").error <= 1e-4


def test_what_torch_fx_cannot_follow_is_refused_for_hls4ml_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Decides can't be read layer by layer"):
        unskip.export(Decides().eval(), tmp_path / "net.onnx", example=X, target="hls4ml")
    assert unskip.export(Decides().eval(), tmp_path / "net.onnx", example=X, target="tflite").error == 0


def test_what_is_wrong_with_a_target_is_a_sentence(plain: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="target='fpga' must be 'onnx', 'hls4ml', 'qonnx', 'tflite', 'executorch'"):
        unskip.export(plain, tmp_path / "net.onnx", example=X, target="fpga")
    with pytest.raises(ValueError, match=r"for target='tflite' must end in \.tflite, or end in \.onnx"):
        unskip.export(plain, tmp_path / "net.pte", example=X, target="tflite")
    with pytest.raises(ValueError, match=r"precision='16' must be .* 'ap_fixed<16,6>'"):
        Hls4ml(precision="16")
    with pytest.raises(ValueError, match="computes in float32"):
        unskip.export(timm.create_model("test_resnet").eval().double(), tmp_path / "n.onnx", example=X, target="qonnx")


def test_numbers_that_would_wrap_around_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hls4ml", importlib)  # there, and not reached
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten()).eval()
    with pytest.raises(ValueError, match=r"the input needs 7 bits .*'ap_fixed<16,6>' has 6.*'ap_fixed<17,7>'"):
        unskip.export(network, tmp_path / "project", example=X.clamp(-1, 1) * 40, target="hls4ml")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_for_a_target(tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    source = ModelSource(model_spec="pnnh_resnet20", input_size="3x16x16")
    _, done = export_to_file(source, file, target="hls4ml")
    assert onnx.load(file).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert "for hls4ml" in str(done)
    words = "--int8 is for ONNX and for --target tflite, and not for --target hls4ml"
    with pytest.raises(ValueError, match=words):
        export_to_file(source, tmp_path / "8.onnx", target="hls4ml", int8=Int8(data="digits"))
