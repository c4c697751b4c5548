"""Hostile network files, checkpoints, weights and specs end in a sentence, and take little memory."""

import copy
import io
import json
import os
import random
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import unskip
from tests import sandbox
from tests.io.make_fixtures import FIXTURES
from unskip.io import LoadedModel, load_model, save
from unskip.io.torch_file import FORMAT

LOAD = "import unskip; unskip.load(argv[0], weights=argv[1] if argv[1:] else None)"
LITTLE = 2**29  # bytes


def refused(*arguments: str | Path, gib: str = "") -> str:
    """The sentence that loading ends with, in little memory."""
    said, took = sandbox.run(LOAD, *arguments, gib=gib)
    assert said.startswith("load: "), said
    assert len(said) < 1000
    assert took < LITTLE
    return said


# ---------------------------------------------------------------- network files


def write_network(file: Path, network: dict[str, Any], **changes: Any) -> Path:
    about = {"format": 2, "version": "9", "name": "evil", "input_size": [4], "output": [0.0], "network": network}
    text = json.dumps({"__metadata__": {"unskip": json.dumps({**about, **changes})}}).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    return file


def graph(*calls: list[Any], layers: dict[str, Any] | None = None) -> dict[str, Any]:
    steps = [*calls, ["output", "output", [{"step": len(calls)}], {}]]
    return {"graph": {"layers": layers or {}, "steps": steps, "tensors": {}, "tied": {}}}


def function(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    return ["function", name, list(args), kwargs]


def method(name: str, *args: Any, **kwargs: Any) -> list[Any]:
    return ["method", name, list(args), kwargs]


def layer(kind: str, **settings: Any) -> dict[str, Any]:
    return {"a": {"class": f"torch.{kind}", "settings": settings, "layers": {}, "none": []}}


X = {"step": 0}
PICTURE = method("view", X, 2, 1, 2, 2)
GREEDY: dict[str, dict[str, Any]] = {
    "zeros": graph(method("new_zeros", X, 2**36)),
    "repeat": graph(method("repeat", X, 2**20, 2**16)),
    "expand": graph(
        method("view", X, 8, 1), method("expand", {"step": 1}, 8, 2**40), method("contiguous", {"step": 2})
    ),
    "pad": graph(function("F.pad", X, [2**36, 0])),
    "interpolate": graph(PICTURE, function("F.interpolate", {"step": 1}, size=[2**18, 2**18])),
    "cat of cat": graph(*(function("torch.cat", [{"step": i}] * 8) for i in range(16))),
    "parts of a whole": graph(
        method("repeat", X, 2**20, 2), method("flatten", {"step": 1}), method("unbind", {"step": 2})
    ),
    "padding layer": graph(PICTURE, ["layer", "a", [{"step": 1}], {}], layers=layer("ZeroPad2d", padding=2**20)),
    "upsampling layer": graph(PICTURE, ["layer", "a", [{"step": 1}], {}], layers=layer("Upsample", scale_factor=1e5)),
    "text": graph(function("operator.mul", "a", 2**33)),
    "formatted text": graph(function("operator.mod", "%2000000000d", 1)),
    "list": graph(function("operator.mul", [0, 0], 2**30)),
    "tuple of tuples": graph(
        function("getattr", X, "shape"), *(function("operator.add", {"step": i}, {"step": i}) for i in range(1, 40))
    ),
    "power": graph(function("operator.pow", 10, 10**9)),
    "power of power": graph(*(function("operator.mul", {"step": i} if i else 2**62, 2**62) for i in range(9))),
    "input": {},
    "named network": {"model": "resnet20", "options": {"num_classes": 10**9}},
    "deep named network": {"model": "plainnet_mlp", "options": {"depth": 10**5, "width": 1000}},
}


@pytest.mark.parametrize("case", GREEDY)
def test_a_network_that_would_take_all_memory(case: str, tmp_path: Path) -> None:
    changes = {"input_size": [2**22]} if case == "input" else {}
    network = GREEDY[case] or graph(method("repeat", X, 64, 64))
    said = refused(write_network(tmp_path / "evil.safetensors", network, **changes), gib="0.2")
    assert "evil.safetensors can't be opened" in said


@pytest.mark.parametrize(
    "nested", ["[" * 5000 + "]" * 5000, '{"a":' * 5000 + "0" + "}" * 5000], ids=["lists", "tables"]
)
def test_nested_json(nested: str, tmp_path: Path) -> None:
    """In the metadata, where the network is, and in the header that safetensors itself reads."""
    file = write_network(tmp_path / "evil.safetensors", {})
    header = json.loads(file.read_bytes()[8:])
    text = json.dumps({"__metadata__": {"unskip": header["__metadata__"]["unskip"].replace("{}", nested, 1)}})
    for raw in (text, text.replace("{", f'{{"x": {nested}, ', 1)):
        file.write_bytes(struct.pack("<Q", len(raw)) + raw.encode())
        assert "evil.safetensors can't be " in refused(file)


def test_many_steps_are_read_in_linear_time(tmp_path: Path) -> None:
    steps = [function("torch.relu", {"step": i}) for i in range(2000)]
    assert "computes another function" in refused(
        write_network(tmp_path / "long.safetensors", graph(*steps), output=[9.0] * 8)
    )


def test_the_limit_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "net.safetensors"
    save(file, nn.Linear(256, 256), input_size=(256,))
    monkeypatch.setenv("UNSKIP_MAX_GIB", "0.0001")
    with pytest.raises(ValueError, match=r"would take .* GiB of memory, and at most 0\.0001 .* UNSKIP_MAX_GIB"):
        unskip.load(file)
    monkeypatch.setenv("UNSKIP_MAX_GIB", "1")
    assert unskip.load(file)(torch.zeros(1, 256)).shape == (1, 256)


# ---------------------------------------------------------------- every field of a file, changed in every way

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    10**12,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    ":",
    [],
    {},
    [[]],
    {"step": 0},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any, *, delete: bool = False) -> Any:
    """A copy of nested values with the one at a path replaced, or gone."""
    if not path:
        return new
    items = dict(value) if isinstance(value, dict) else list(value)
    if delete and len(path) == 1:
        del items[path[0]]
    else:
        items[path[0]] = changed(value[path[0]], path[1:], new, delete=delete)
    return items


def mutations(value: Any, count: int, seed: int) -> Iterator[tuple[str, Any]]:
    """Values with one field changed: a sample of all ways, and every field at the top in every way."""
    generator = random.Random(seed)
    everywhere = [path for path in places(value) if path]
    top = [path for path in everywhere if len(path) == 1]
    for path in [*generator.choices(everywhere, k=count), *top]:
        new = generator.choice(VALUES)
        yield f"{path} = {new!r}", changed(value, path, new)
        yield f"{path} deleted", changed(value, path, None, delete=True)


def loaded_or_sentence(path: Path) -> LoadedModel | str:
    try:
        return load_model(str(path))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", ["named", "pnnh8-folded"])
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_changed_fields_of_a_network_file(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is refused with a sentence, or the network is the same."""
    monkeypatch.setenv("UNSKIP_MAX_GIB", "0.05")  # a depth of 10^12 is refused sooner
    source, file = FIXTURES / f"{name}.safetensors", tmp_path / "changed.safetensors"
    with safe_open(source, framework="pt") as opened:
        about, tensors = json.loads(opened.metadata()["unskip"]), load_file(source)
    loaded = load_model(str(source))
    x = torch.ones(2, *loaded.input_size)
    with torch.no_grad():
        wanted, same = loaded.model(x), 0
        for what, change in mutations(about, count, seed=0):
            save_file(tensors, file, metadata={"unskip": json.dumps(change)})
            again = loaded_or_sentence(file)
            if isinstance(again, str):
                assert again.startswith("doctor: "), (what, again)
                assert len(again) < 1000, (what, again)
            else:
                assert torch.equal(again.model(x), wanted), what
                same += 1
    assert same  # a proof that nobody reads, and the like


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_changed_fields_of_a_checkpoint(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSKIP_MAX_GIB", "0.05")  # a depth of 10^12 is refused sooner
    state, file = checkpoint(), tmp_path / "checkpoint.pt"
    torch.save(state, file)
    assert load_model(str(tmp_path)).input_size == (1, 4, 4)
    for what, change in mutations(state, count, seed=1):
        torch.save(change, file)
        again = loaded_or_sentence(tmp_path)
        if isinstance(again, str):
            assert again.startswith("doctor: "), (what, again)
            assert len(again) < 1500, (what, again)


def checkpoint() -> dict[str, Any]:
    """What `unskip train` writes, as far as the loader reads it."""
    options = {"depth": 3, "width": 8, "img_size": 4}
    model = unskip.create_model("plainnet_mlp", num_classes=3, in_chans=1, **options)
    return {
        "format": FORMAT,
        "recipe": {"network": {"model": "plainnet_mlp", "options": options}, "data": {"dataset": "digits"}},
        "data": {"classes": 3},
        "input_size": [1, 4, 4],
        "network": dict(model.state_dict()),
        "ema": None,
    }


# ---------------------------------------------------------------- checkpoints and weights


def archive(path: Path, text: bytes, **more: bytes) -> Path:
    """A file of torch.save with this pickle in it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, raw in {"data.pkl": text, "version": b"3\n", "byteorder": b"little", **more}.items():
            file.writestr(f"archive/{name}", raw)
    return path


def bomb(path: Path) -> Path:
    torch.save({"w": torch.zeros(150 * 2**20)}, buffer := io.BytesIO())
    with zipfile.ZipFile(buffer) as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in plain.namelist():
            file.writestr(name, plain.read(name))
    assert path.stat().st_size < 2**22
    return path


def stretched(path: Path, size: int) -> Path:
    """A tensor of four numbers whose shape says that it has more."""
    torch.save({"w": torch.zeros(4)}, buffer := io.BytesIO())
    with zipfile.ZipFile(buffer) as plain:
        contents = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, raw in contents.items():
            shape = b"\x8a\x08" + struct.pack("<q", size) + b"\x85"
            file.writestr(name, raw.replace(b"K\x04\x85", shape) if name.endswith("data.pkl") else raw)
    return path


def itself(path: Path) -> Path:
    state: dict[str, Any] = {"format": FORMAT}
    state["recipe"] = state
    torch.save(state, path)
    return path


EMPTY = b"\x80\x02}X\x01\x00\x00\x00wctorch\nFloatTensor\nJ" + struct.pack("<i", 2**28) + b"\x85Rs."
BYTES = b"\x80\x02c__builtin__\nbytearray\n\x8a\x08" + struct.pack("<q", 2**33) + b"\x85R."
TORCH_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a zip bomb": (bomb, "unpacked, would take 0.586 GiB of memory"),
    "bytes out of nothing": (lambda path: archive(path, BYTES), "more than tensors and plain values"),
    "a shape of 2^33": (lambda path: stretched(path, 2**33), "is no checkpoint of unskip, or damaged"),
    "a tensor without numbers": (lambda path: archive(path, EMPTY), "announce more numbers than it has"),
    "a shape of 2^60": (lambda path: stretched(path, 2**60), "is no checkpoint of unskip, or damaged"),
    "nested lists": (
        lambda path: archive(path, b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."),
        "nested too deeply, or refers to itself",
    ),
    "itself": (itself, "nested too deeply, or refers to itself"),
}


@pytest.mark.parametrize("case", TORCH_FILES)
def test_hostile_torch_files(case: str, tmp_path: Path) -> None:
    write, sentence = TORCH_FILES[case]
    file = write(tmp_path / "weights.pt")
    for arguments in ((file,), ("plainnet_mlp", file)):
        said = refused(*arguments, gib="0.5")
        assert any(words in said for words in sentence.split("|")), said


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("input_size", [2**40, 4, 4], "input_size="),
        ("input_size", [2**24, 1, 1], "would take"),
        ("data", {"classes": 10**12}, "would take"),
        ("data", {"classes": 2**62}, "can't be understood|would take"),
        ("network", {"w": 3}, "'network' is no state dict"),
    ],
)
def test_absurd_sizes_in_a_checkpoint(field: str, value: Any, sentence: str, tmp_path: Path) -> None:
    torch.save({**checkpoint(), field: value}, tmp_path / "checkpoint.pt")
    said = refused(tmp_path, gib="0.5")
    assert any(words in said for words in sentence.split("|")), said


# ---------------------------------------------------------------- specs


@pytest.mark.parametrize(
    "spec",
    [
        ":", "::", "a:", ":a", ".:a", ".a:b", "..", "a..b:c", "torchvision:", "timm:", "resnet20:", "resnet20:=",
        "resnet20:num_classes", "resnet20:num_classes=", "resnet20:num_classes=nan", "resnet20:num_classes=1e300",
        "resnet20:num_classes=-1", "resnet20:num_classes=9" + "9" * 5000, "resnet20:num_classes=10000000000",
        "\0", "a\0b:c", "~nobody-has-this-name/x", "x" * 5000, "/" * 5000, "a/" * 3000, "\udc80", "tests.io:",
        "json.nothing:y", "/dev/zero", "/dev/full", "/proc/self/mem", "/proc/self/fd", "[" * 5000,
        "resnet20:num_classes=" + "[" * 5000,
    ],
)  # fmt: skip
def test_odd_specs(spec: str, tmp_path: Path) -> None:
    said, took = sandbox.run("import json, unskip; unskip.load(json.loads(argv[0]))", json.dumps(spec))
    assert said
    assert took < LITTLE


@pytest.mark.parametrize("size", ["9" * 30, "100000x100000x100000", "1000000x1000000"])
def test_absurd_input_sizes(size: str) -> None:
    with pytest.raises(ValueError, match=r"--input-size"):
        load_model("plainnet_mlp", input_size=size)


def test_files_that_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the folder and the reading."""
    monkeypatch.setattr("os.path.isfile", lambda path: not str(path).endswith(("checkpoint.pt", "network.safetensors")))
    for name in ("gone.pt", "gone.safetensors"):
        with pytest.raises(ValueError, match=rf"{name} can't be read: it is no file"):
            unskip.load(tmp_path / name)


# ---------------------------------------------------------------- saving


class Holds(nn.Module):
    """A network with an attribute that can't be copied."""

    def __init__(self, attribute: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.attribute = attribute

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    "attribute",
    [threading.Lock(), torch.Generator(), (i for i in range(3)), open(os.devnull), lambda x: x],  # noqa: SIM115
    ids=["lock", "torch generator", "generator", "file", "function"],
)
def test_attributes_that_can_not_be_copied(attribute: Any, tmp_path: Path) -> None:
    model = Holds(attribute).train()
    save(tmp_path / "net.safetensors", model, input_size=(4,))
    x = torch.randn(3, 4)
    assert torch.equal(unskip.load(tmp_path / "net.safetensors")(x), model(x))
    assert model.training
    assert model.attribute is attribute


def odd_modules() -> dict[str, tuple[nn.Module, str]]:
    pruned = nn.Linear(4, 4)
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    return {
        "script": (torch.jit.script(nn.Linear(4, 4)), "ScriptModule"),
        "script inside": (nn.Sequential(torch.jit.script(nn.Linear(4, 4))), "ScriptModule"),
        "traced": (torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4)), "ScriptModule"),
        "pruned": (nn.Sequential(pruned), "hooks"),
        "weight norm": (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))), "can't be written"),
        "spectral norm": (nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4))), "can't be written"),
        "two outputs": (nn.Sequential(nn.LSTM(4, 4)), "can't be written"),
        "another input": (nn.Linear(5, 4), "can't be written"),
        "no numbers": (nn.Sequential(nn.Linear(4, 4), Root()), "no finite numbers"),
    }


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - 100).sqrt()


@pytest.mark.parametrize("name", odd_modules())
def test_odd_modules_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    model, words = odd_modules()[name]
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(ValueError, match=r"^save: .* can't be written as a network file: .*`unskip export`") as error:
        save(tmp_path / "net.safetensors", model, input_size=(4,))
    assert words in str(error.value)
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_full_disk_when_saving(tmp_path: Path) -> None:
    """The file that is there stays, and /dev/full is no place for a network."""
    out = tmp_path / "net.safetensors"
    out.write_text("old")
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        save("/dev/full", nn.Linear(4, 4), input_size=(4,), force=True)
    part = tmp_path / f".{out.name}.{os.getpid()}.part"
    part.symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"can't be written: No space left on device"):
        save(out, nn.Linear(4, 4), input_size=(4,), force=True)
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
