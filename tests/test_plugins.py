"""A package outside of unskip, found by its entry points: plainify, train, doctor and fold use what it brings."""

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import unskip
from unskip._core import plugins
from unskip.cli.commands import app
from unskip.data import sets
from unskip.measures import measure_names, measuring
from unskip.methods import describe_method, method_names, registry
from unskip.surgery import known_families, reading

TOY = Path(__file__).parent / "toy_package" / "toy_unskip"
RESIDUAL = "toy_unskip.networks:residual"
GROUPS = {"unskip.methods": "methods", "unskip.readers": "readers", "unskip.measures": "measures"}
GROUPS["unskip.datasets"] = "datasets"


def install(folder: Path, name: str, entries: dict[str, str]) -> None:
    """What an installer leaves of a package's metadata."""
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    text = "".join(f"[{group}]\nany = {module}\n" for group, module in entries.items())
    (info / "entry_points.txt").write_text(text)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages that holds the toy package."""
    shutil.copytree(TOY, tmp_path / "site" / "toy_unskip")
    install(tmp_path / "site", "toy-unskip", {group: f"toy_unskip.{module}" for group, module in GROUPS.items()})
    return tmp_path / "site"


@pytest.fixture
def toy(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process with the toy package installed; the registries are as before afterwards."""
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(plugins, "_LOADED", set())
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setattr(reading, "_READERS", dict(reading._READERS))
    monkeypatch.setattr(measuring, "_FAMILIES", dict(measuring._FAMILIES))
    monkeypatch.setattr(sets, "DATASETS", dict(sets.DATASETS))
    yield site
    for name in [name for name in sys.modules if name.split(".")[0] in ("toy_unskip", "broken_unskip")]:
        del sys.modules[name]


def residual() -> nn.Module:
    from toy_unskip import networks

    return networks.residual()


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plainify_with_a_method_and_a_reader_of_another_package(toy: Path) -> None:
    net, x = residual().eval(), torch.randn(2, 1, 8, 8)
    plain = unskip.plainify(net, "scaled", scale=3.0)
    assert plain.surgery.replaced == ("3", "4")
    y = x
    for part in net:
        block = type(part).__name__ == "HandBlock"
        y = part.act(3 * part.norm2(part.conv2(part.act(part.norm1(part.conv1(y)))))) if block else part(y)
    assert torch.allclose(plain(x), y, rtol=1e-5)
    exact = unskip.plainify(net, "rm")  # our method on their block
    assert torch.allclose(exact(x), net(x), rtol=1e-4, atol=1e-6)
    ours = unskip.plainify(unskip.create_model("resnet20"), "scaled")  # their method on our block
    assert len(ours.surgery.replaced) == 9
    assert "toy_unskip HandBlock" in known_families()
    with pytest.raises(ValueError, match=r"method 'scaled' has no option 'scael'\. Did you mean 'scale'"):
        unskip.plainify(net, "scaled", scael=1.0)


def test_it_is_listed_with_its_options(toy: Path) -> None:
    method = describe_method("scaled")
    assert method.summary == "The branch of the block alone, times a trained number."
    (option,) = method.options
    assert (option.name, option.default, option.doc) == ("scale", 2.0, "the number at initialisation")
    assert "scaled: The branch" in invoke("models", "--methods")
    assert invoke("models", "scal*", "--methods").splitlines()[1] == "    scale = 2: the number at initialisation"


def test_a_few_steps_of_training_by_a_recipe(toy: Path, tmp_path: Path) -> None:
    words = ["--model", RESIDUAL, "--method", "scaled", "--options", "{scale = 1.5}", "--epochs", "1", "--lr", "0.1"]
    shown = invoke("train", "digits-pnnh-56", *words, "--warmup-epochs", "0", "--out", tmp_path / "run")
    assert "toy_unskip.networks:residual, scaled on digits: test error" in shown
    weights = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["network"]
    assert weights["4.scale"] != 1.5  # trained; the first one stands before a norm, which undoes it


def test_training_on_a_data_set_of_another_package(toy: Path, tmp_path: Path) -> None:
    words = ["--model", "resnet20", "--dataset", "stripes", "--epochs", "2", "--warmup-epochs", "0", "--batch", "32"]
    assert "resnet20 on stripes: test error 0.00 %" in invoke("train", *words, "--out", tmp_path / "run")


def test_the_doctor_shows_their_measure_of_their_method(toy: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    shown = invoke("doctor", RESIDUAL, "--method", "scaled", "--batch-size", "16", "--input-size", "1x8x8", "-o", page)
    assert "toy_unskip.networks:residual, scaled" in shown
    assert "share of zeros" in shown
    assert "Zeros among the outputs" in page.read_text()
    assert "About half of them after a ReLU." in page.read_text()
    words = ["--measure", "share_of_zeros", "--batch-size", "16", "--input-size", "1x8x8", "--json"]
    series = json.loads(invoke("doctor", RESIDUAL, *words))["series"]
    assert series["share_of_zeros"]["healthy"] == "About half of them after a ReLU."
    assert all(0.2 < value < 0.8 for value in series["share_of_zeros"]["values"])
    assert "layer_cushion" not in series
    assert "noise_to_signal" in series


def test_the_command_line_plainifies_with_it(toy: Path) -> None:
    shown = invoke("plainify", RESIDUAL, "--method", "scaled", "--dry-run", "--input-size", "1x8x8")
    assert "parameters" in shown


def test_a_broken_plug_in_is_one_sentence(toy: Path) -> None:
    (toy / "broken_unskip.py").write_text("import there_is_no_such_module\n")
    install(toy, "broken-unskip", dict.fromkeys(GROUPS, "broken_unskip"))
    with pytest.warns(UserWarning, match=r"'any' \(unskip.methods\) of broken-unskip 0.1 can't be loaded: ") as caught:
        assert "scaled" in method_names()
    assert len(caught) == 1
    assert "ModuleNotFoundError: No module named 'there_is_no_such_module'" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method_names()  # it is said once
    with pytest.warns(UserWarning, match=r"\(unskip.measures\) of broken-unskip"):
        assert "share_of_zeros" in measure_names()


def test_a_name_that_is_taken_is_a_broken_plug_in(toy: Path) -> None:
    text = (toy / "toy_unskip" / "methods.py").read_text().replace('"scaled"', '"pnnh"')
    (toy / "broken_unskip.py").write_text(text)
    install(toy, "broken-unskip", {"unskip.methods": "broken_unskip"})
    with pytest.warns(UserWarning, match=r"broken-unskip 0.1 can't be loaded: ValueError: .* the name 'pnnh' is taken"):
        assert "scaled" in method_names()
    assert describe_method("pnnh").options[0].name == "ratio"


def test_nothing_is_loaded_before_it_is_asked_for(site: Path) -> None:
    program = (
        "import sys, unskip, timm\n"
        "unskip.create_model('pnnh_resnet20')\n"
        "assert 'toy_unskip.methods' not in sys.modules, 'a name of ours was enough'\n"
        "from toy_unskip.networks import residual\n"
        "print(unskip.plainify(residual(), 'scaled').surgery.replaced)\n"
    )
    path = f"{site}:{Path(unskip.__file__).parents[1]}"
    ended = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "('3', '4')"
