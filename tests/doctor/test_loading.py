"""Networks and batches from words: what each kind gives, and the sentence for each way to get it wrong."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from tests.doctor import small
from unskip.doctor.examine import check_free, parse_shape
from unskip.doctor.loading import Subject, load_batch, load_network
from unskip.train import load_recipe, run

HERE = "tests.doctor.small"


@pytest.mark.parametrize(
    ("word", "name", "shape", "guessed"),
    [
        ("resnet20", "resnet20", (3, 32, 32), False),
        ("test_resnet", "test_resnet", (3, 160, 160), False),  # timm's
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
    subject = load_network(word)
    assert isinstance(subject.network, nn.Module)
    assert (subject.name, subject.input_size, subject.guessed) == (name, shape, guessed)


def test_a_method_is_applied_and_the_seed_decides_the_weights() -> None:
    state = torch.get_rng_state()
    plain, again, other = (load_network("resnet20", method="plain", seed=s).network for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(plain.surgery.replaced) == 9
    assert torch.equal(plain.conv1.weight, again.conv1.weight)
    assert not torch.equal(plain.conv1.weight, other.conv1.weight)
    assert load_network("resnet20", method="plain").name == "resnet20, plain"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("resnet111", r"there is no network named 'resnet111'\. Did you mean"),
        ("torchvision:resnet19", r"torchvision has no network 'resnet19'\. Did you mean"),
        ("no.such.module:net", r"'no.such.module:net' can't be imported: No module named 'no'"),
        (f"{HERE}:nothing", r"can't be imported: .*has no attribute 'nothing'"),
        (f"{HERE}:number", r"gave 'int', not an nn.Module"),
        (f"{HERE}:needs_an_argument", r"failed when it was called without arguments: TypeError: .*width"),
        (f"{HERE}:words", r"does not say what it reads.*--input-size.*unskip.diagnose"),
        ("runs/nowhere/checkpoint.pt", r"there is no file 'runs/nowhere/checkpoint.pt'"),
    ],
)
def test_wrong_words_get_a_sentence(word: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_network(word)


def test_what_a_network_can_not_read_is_said_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"can't read a batch of shape 2x3x32x32: 20 px, not 32\. That shape is a guess"
    ):
        load_batch(load_network(f"{HERE}:Picky"))
    subject = load_network(f"{HERE}:Picky", input_size=parse_shape("3x20x20"))
    assert load_batch(subject).images.shape == (64, 3, 20, 20)
    for wrong in ("3x", "x3", "0x3", "-1", "a", ""):
        with pytest.raises(ValueError, match=r"--input-size .* must be whole numbers"):
            parse_shape(wrong)
    assert parse_shape("784") == (784,)


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch with a 20-layer network on digits: one channel, 8 px."""
    out = tmp_path_factory.mktemp("run") / "digits"
    run(load_recipe("digits-pnnh-56", network="plain_resnet20", epochs=1, warmup_epochs=0.0), out=out, silent=True)
    return out


def test_the_checkpoint_of_a_run(trained: Path) -> None:
    by_folder, by_file = (load_network(str(path)) for path in (trained, trained / "checkpoint.pt"))
    assert by_folder.input_size == by_file.input_size == (1, 8, 8)
    assert by_folder.name == "plain_resnet20 of digits"
    from safetensors.torch import load_file

    saved = load_file(trained / "weights.safetensors")
    assert all(torch.equal(value, saved[key]) for key, value in by_file.network.state_dict().items())
    assert load_batch(by_folder, size=8).images.shape == (8, 1, 8, 8)


def test_weights_for_a_named_network(tmp_path: Path) -> None:
    network = small.mlp()
    state = network.state_dict()
    files = [tmp_path / name for name in ("a.pt", "b.safetensors", "c.pth", "d.pt")]
    torch.save(state, files[0])
    save_file(state, files[1])
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}, files[2])
    torch.save({"model": {f"_orig_mod.module.{k}": v for k, v in state.items()}}, files[3])
    for file in files:
        loaded = load_network(f"{HERE}:mlp", weights=file).network.state_dict()
        assert all(torch.equal(loaded[key], state[key]) for key in state)


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
    whole = (trained / "checkpoint.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    for name, sentence in {
        "module.pt": r"module.pt is no checkpoint of unskip, or damaged",
        "hostile.pt": r"hostile.pt is no checkpoint of unskip, or damaged",
        "list.pt": r"list.pt holds no state dict",
        "other.pt": r"other.pt does not fit 'tests.doctor.small:mlp'",
        "text.pt": r"text.pt is damaged, or no checkpoint at all",
        "text.safetensors": r"text.safetensors can't be read as safetensors",
        "half.pt": r"half.pt is damaged",
        "missing.pt": r"missing.pt can't be read",
    }.items():
        with pytest.raises(ValueError, match=f"^doctor: .*{sentence}"):
            load_network(f"{HERE}:mlp", weights=tmp_path / name)
        if name != "missing.pt":
            with pytest.raises(ValueError, match=r"^doctor: .*give the file with --weights\."):
                load_network(str(tmp_path / name))
    assert not (tmp_path / "was-run").exists()


# ---------------------------------------------------------------- batches


def subject(*shape: int) -> Subject:
    class Classes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :10]

    return Subject(name="net", network=Classes(), input_size=shape)


def test_digits_for_what_reads_images_and_noise_for_the_rest() -> None:
    grey, color, line = (load_batch(subject(*shape)) for shape in [(1, 8, 8), (3, 16, 16), (64,)])
    assert grey.images.shape == (64, 1, 8, 8)
    assert color.images.shape == (64, 3, 16, 16)
    assert torch.equal(line.images, grey.images.flatten(1))
    assert torch.equal(color.images[:, 0], color.images[:, 2])
    assert grey.targets is not None
    assert set(grey.targets.tolist()) <= set(range(10))
    assert grey.words == "scikit-learn's digits"
    assert color.words == "scikit-learn's digits, brought to 16 x 16 px"
    assert grey.images.mean().abs() < 0.1
    assert grey.images.std() == pytest.approx(1, abs=0.15)
    for shape in [(10,), (7, 5), (4, 9, 9)]:
        noise = load_batch(subject(*shape))
        assert (noise.images.shape, noise.targets, noise.words) == ((64, *shape), None, "normal noise")
    assert load_batch(subject(3, 80, 80)).images.shape[0] == 16
    assert torch.equal(load_batch(subject(1, 8, 8), seed=0).images, grey.images)
    assert not torch.equal(load_batch(subject(1, 8, 8), seed=1).images, grey.images)


def test_targets_that_a_network_has_no_output_for_are_left_out() -> None:
    batch = load_batch(load_network(f"{HERE}:convolutional"))  # three classes, and digits have ten
    assert batch.targets is None
    assert batch.words.endswith("with random classes")


def test_data_of_the_users_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 6, 6, 3), np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "set.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    batch = load_batch(subject(3, 6, 6), str(tmp_path / "set.npz"), size=40)
    assert batch.targets is not None
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).numpy()
    assert batch.targets.tolist() == y[order].tolist()
    flat = torch.from_numpy(x[order] / 255.0).permute(0, 3, 1, 2)
    expected = (flat - flat.mean((0, 2, 3), keepdim=True)) / flat.std((0, 2, 3), keepdim=True, correction=0)
    assert torch.allclose(batch.images.double(), expected, atol=1e-5)

    for kind in ("cats", "dogs"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(rng.integers(0, 256, (9, 20, 3), np.uint8)).save(tmp_path / "pets" / kind / f"{i}.png")
    batch = load_batch(subject(3, 8, 8), str(tmp_path / "pets"), size=8)
    assert batch.images.shape == (8, 3, 8, 8)
    assert batch.targets is not None
    assert sorted(batch.targets.tolist()) == [0] * 4 + [1] * 4
    alone = load_batch(subject(1, 8, 8), str(tmp_path / "pets" / "cats"), size=4)
    assert (alone.images.shape, alone.targets) == ((4, 1, 8, 8), None)


@pytest.mark.parametrize(
    ("shape", "data", "size", "sentence"),
    [
        ((3, 8, 8), "cifar11", None, r"--data 'cifar11' is neither 'digits' nor 'noise', and there is no such file"),
        ((10,), "digits", None, r"reads inputs of shape 10, which no image has\. Leave out --data"),
        ((3, 8, 8), None, 1, r"--batch-size 1 must be at least 2"),
        ((3, 8, 8), None, 5000, r"--batch-size 5000 is more than the 1442 images of --data 'digits'; lower it"),
        ((3, 8, 8), ".", None, r"has 0 images"),
    ],
)
def test_wrong_data_gets_a_sentence(
    shape: tuple[int, ...], data: str | None, size: int | None, sentence: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        load_batch(subject(*shape), data, size=size)


def test_trying_a_network_out_leaves_it_as_it_was() -> None:
    network = nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 10))
    network[1].eval()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    load_batch(Subject(name="net", network=network, input_size=(64,)))
    assert [module.training for module in network] == [True, False, True]
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_a_page_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    check_free(file, force=False)
    file.write_text("old")
    with pytest.raises(ValueError, match=r"is there already\. Choose another --out, or overwrite it with --force\."):
        check_free(file, force=False)
    check_free(file, force=True)
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        check_free(tmp_path, force=True)
    with pytest.raises(ValueError, match=r"the folder .* of --out does not exist"):
        check_free(tmp_path / "nowhere" / "report.html", force=False)
