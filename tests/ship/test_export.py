"""Exported files are run by programs that we did not write, and must compute what the network does."""

import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import timm
import torch
from torch import Tensor, nn

import unskip
from tests.ship.test_fold import CNNS, swin, trained, vit
from unskip.models.cifar import cifar_resnet, wide_resnet

# What a plain CNN or MLP may be made of. Max is SReLU, max(x, b); Clip is ReLU6; Min behind Relu is a ReLU6 that spares
# the channels in which rm carries a block's input.
PLAIN = {
    "Conv", "Gemm", "MatMul", "Relu", "LeakyRelu", "PRelu", "Tanh", "Clip", "Max", "Min", "MaxPool", "AveragePool",
    "GlobalAveragePool", "ReduceMean", "Flatten", "Reshape",
}  # fmt: skip
QUICK = ("pnnh",)
X = torch.ones(2, 3, 8, 8)


def small(method: str = "pnnh", **options: object) -> nn.Module:
    return trained(unskip.plainify(cifar_resnet(8), method, **options))


def run(file: Path, x: Tensor) -> Tensor:
    """By hand rather than by `export`."""
    if file.suffix == ".pt2":
        return torch.export.load(str(file)).module()(x)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["output"], {"input": x.numpy()})[0])


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / a.abs().max()).item()


def own_weights(network: nn.Module) -> int:
    """Numbers that a network holds, each tensor once."""
    return sum({id(t): t.numel() for t in (*network.parameters(), *network.buffers())}.values())


def without_skips(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: unskip.plainify(trained(build()), "rm", limit=math.inf)


VARIANTS = {"pnnh, whole transitions", "pnnh, quarter", "pnnh, second norm", "pnnh, identity", "seq", "with dropout"}
VARIANTS |= {"wrn, plain", "wrn, looks_linear", "wrn, iso", "torchvision, plain", "mobilenet, plain", "dominant"}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    **{name: build for name, build in CNNS.items() if name not in VARIANTS},  # whose graphs are those of the others
    "rm": without_skips(lambda: cifar_resnet(8)),
    "wrn, rm": without_skips(lambda: wide_resnet(10, 1)),
    "mobilenet, rm": without_skips(lambda: timm.create_model("mobilenetv2_035", num_classes=10)),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.full]) for n in FAMILIES])
def test_a_folded_cnn_is_plain_layers_in_the_file_too(name: str, tmp_path: Path) -> None:
    folded, file = unskip.fold(trained(FAMILIES[name]())), tmp_path / "net.onnx"
    unskip.export(folded, file, example=torch.randn(2, 3, 17, 16))
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert {node.op_type for node in model.graph.node} <= PLAIN
    x = torch.randn(5, 3, 17, 16)
    assert relative(folded(x), run(file, x)) <= 1e-4
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["plainnet_mlp", "seqnet_mlp"])
def test_a_folded_mlp_is_plain_layers_in_the_file_too(name: str, tmp_path: Path) -> None:
    folded, file = unskip.fold(trained(unskip.create_model(name, depth=8, width=20))), tmp_path / "net.onnx"
    unskip.export(folded, file, example=torch.randn(2, 1, 16, 16))
    assert {node.op_type for node in onnx.load(file).graph.node} <= PLAIN
    x = torch.randn(5, 1, 16, 16)
    assert relative(folded(x), run(file, x)) <= 1e-4


def deeper(**options: object) -> nn.Module:
    return unskip.plainify(cifar_resnet(14), "pnnh", **options)


SHARED: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "coders": (deeper, None),
    "fitted coders": (lambda: deeper(pretext="random"), None),
    "coders, fast": (deeper, "fast"),
    "tied": (CNNS["seq, tied"], None),
    "tied bottles": (CNNS["seqnet, bottles"], None),
    "transformer": (lambda: vit(method="pnnh"), None),
    "transformer, fast": (lambda: vit(method="pnnh"), "fast"),
    "swin": (lambda: swin(method="pnnh"), None),
}


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        pytest.param(name, suffix, marks=[] if quick else [pytest.mark.full])
        for name in SHARED
        for suffix in (("onnx", "pt2") if "tied" in name else ("onnx",))
        for quick in [(name, suffix) in {("fitted coders", "onnx")}]
    ],
)
def test_shared_weights_are_stored_once(name: str, suffix: str, tmp_path: Path) -> None:
    build, form = SHARED[name]
    network = trained(build())
    network = network if form is None else unskip.fold(network, form)
    file = tmp_path / f"net.{suffix}"
    exported = unskip.export(network, file, example=torch.randn(2, 3, 32, 32))
    numbers = own_weights(network)
    assert exported.weights <= numbers + 8  # and the constants of a cheap coder or of attention
    assert file.stat().st_size == exported.bytes <= 4 * numbers + 500_000
    if suffix == "onnx":
        stored = [t for t in onnx.load(file).graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
        assert sum(onnx.numpy_helper.to_array(t).size for t in stored) <= numbers + 8
        large = [onnx.numpy_helper.to_array(t).tobytes() for t in stored if torch.Size(t.dims).numel() > 64]
        assert len(large) == len(set(large))
    x = torch.randn(3, 3, 32, 32)
    assert relative(network(x), run(file, x)) <= 1e-4


def test_a_file_says_what_it_is_and_nothing_about_the_machine(tmp_path: Path) -> None:
    folded = unskip.fold(small())
    source = str(Path(unskip.__file__).parent).encode()
    x = torch.randn(1, 3, 16, 16)  # one alone, and the batch is free all the same
    extra = {"mean": "0.5"}
    for file in (tmp_path / "net.onnx", tmp_path / "net.pt2"):
        exported = unskip.export(folded, file, example=x, metadata=extra)
        assert exported.batches == (1, 1, 2)
        assert str(exported).startswith(f"{file}: ")
        if file.suffix == ".onnx":
            model = onnx.load(file)
            found = {entry.key: entry.value for entry in model.metadata_props}
            assert found["opset"] == "18" == str(model.opset_import[0].version)
            assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
        else:
            files = {"unskip.json": ""}
            torch.export.load(str(file), extra_files=files)
            found = json.loads(files["unskip.json"])
        assert found == exported.metadata
        assert found["unskip"] == unskip.__version__
        assert found["torch"] == torch.__version__
        assert (found["method"], found["form"], found["mean"]) == ("pnnh", "dense", "0.5")
        assert found["input"] == "batch x 3 x 16 x 16, float32"
        assert float(found["relative error"]) <= 1e-4
        assert source not in file.read_bytes()
        many = torch.randn(7, 3, 16, 16)
        assert relative(folded(many), run(file, many)) <= 1e-4


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


@pytest.mark.full
def test_another_opset(tmp_path: Path) -> None:
    exported = unskip.export(tiny(), tmp_path / "a.onnx", example=X, opset=20)
    assert exported.opset == onnx.load(tmp_path / "a.onnx").opset_import[0].version == 20


@pytest.mark.full
def test_the_network_itself_stays_as_it_was(tmp_path: Path) -> None:
    network = small()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    unskip.export(network, tmp_path / "net.pt2", example=torch.randn(2, 3, 16, 16))
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert not network.training


@pytest.mark.full
def test_double_precision_as_pt2_but_not_as_onnx(tmp_path: Path) -> None:
    network, x = tiny().double(), X.double()
    exported = unskip.export(network, tmp_path / "net.pt2", example=x)
    assert exported.error <= 1e-12
    with pytest.raises(ValueError, match=r"export: the network is in torch.float64, .* call \.float\(\) first"):
        unskip.export(network, tmp_path / "net.onnx", example=x)


def test_the_coders_of_transitions_pool_odd_sizes_in_the_file_too(tmp_path: Path) -> None:
    """ONNX divides by the pixels that a window over the edge has; the coder by all that it could have."""
    fast = unskip.fold(small(), "fast")
    unskip.export(fast, tmp_path / "net.onnx", example=torch.randn(2, 3, 9, 11))
    x = torch.randn(3, 3, 9, 11)
    assert relative(fast(x), run(tmp_path / "net.onnx", x)) <= 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {"mean": 0.5}}, "metadata has 'mean': 0.5, and a file holds text alone"),
        ({"opset": "18"}, "opset='18' must be a whole number"),
        ({"opset": 999}, r"opset=999 .* can't write this network with it \(it wrote opset 18\); leave out opset"),
        ({"example": X.to("meta")}, "the example is on the meta device"),
        ({"example": X.numpy()}, "example=a ndarray must be a batch"),
    ],
)
def test_a_wrong_option_gets_a_sentence(options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        unskip.export(small(), tmp_path / "net.onnx", **{"example": X, **options})
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- what is refused


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Branches(nn.Module):
    """Goes another way for each input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x


@pytest.mark.parametrize(
    ("network", "name", "example", "message"),
    [
        (lambda: small().train(), "net.onnx", X, r"export: 'CifarResNet' is in training mode.*call \.eval\(\)"),
        (small, "net.tflite", X, r"path='.*net\.tflite' must end in \.onnx .* or \.pt2"),
        (small, "net", X, r"must end in \.onnx"),
        (small, "nowhere/net.onnx", X, r"the folder '.*nowhere' of path does not exist"),
        (small, "there.onnx", X, r"there\.onnx' is there already\. Choose another path, or .* force=True"),
        (small, "net.onnx", torch.ones(2, 1, 8, 8), r"CifarResNet can't run on an example of shape \(2, 1, 8, 8\): "),
        (small, "net.onnx", torch.ones(8), r"example=torch.float32 \(8,\) must be a batch of floating-point inputs"),
        (small, "net.onnx", torch.ones(2, 3, 8, 8, dtype=torch.int64), r"example=torch.int64 .* must be a batch"),
        (small, "net.onnx", "x", "example='x' must be a batch"),
        (lambda: "resnet20", "net.onnx", X, "model='resnet20' is not an nn.Module"),
        (lambda: Two().eval(), "net.onnx", X, "Two does not return one tensor"),
        (lambda: Branches().eval(), "net.pt2", X, r"torch\.export can't follow Branches with a free batch"),
        (lambda: nn.Conv2d(3, 3, 1, device="meta").eval(), "net.pt2", X, "is on the meta device"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).eval().half(), "net.onnx", X, "is in torch.float16"),
    ],
)
def test_what_is_wrong_gets_a_sentence_and_leaves_no_file(
    network: Callable[[], nn.Module], name: str, example: Tensor, message: str, tmp_path: Path
) -> None:
    (tmp_path / "there.onnx").write_text("old")
    with pytest.raises(ValueError, match=message):
        unskip.export(network(), tmp_path / name, example=example)
    assert [p.name for p in tmp_path.iterdir()] == ["there.onnx"]
    assert (tmp_path / "there.onnx").read_text() == "old"


def test_without_the_packages_of_onnx_there_is_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=r"ONNX needs onnxscript, .*pip install 'unskip\[export\]'.*\.pt2"):
        unskip.export(small(), tmp_path / "net.onnx", example=X)


def test_a_file_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that answers wrongly by a thousandth, in place of a broken exporter."""
    file = tmp_path / "net.onnx"
    file.write_text("old")
    module = importlib.import_module("unskip.ship.writing")
    real = module.onnx_runner
    monkeypatch.setattr(module, "onnx_runner", lambda model: lambda x: real(model)(x) * 1.001)
    with pytest.raises(ValueError, match=r"what net\.onnx computes differs .* so the file was not kept"):
        unskip.export(tiny(), file, example=X, force=True)
    assert file.read_text() == "old"
    monkeypatch.undo()
    unskip.export(tiny(), file, example=X, force=True)
    onnx.checker.check_model(str(file))
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


def test_a_forward_that_belongs_to_the_original_is_a_sentence(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).eval()
    forward = network[0].forward
    network[0].forward = lambda x: 1.25 * forward(x)
    with pytest.raises(ValueError, match=r"export: a copy of Sequential in float64 can't run: .* set on an instance"):
        unskip.export(network, tmp_path / "net.pt2", example=torch.randn(2, 3, 8, 8))
    assert not list(tmp_path.iterdir())
