"""Network files: what was written is what is opened, in later versions too, and hostile files run nothing."""

import copy
import json
import os
import pickle
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from tests.io.make_fixtures import FIXTURES, question
from tests.ship.test_fold import trained as as_trained
from unskip.io import load_model, register_layer, save
from unskip.io.graph import LAYERS, NAMES
from unskip.io.shipping import ModelSource, fold_to_file, plainify_to_file
from unskip.models.cifar import cifar_resnet
from unskip.surgery import find_blocks
from unskip.train import load_recipe, run

OUTPUTS = json.loads((FIXTURES / "outputs.json").read_text())


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_files_of_earlier_versions_open(name: str) -> None:
    """Never write these anew: whoever has such a file has it for good."""
    loaded = load_model(str(FIXTURES / f"{name}.safetensors"))
    with torch.no_grad():
        found = loaded.model.double()(question(*loaded.input_size))
    torch.testing.assert_close(found, torch.tensor(OUTPUTS[name], dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert loaded.trained
    assert not loaded.model.training


def test_there_is_a_fixture_of_each_kind() -> None:
    assert {path.stem for path in FIXTURES.glob("*.safetensors")} == set(OUTPUTS) >= {"named", "pnnh8-folded"}
    assert all(path.stat().st_size < 30_000 for path in FIXTURES.iterdir())


# ---------------------------------------------------------------- what comes back


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PNNH-20 after an epoch of digits."""
    out = tmp_path_factory.mktemp("run") / "digits"
    run(load_recipe("digits-pnnh-56", model="pnnh_resnet20", epochs=1, warmup_epochs=0.0), out=out, silent=True)
    return out


@pytest.fixture(scope="module")
def folded(trained: Path) -> Path:
    out = trained.parent / "folded.safetensors"
    fold_to_file(ModelSource(model_spec=str(trained)), out)
    return out


def metadata(file: Path) -> dict:
    with safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["unskip"])


def test_a_folded_network_comes_back(trained: Path, folded: Path) -> None:
    original = load_model(str(trained))
    begun = time.perf_counter()
    again = load_model(str(folded))
    assert time.perf_counter() - begun < 3  # no surgery, no folding
    x = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        y = original.model.eval()(x)
        assert (again.model(x) - y).abs().max() <= 1e-4 * y.abs().max()
        assert torch.equal(unskip.load(folded)(x), again.model(x))
    assert not any("running_mean" in key for key in load_file(folded))  # no norm is left
    assert again.input_size == (1, 8, 8)
    assert again.name == "pnnh_resnet20 of digits, folded (dense)"
    assert again.model.surgery.replaced == original.model.surgery.replaced
    assert not again.model.training
    said = metadata(folded)
    assert (said["format"], said["version"], said["folded"]) == (2, unskip.__version__, "dense")
    assert said["data"]["dataset"] == "digits"
    assert "The networks agree" in said["proof"]
    assert len(said["output"]) == 20  # two inputs, ten classes


def test_a_run_is_loaded_with_the_weights_that_were_tested(trained: Path) -> None:
    model, saved = unskip.load(trained), load_file(trained / "weights.safetensors")
    assert not model.training
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())


def small_networks() -> dict[str, Callable[[], nn.Module]]:
    def of_method(method: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: as_trained(unskip.plainify(cifar_resnet(8, drop_rate=0.1).eval(), method, **options))

    return {
        **{name: of_method(name) for name in ("plain", "pnnh", "rm", "residual_half", "dirac", "iso", "looks_linear")},
        "tied": of_method("seq", tie="conv2"),
        "partial": of_method("pnnh", pretext="identity", uncarried="1x1"),
        "residual": lambda: cifar_resnet(8, drop_rate=0.1, drop_path_rate=0.1).eval(),
        "torchvision": lambda: torchvision.models.mobilenet_v2(width_mult=0.25).eval(),
        "timm": lambda: timm.create_model("test_efficientnet").eval(),
        "attention": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval(),
        "own": lambda: as_trained(Own()),
    }


class Own(nn.Module):
    """Somebody's network: functions between layers, a weight used twice, a frozen one, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1)
        self.third.weight = self.second.weight
        self.gain = nn.Parameter(torch.rand(8, 1, 1))
        self.register_buffer("shift", torch.rand(8, 1, 1), persistent=False)
        self.first.weight.requires_grad_(False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = F.relu(self.first(x))
        y = x + self.third(F.relu(self.second(x))) * self.gain
        y = torch.cat([y - self.shift, x], 1).mean((2, 3)) * scale
        return self.head(F.dropout(y, 0.5, self.training))


@pytest.mark.parametrize("name", small_networks())
def test_what_was_written_is_opened(name: str, tmp_path: Path) -> None:
    """The same numbers, names and gradients, in evaluation and in training."""
    model = small_networks()[name]()
    save(tmp_path / "net.safetensors", model, input_size=(3, 32, 32))
    again = unskip.load(tmp_path / "net.safetensors")
    x = torch.randn(2, 3, 32, 32)
    assert list(again.state_dict()) == list(model.state_dict())
    found, wanted = dict(again.named_parameters()), dict(model.named_parameters())
    assert [(key, p.requires_grad) for key, p in found.items()] == [(key, p.requires_grad) for key, p in wanted.items()]
    for train in (False, True):
        outputs = []
        for each in (model.train(train), again.train(train)):
            torch.manual_seed(0)  # of dropout and drop path
            outputs.append(each(x))
            outputs[-1].square().sum().backward()
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        for key, p in wanted.items():
            if p.requires_grad and p.grad is not None:
                torch.testing.assert_close(found[key].grad, p.grad, rtol=0, atol=0)
    for (key, a), (_, b) in zip(sorted(model.named_buffers()), sorted(again.named_buffers()), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=f"{key} after training")
    copy.deepcopy(again).load_state_dict(model.state_dict())


def test_from_file_to_file(tmp_path: Path) -> None:
    """What plainify wrote is folded, in both forms, and what was left residual is refused."""
    torch.save(as_trained(unskip.create_model("resnet20")).state_dict(), tmp_path / "weights.pt")
    source = ModelSource(model_spec="resnet20", weights=tmp_path / "weights.pt")
    x = torch.randn(2, 3, 32, 32)
    y = source.load("test").model(x)
    plainify_to_file(source, tmp_path / "rm.safetensors")
    for form in ("dense", "fast"):
        fold_to_file(
            ModelSource(model_spec=str(tmp_path / "rm.safetensors")), tmp_path / f"{form}.safetensors", form=form
        )
        z = unskip.load(tmp_path / f"{form}.safetensors")(x)
        assert (z - y).abs().max() <= 1e-4 * y.abs().max()
    plainify_to_file(ModelSource(model_spec="resnet20"), tmp_path / "pnnh.safetensors", method="pnnh")
    fresh = load_model(str(tmp_path / "pnnh.safetensors"))
    assert not fresh.trained  # its blocks are new
    assert fresh.model.surgery.method.ratio == 0.5
    assert len([path for path, _, _ in find_blocks(fresh.model)]) == 0
    fold_to_file(
        ModelSource(model_spec=str(tmp_path / "pnnh.safetensors")),
        tmp_path / "fast.safetensors",
        form="fast",
        force=True,
    )
    save(tmp_path / "residual.safetensors", unskip.create_model("resnet20"), input_size=(3, 32, 32))
    with pytest.raises(ValueError, match="keeps a skip connection"):
        fold_to_file(ModelSource(model_spec=str(tmp_path / "residual.safetensors")), tmp_path / "no.safetensors")


class Scale(nn.Module):
    def __init__(self, channels: int, power: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels))
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:  # which can't be traced
            return x
        return x * self.weight**self.power


def test_a_layer_of_another_package_is_registered_or_refused(tmp_path: Path) -> None:
    model, file = nn.Sequential(nn.Linear(4, 4), Scale(4, 0.5)), tmp_path / "net.safetensors"
    with pytest.raises(
        ValueError, match=r"can't be written as a network file: .*unskip\.io\.register_layer.*\.onnx or \.pt2"
    ):
        save(file, model, input_size=(4,))
    assert not file.exists()
    register_layer(Scale)
    try:
        save(file, model, input_size=(4,))
        x = torch.randn(3, 4)
        assert torch.equal(unskip.load(file)(x), model(x))
        with pytest.raises(ValueError, match=r"there is a layer 'tests\.Scale' already"):
            register_layer(type("Scale", (nn.Module,), {"__module__": "tests.other"}))
    finally:
        del LAYERS["tests.Scale"], NAMES[Scale]
    with pytest.raises(ValueError, match=r"a layer 'tests.Scale', which is not registered.*import that"):
        unskip.load(file)


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.training else self.b(x)


def test_what_can_not_be_expressed_is_refused(tmp_path: Path) -> None:
    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_forward_hook(lambda *_: None)
    for model, sentence in {
        Modes(): "does other things in training than in evaluation",
        hooked: "it has hooks",
    }.items():
        with pytest.raises(ValueError, match=rf"can't be written as a network file: .*{sentence}.*`unskip export`"):
            save(tmp_path / "net.safetensors", model, input_size=(4,))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- hostile and damaged files


def rewrite(file: Path, to: Path, weights: dict | None = None, **changes: object) -> str:
    said = {**metadata(file), **changes}
    save_file(load_file(file) if weights is None else weights, to, metadata={"unskip": json.dumps(said)})
    return str(to)


def test_what_was_tampered_with_is_refused(folded: Path, tmp_path: Path) -> None:
    other, weights = tmp_path / "other.safetensors", load_file(folded)
    wrong = {**weights, "fc.bias": weights["fc.bias"] + 0.01}
    with pytest.raises(ValueError, match=r"computes another function than the one that was written"):
        load_model(rewrite(folded, other, wrong))
    with pytest.raises(ValueError, match=r"there is no 'fc\.bias'"):
        load_model(rewrite(folded, other, {k: v for k, v in weights.items() if k != "fc.bias"}))
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'more'"):
        load_model(rewrite(folded, other, more=1))
    with pytest.raises(
        ValueError, match=r"other\.safetensors has format 9, and this version of unskip .* reads format 2"
    ):
        load_model(rewrite(folded, other, format=9))
    with pytest.raises(ValueError, match=r"was written by unskip 0\.1\.0\.dev0, .* not read any more\. Write it again"):
        load_model(rewrite(folded, other, format="unskip-network-1"))
    assert load_model(rewrite(folded, other)).name  # and unchanged it is read


def graph(*steps: list, layers: dict | None = None, **more: object) -> dict:
    return {"graph": {"layers": layers or {}, "steps": list(steps), "tensors": {}, "tied": {}, **more}}


X, END = {"step": 0}, ["output", "output", [{"step": 1}], {}]
LINEAR = {"class": "torch.Linear", "settings": {"in_features": 4, "out_features": 4}, "layers": {}, "none": []}
CALL = ["layer", "a", [X], {}]


def deep(n: int) -> Any:
    value: Any = []
    for _ in range(n):
        value = [value]
    return value


HOSTILE: dict[str, Any] = {
    "hub": {"model": "torch.hub:load", "options": {}},
    "system": {"model": "os:system", "options": {"command": "touch ran"}},
    "module": {"model": "evil_module:build", "options": {}},
    "other file": {"model": "other.safetensors", "options": {}},
    "folder": {"model": "runs/x", "options": {}},
    "checkpoint": {"model": "resnet20", "options": {"checkpoint_path": "evil.pth"}},
    "no name": {"model": 3, "options": {}},
    "no options": {"model": "resnet20", "options": "num_classes"},
    "nothing": {},
    "a list": [],
    "function": graph(["function", "os.system", ["touch ran"], {}], END),
    "builtin": graph(["function", "eval", ["open('ran', 'w')"], {}], END),
    "torch.load": graph(["function", "torch.load", ["evil.pth"], {}], END),
    "getattr": graph(["function", "getattr", [X, "__class__"], {}], END),
    "getattr by a result": graph(["function", "getattr", [X, X], {}], END),
    "getattr by name": graph(["function", "getattr", [X], {"name": "__class__"}], END),
    "method": graph(["method", "__reduce__", [X], {}], END),
    "method that is not registered": graph(["method", "numpy", [X], {}], END),
    "method of text": graph(["method", "split", ["a b"], {}], END),
    "class": graph(CALL, END, layers={"a": {**LINEAR, "class": "subprocess.Popen"}}),
    "path of a class": graph(CALL, END, layers={"a": {**LINEAR, "class": "torch.nn.modules.linear.Linear"}}),
    "dunder argument": graph(CALL, END, layers={"a": {**LINEAR, "settings": {"__class__": 1}}}),
    "dunder layer": graph(["layer", "__init__", [X], {}], END, layers={"__init__": LINEAR}),
    "dunder step": graph(["tensor", "__class__.__mro__", [], {}], END),
    "name that is no name": graph(CALL, END, layers={"a; import os": LINEAR}),
    "wrong argument types": graph(
        CALL, END, layers={"a": {**LINEAR, "settings": {"in_features": "x", "out_features": {}}}}
    ),
    "method of a class as attribute": graph(
        CALL, END, layers={"a": {"class": "unskip.CReLU", "settings": {"forward": 1}, "layers": {}, "none": []}}
    ),
    "hooks as attribute": graph(
        CALL, END, layers={"a": {"class": "unskip.CReLU", "settings": {"_forward_hooks": 1}, "layers": {}, "none": []}}
    ),
    "huge layer": graph(CALL, END, layers={"a": {**LINEAR, "settings": {"in_features": 2**60, "out_features": 2**60}}}),
    "layer with memory": graph(
        CALL, END, layers={"a": {**LINEAR, "settings": {"in_features": 2**40, "out_features": 4, "device": "cpu"}}}
    ),
    "method as tensor": graph(["tensor", "forward", [], {}], END),
    "layers as tensor": graph(["tensor", "_modules", [], {}], END),
    "layer that is not there": graph(CALL, END),
    "large layer": graph(CALL, END, layers={"a": {**LINEAR, "settings": {"in_features": 2**30, "out_features": 4}}}),
    "itself": graph(["function", "torch.relu", [{"step": 1}], {}], END),
    "later step": graph(["function", "torch.relu", [{"step": 2}], {}], ["function", "torch.relu", [X], {}], END),
    "step before all": graph(["function", "torch.relu", [{"step": -1}], {}], END),
    "step that is no number": graph(["function", "torch.relu", [{"step": "0"}], {}], END),
    "itself as a layer": graph(CALL, END, layers={"a": {"same": "a"}}),
    "no output": graph(["function", "torch.relu", [X], {}]),
    "no steps": graph(),
    "no tensor": graph(CALL, END, layers={"a": LINEAR}, tensors={"a.weight": "parameter"}),
    "a tensor of no kind": graph(["function", "torch.relu", [X], {}], END, tensors={"a": "code"}),
    "steps": graph(["function"], END),
    "unknown step": graph(["exec", "import os", [], {}], END),
    "deep": deep(5000),
    "deep in a value": graph(["function", "torch.relu", [deep(5000)], {}], END),
    "deep layers": graph(CALL, END, layers={"a": deep(5000)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_description_ends_in_a_sentence_and_runs_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import os, pathlib\npathlib.Path('ran').touch()\nbuild = os.abort\n"
    (tmp_path / "evil_module.py").write_text(code)
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Runs()))
    save_file({"w": torch.zeros(1)}, "other.safetensors")
    header: dict[str, Any] = {"format": 2, "version": "9", "name": "evil", "input_size": [4], "output": [0.0]}
    text = json.dumps(header)[:-1] + ', "network": '
    description = HOSTILE[name]
    text += (
        "[" * 5000 + "]" * 5000 if name.startswith("deep") and not isinstance(description, dict) else _dump(description)
    ) + "}"
    write_raw(tmp_path / "evil.safetensors", {"__metadata__": {"unskip": text}}, b"")
    with pytest.raises(ValueError, match=r"^load: the network in evil\.safetensors can't be opened: ") as refused:
        unskip.load("evil.safetensors")
    assert len(str(refused.value)) < 800
    assert not (tmp_path / "ran").exists()


def _dump(value: Any) -> str:
    """JSON of what may be nested too deeply for json.dumps."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_dump(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        depth = 0
        inner = value
        while isinstance(inner, list) and len(inner) == 1 and isinstance(inner[0], list):
            inner, depth = inner[0], depth + 1
        if depth > 100:
            return "[" * (depth + 1) + "]" * (depth + 1)
        return "[" + ", ".join(map(_dump, value)) + "]"
    return "[" + ", ".join(map(_dump, value)) + "]" if isinstance(value, list) else json.dumps(value)


class Runs:
    """What a hostile pickle does when it is loaded."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("ran",)


def write_raw(file: Path, header: dict, tensors: bytes) -> None:
    """A safetensors file byte by byte."""
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + tensors)


@pytest.mark.parametrize("size", [[2**60], [2**30, 2**30], [0], [-1], [], ["4"], [4.0], 4, [True], None])
def test_odd_input_sizes_are_refused(size: object, folded: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^doctor: the network in .* can't be opened: "):
        load_model(rewrite(folded, tmp_path / "other.safetensors", input_size=size))


def test_files_that_are_no_network_files(folded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = folded.read_bytes()
    huge = {"w": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 4]}}
    files: dict[str, Callable[[Path], object]] = {
        "cut.safetensors": lambda file: file.write_bytes(whole[:-100]),
        "header.safetensors": lambda file: file.write_bytes(whole[:500]),
        "pickle.safetensors": lambda file: file.write_bytes(pickle.dumps(Runs())),
        "torch.safetensors": lambda file: torch.save(Runs(), file),
        "long.safetensors": lambda file: file.write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        "shape.safetensors": lambda file: write_raw(file, huge, b"0000"),
    }
    for name, make in files.items():
        make(tmp_path / name)
        with pytest.raises(ValueError, match=rf"^load: {name} can't be read as safetensors: .*--weights FILE"):
            unskip.load(name)
    os.mkfifo("pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"'pipe\.safetensors' is neither a file nor a folder"):
        unskip.load("pipe.safetensors")
    with pytest.raises(ValueError, match=r"pipe\.safetensors can't be read: it is no file"):
        unskip.load("resnet20", weights="pipe.safetensors")
    with pytest.raises(ValueError, match=r"the folder 'folder\.safetensors' holds no checkpoint\.pt"):
        unskip.load("folder.safetensors")
    save_file({"w": torch.zeros(1)}, "alone.safetensors")
    with pytest.raises(ValueError, match=r"alone\.safetensors holds weights alone"):
        unskip.load("alone.safetensors")
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_there_is_kept_where_writing_fails(tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    out.write_text("old")
    with pytest.raises(ValueError, match="does other things in training"):
        save(out, Modes(), input_size=(4,), force=True)
    with pytest.raises(ValueError, match="is there already"):
        save(out, nn.Linear(4, 4), input_size=(4,))
    assert out.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["net.safetensors"]
