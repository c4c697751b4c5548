"""The registry of methods: what it lists, what it refuses, and that a method is one file."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from torch import nn

import unskip
from unskip.methods import BlockSpec, Plain, describe_method, method_names, register_method, registry
from unskip.methods.registry import check_options
from unskip.models.cifar import cifar_resnet


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


@pytest.mark.parametrize("name", method_names())
def test_every_method_says_what_it_is_and_what_its_options_do(name: str) -> None:
    method = describe_method(name)
    assert 20 < len(method.summary) < 200
    for option in method.options:
        assert len(option.doc) > 2, option
        assert not option.choices or option.default in option.choices


def test_defaults_choices_and_inherited_comments() -> None:
    options = {option.name: option for option in describe_method("pnnh_paper").options}
    assert (options["scale"].default, options["scale"].values) == (1.0, "1")
    assert options["norm"].choices == ("first", "both")
    assert options["norm"].values == "'first' (both)"
    assert options["scale"].doc == {o.name: o.doc for o in describe_method("pnnh").options}["scale"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio": "x"}, "checked: ratio='x' must be a finite number"),
        ({"ratio": float("inf")}, "checked: ratio=inf must be a finite number"),
        ({"ratio": True}, "checked: ratio=True must be a finite number"),
        ({"count": 1.5}, "checked: count=1.5 must be a whole number"),
        ({"count": False}, "checked: count=False must be a whole number"),
        ({"kind": "c"}, "checked: kind='c' is not known. Known: a, b."),
        ({"word": "z"}, "checked: word='z' is not known. Known: x, y."),
        ({"where": 1}, "checked: where=1 must be true, false or None"),
        ({"limit": float("nan")}, "checked: limit=nan must be a finite number"),
    ],
)
def test_options_are_checked_by_their_annotations(options: dict, words: str, own_registry: None) -> None:
    @register_method("checked")
    @dataclass(frozen=True, kw_only=True)
    class Checked(Plain):
        ratio: float = 0.5
        count: int = 0
        kind: Literal["a", "b"] = "a"
        word: str = "x"
        where: bool | None = None
        limit: float = 4.0

        def __post_init__(self) -> None:
            check_options(self, word=("x", "y"))

    Checked(ratio=1, count=3, kind="b", word="y", where=True, limit=float("inf"))
    with pytest.raises(ValueError, match=re.escape(words)):
        Checked(**options)


def test_an_exact_method_builds_each_block_once_and_stops_at_its_limit() -> None:
    built: list[str] = []

    @dataclass(frozen=True, kw_only=True)
    class Grows:
        limit: float = 2.0

        keeps_weights: ClassVar[bool] = True

        def build(self, spec: BlockSpec, bank: object) -> nn.Module:
            built.append(spec.path)
            conv = spec.layers[0].conv
            width = conv.in_channels
            stride = spec.stride
            return nn.Conv2d(width, spec.out_features, 9, stride=stride, padding=4, device=conv.weight.device)

    model = cifar_resnet(20)
    before = sum(p.numel() for p in model.parameters())
    plain = unskip.plainify(model, Grows(limit=10.0))
    assert len(built) == len(plain.surgery.replaced) == 9
    growth = sum(p.numel() for p in plain.parameters()) / before
    assert 2 < growth < 10
    with pytest.raises(ValueError, match=rf"plainify: the network would have {growth:.1f} times its parameters"):
        unskip.plainify(model, Grows(limit=2.0))


def test_a_method_inside_is_one_file(tmp_path: Path) -> None:
    """A copy of the package with one more file in methods/ knows the method everywhere."""
    package = tmp_path / "unskip"
    for file in sorted(Path(unskip.__file__).parent.rglob("*")):
        target = package / file.relative_to(Path(unskip.__file__).parent)
        if file.is_dir() and file.name != "__pycache__":
            target.mkdir(parents=True, exist_ok=True)
        elif file.suffix in (".py", ".toml"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
    (package / "methods" / "twice.py").write_text(
        '"""Method `twice`: the branch, two times."""\n\n'
        "from dataclasses import dataclass\n\n"
        "from unskip.methods.plain import Plain, PlainBlock\n"
        "from unskip.methods.registry import register_method\n\n\n"
        '@register_method("twice")\n@dataclass(frozen=True, kw_only=True)\nclass Twice(Plain):\n'
        '    """The branch of the block, two times in a row."""\n\n'
        "    gap: int = 0  # layers between them\n"
    )
    program = (
        "import sys, unskip\n"
        "print(len(unskip.plainify(unskip.create_model('resnet20'), 'twice').surgery.replaced), flush=True)\n"
        "from unskip.cli import main\n"
        "sys.argv = ['unskip', 'models', 'twice', '--methods']\n"
        "main()\n"
    )
    run = {"env": {"PYTHONPATH": str(tmp_path)}, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, "-c", program], **run)
    assert ended.stdout.splitlines() == [
        "9",
        "twice: The branch of the block, two times in a row.",
        "    gap = 0: layers between them",
    ], ended.stderr
    assert ended.returncode == 0, ended.stderr
