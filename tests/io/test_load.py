"""Networks and batches from words: what each kind gives, and the sentence for each way to get it wrong."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.doctor import small
from unskip import create_model
from unskip.io.load import load_model, note_on_weights, parse_shape
from unskip.io.network_file import Header, save
from unskip.models.weights import path_of
from unskip.train import Recipe, load_recipe, run

HERE = "tests.doctor.small"


@pytest.mark.parametrize(
    ("word", "name", "shape", "guessed"),
    [
        ("resnet20", "resnet20", (3, 32, 32), False),
        ("test_resnet", "test_resnet", (3, 160, 160), False),  # timm's
        ("timm:test_resnet", "test_resnet", (3, 160, 160), False),
        ("torchvision:squeezenet1_1", "torchvision squeezenet1_1", (3, 224, 224), False),
        ("torchvision.models:squeezenet1_1", "torchvision.models:squeezenet1_1", (3, 224, 224), True),
        (f"{HERE}:mlp", f"{HERE}:mlp", (64,), True),
        (f"{HERE}:convolutional", f"{HERE}:convolutional", (1, 32, 32), True),
        (f"{HERE}:recurrent", f"{HERE}:recurrent", (32, 5), True),
        (f"{HERE}:READY", f"{HERE}:READY", (16,), True),
        (f"{HERE}:Picky", f"{HERE}:Picky", (3, 32, 32), True),
    ],
)
def test_networks_by_name_and_by_factory(word: str, name: str, shape: tuple[int, ...], guessed: bool) -> None:
    loaded = load_model(word)
    assert isinstance(loaded.model, nn.Module)
    assert (loaded.name, loaded.input_size, loaded.guessed) == (name, shape, guessed)


@pytest.mark.parametrize("spec", ["resnet20", "timm:test_resnet", "torchvision:squeezenet1_1", f"{HERE}:headed"])
def test_the_head_is_as_wide_as_that_of_the_weights(spec: str, tmp_path: Path) -> None:
    trained = load_model(spec, num_classes=7).model
    torch.save(
        {"state_dict": {f"module.{key}": value for key, value in trained.state_dict().items()}}, tmp_path / "a.pth"
    )
    for given in (None, 7):
        found = load_model(spec, weights=tmp_path / "a.pth", num_classes=given)
        assert found.trained
        assert all(torch.equal(value, found.model.state_dict()[key]) for key, value in trained.state_dict().items())
    with pytest.raises(ValueError, match=r"a.pth does not fit .*(size mismatch|7)"):
        load_model(spec, weights=tmp_path / "a.pth", num_classes=8)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("resnet20:num_classes=5", "'resnet20:num_classes=5' and --num-classes 4 differ; leave one out"),
        (f"{HERE}:mlp", r"failed when it was called num_classes=4: TypeError"),
    ],
)
def test_a_width_that_can_not_be_given(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_model(spec, num_classes=4)


def test_a_method_is_applied_and_the_seed_decides_the_weights() -> None:
    state = torch.get_rng_state()
    plain, again, other = (load_model("resnet20", method="plain", seed=s).model for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(plain.surgery.replaced) == 9
    assert torch.equal(plain.conv1.weight, again.conv1.weight)
    assert not torch.equal(plain.conv1.weight, other.conv1.weight)
    assert load_model("resnet20", method="plain").name == "resnet20, plain"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("resnet111", r"there is no network named 'resnet111'\. Did you mean"),
        ("timm:resnet111", r"there is no network named 'resnet111'\. Did you mean"),
        ("torchvision:resnet19", r"torchvision has no network 'resnet19'\. Did you mean"),
        ("no.such.module:net", r"'no.such.module:net' can't be imported: No module named 'no'"),
        (f"{HERE}:nothing", r"can't be imported: .*has no attribute 'nothing'"),
        (f"{HERE}:number", r"gave 'int', not an nn.Module"),
        (f"{HERE}:needs_an_argument", r"failed when it was called without arguments: TypeError: .*width"),
        (f"{HERE}:lazy", r"does not say what it reads"),
        (f"{HERE}:words", r"does not say what it reads.*--input-size.*unskip.diagnose"),
        ("tests/train", r"the folder 'tests/train' holds no checkpoint.pt of a run"),
        ("runs/nowhere/checkpoint.pt", r"there is no file 'runs/nowhere/checkpoint.pt'"),
    ],
)
def test_wrong_words_get_a_sentence(word: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_model(word)


def test_shapes_in_words() -> None:
    assert parse_shape("3x32x32", command="doctor") == parse_shape("3,32,32", command="doctor") == (3, 32, 32)
    for wrong in ("3x", "x3", "0x3", "-1", "a", ""):
        with pytest.raises(ValueError, match=r"--input-size .* must be whole numbers"):
            parse_shape(wrong, command="doctor")
    assert parse_shape("784", command="doctor") == (784,)


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch with a 20-layer network on digits: one channel, 8 px."""
    out = tmp_path_factory.mktemp("run") / "digits"
    run(load_recipe("digits-pnnh-56", model="plain_resnet20", epochs=1, warmup_epochs=0.0), out=out, silent=True)
    return out


def test_the_checkpoint_of_a_run(trained: Path) -> None:
    by_folder, by_file = (load_model(str(path)) for path in (trained, trained / "checkpoint.pt"))
    assert by_folder.input_size == by_file.input_size == (1, 8, 8)
    assert by_folder.name == "plain_resnet20 of digits"
    assert by_folder.trained
    assert by_file.trained
    saved = load_file(trained / "weights.safetensors")
    assert all(torch.equal(value, saved[key]) for key, value in by_file.model.state_dict().items())


def test_a_run_knows_the_size_of_its_images(tmp_path: Path) -> None:
    """Of a data set whose name does not tell, and the averaged weights, which are the ones that were tested."""
    generator = np.random.default_rng(0)
    x, y = generator.random((96, 12, 12), np.float32), np.arange(96) % 3
    np.savez(tmp_path / "set.npz", x_train=x[:64], y_train=y[:64], x_test=x[64:], y_test=y[64:])
    changes = {
        "model": "plain_resnet20",
        "dataset": "npz",
        "epochs": 1,
        "warmup_epochs": 0.0,
        "batch": 16,
        "ema": 0.5,
    }
    out = tmp_path / "run"
    run(load_recipe("digits-pnnh-56", **changes), data_dir=tmp_path / "set.npz", out=out, silent=True)
    reached, tested = (load_model(str(path)) for path in (out / "checkpoint.pt", out))
    assert reached.input_size == (1, 12, 12)
    assert not reached.guessed
    (out / "weights.safetensors").rename(tmp_path / "weights.safetensors")
    averaged = load_model(str(out))
    saved = load_file(tmp_path / "weights.safetensors")
    for loaded in (tested, averaged):
        assert torch.equal(loaded.model.fc.weight, saved["fc.weight"])
    assert not torch.equal(reached.model.fc.weight, saved["fc.weight"])


def test_a_run_of_a_network_of_ones_own_says_so(tmp_path: Path) -> None:
    """The recipe names another network, which did not run."""
    out = tmp_path / "mine"
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    run(Recipe.of(epochs=1, warmup_epochs=0), model=network, out=out, silent=True)
    with pytest.raises(ValueError, match=r"a network of your own, Sequential, .* load .*weights\.safetensors into it"):
        load_model(str(out), command="export")


EVIL = "evil_module:build"


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ({"network": {"model": EVIL}}, f"model='{EVIL}' names code, which is not run from a file"),
        ({"network": {"model": EVIL, "method": "pnnh"}}, f"model='{EVIL}' names code"),
        ({"network": {"model": "torch.hub:load"}}, "model='torch.hub:load' names code"),
        ({"network": {"model": "resnet20", "options": {"checkpoint_path": "a.pth"}}}, "would read another file"),
        ({"network": {"model": 3}}, "model=3 must be text"),
        ({"network": [EVIL]}, "must be a table"),
        ([EVIL], "must be a table"),
        ({"network": EVIL, "epochs": 1}, "'network' is 'model' in"),  # of before there were tables
    ],
)
def test_a_recipe_in_a_checkpoint_runs_no_code(
    recipe: object, sentence: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "import os, pathlib\npathlib.Path(__file__).with_name('ran').touch()\nbuild = os.abort\n"
    (tmp_path / "evil_module.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    state = torch.load(trained / "checkpoint.pt", weights_only=True)
    torch.save({**state, "recipe": recipe}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=sentence) as refused:
        load_model(str(tmp_path))
    assert str(refused.value).startswith(f"doctor: the recipe in {tmp_path / 'checkpoint.pt'}")
    assert not (tmp_path / "ran").exists()


def test_a_run_that_began_with_pretrained_weights_needs_them_no_more(trained: Path, tmp_path: Path) -> None:
    state = torch.load(trained / "checkpoint.pt", weights_only=True)
    state["recipe"]["network"]["options"] = {"pretrained": True}
    torch.save(state, tmp_path / "checkpoint.pt")
    assert torch.equal(load_model(str(tmp_path)).model.fc.weight, state["network"]["fc.weight"])


def test_weights_for_a_named_network(tmp_path: Path) -> None:
    network = small.mlp()
    state = network.state_dict()
    files = [tmp_path / name for name in ("a.pt", "b.safetensors", "c.pth", "d.pt")]
    torch.save(state, files[0])
    save_file(state, files[1])
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}, files[2])
    torch.save({"model": {f"_orig_mod.module.{k}": v for k, v in state.items()}}, files[3])
    for file in files:
        loaded = load_model(f"{HERE}:mlp", weights=file).model.state_dict()
        assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_whether_weights_are_trained(tmp_path: Path) -> None:
    """A method that keeps the weights keeps them trained; one that begins anew does not."""
    fresh = load_model("resnet20")
    torch.save(fresh.model.state_dict(), tmp_path / "weights.pt")
    assert not fresh.trained
    assert load_model("resnet20", weights=tmp_path / "weights.pt").trained
    assert load_model("pnnh_resnet20_wide", pretrained=True).trained
    assert not load_model("resnet20:num_classes=3").trained
    assert load_model(str(path_of(TRAINED))).trained
    file = tmp_path / "kept.safetensors"
    save(file, fresh.model, Header(network={"model": "resnet20"}, input_size=(3, 32, 32)))
    assert load_model(str(file)).trained
    assert load_model(str(file), method="plain").trained
    assert not load_model(str(file), method="pnnh").trained


class Runs:
    """What a hostile pickle does when it is loaded."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("was-run",)


def test_files_that_are_not_what_they_claim(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(small.mlp(), tmp_path / "module.pt")
    torch.save({"weights": Runs()}, tmp_path / "hostile.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "empty.safetensors").touch()
    with zipfile.ZipFile(tmp_path / "zip.safetensors", "w") as archive:
        archive.writestr("a", "b")
    whole = (trained / "checkpoint.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    for name, sentence in {
        "module.pt": r"module.pt is no checkpoint of unskip, or damaged",
        "hostile.pt": r"hostile.pt is no checkpoint of unskip, or damaged: it holds more than .* code, and is not run",
        "list.pt": r"list.pt holds no state dict",
        "other.pt": r"other.pt does not fit 'tests.doctor.small:mlp'",
        "text.pt": r"text.pt is damaged, or no checkpoint at all",
        "text.safetensors": r"text.safetensors can't be read as safetensors",
        "empty.safetensors": r"empty.safetensors can't be read as safetensors",
        "zip.safetensors": r"zip.safetensors can't be read as safetensors",
        "half.pt": r"half.pt is damaged",
        "missing.pt": r"missing.pt can't be read",
    }.items():
        with pytest.raises(ValueError, match=f"^doctor: .*{sentence}"):
            load_model(f"{HERE}:mlp", weights=tmp_path / name)
        if name != "missing.pt":
            with pytest.raises(ValueError, match=r"^doctor: .*give the file as weights \(--weights") as refused:
                load_model(str(tmp_path / name))
            assert "weights_only" not in str(refused.value)  # how to run the code in it
            assert ("can't be read as safetensors" in str(refused.value)) == name.endswith(".safetensors")
    assert not (tmp_path / "was-run").exists()


# ---------------------------------------------------------------- weights of the package

TRAINED = "pnnh_resnet20_wide"


def test_trained_weights_by_name_and_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file says of which network it is, wherever it lies and whatever it is called."""
    copy = tmp_path / "renamed.safetensors"
    copy.write_bytes(path_of(TRAINED).read_bytes())
    wanted = create_model(TRAINED, pretrained=True).state_dict()
    monkeypatch.chdir(tmp_path)
    (tmp_path / TRAINED).write_text("a file that is called like the network")
    for loaded in (load_model(f"timm:{TRAINED}", pretrained=True), load_model("renamed.safetensors")):
        assert (loaded.name, loaded.input_size, loaded.guessed) == (TRAINED, (3, 32, 32), False)
        found = loaded.model.state_dict()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        assert all(value.dtype != torch.float16 for value in found.values())


def test_weights_of_what_nobody_knows_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    for network, sentence in {
        "os:abort": "other.safetensors can't be opened: model='os:abort' names code",
        "resnet20": "other.safetensors can't be opened: Error",
    }.items():
        with safe_open(path_of(TRAINED), framework="pt") as shipped:
            about = {**json.loads(shipped.metadata()["unskip"]), "network": network}
        save_file(load_file(path_of(TRAINED)), file, metadata={"unskip": json.dumps(about)})
        with pytest.raises(ValueError, match=sentence):
            load_model(str(file))


def test_pretrained_where_there_is_nothing_to_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for word, sentence in {
        "pnnh_resnet20": r"'pnnh_resnet20' has no pretrained weights .* these have: .*pnnh_resnet20_wide",
        "resnet111": r"there is no network named 'resnet111'",
        "torchvision:resnet18": r"nobody knows trained weights for 'torchvision:resnet18' .*--weights FILE",
        f"{HERE}:mlp": r"nobody knows trained weights for 'tests.doctor.small:mlp' \(--pretrained\)",
        str(path_of(TRAINED)): r"has its own weights; leave --pretrained out",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            load_model(word, pretrained=True, command="export")
    with pytest.raises(
        ValueError, match=r"^export: --pretrained and --weights .*a.pt both say which weights; leave one"
    ):
        load_model(TRAINED, pretrained=True, weights=tmp_path / "a.pt", command="export")

    def offline(*_: object, **__: object) -> nn.Module:
        raise ConnectionError("no way\nout.")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(
        ValueError, match=r"timm's weights for 'test_resnet' .*: ConnectionError: no way out\. Give a fi"
    ):
        load_model("test_resnet", pretrained=True)


def test_random_weights_are_not_taken_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = f"Note: random weights (seed 3); {TRAINED} has trained ones: --pretrained."
    for word in (TRAINED, f"timm:{TRAINED}"):
        assert note_on_weights(word, weights=None, pretrained=False, seed=3) == said
    assert "test_resnet has trained ones" in note_on_weights("test_resnet", weights=None, pretrained=False, seed=0)
    for word in ("pnnh_resnet20", "resnet20", "torchvision:resnet18", str(path_of(TRAINED)), "nothing"):
        assert not note_on_weights(word, weights=None, pretrained=False, seed=0)
    assert not note_on_weights(TRAINED, weights=Path("a.pt"), pretrained=False, seed=0)
    assert not note_on_weights(TRAINED, weights=None, pretrained=True, seed=0)
    (tmp_path / TRAINED).mkdir()
    assert note_on_weights(TRAINED, weights=None, pretrained=False, seed=3) == said, "a folder without a checkpoint"
    (tmp_path / TRAINED / "checkpoint.pt").touch()
    assert not note_on_weights(TRAINED, weights=None, pretrained=False, seed=3), "the run in the folder is taken"
