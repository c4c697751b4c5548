"""Batches for networks, and the sentence for each way to ask for one that can't be."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.io.test_load import HERE
from tests.measures.networks import same, snapshot
from unskip.doctor.batches import load_batch
from unskip.io.load import LoadedModel, load_model


def loaded(*shape: int) -> LoadedModel:
    class Classes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :10]

    return LoadedModel(name="net", model=Classes(), input_size=shape)


def test_digits_for_what_reads_images_and_noise_for_the_rest() -> None:
    grey, color, line = (load_batch(loaded(*shape)) for shape in [(1, 8, 8), (3, 16, 16), (64,)])
    assert grey.images.shape == (64, 1, 8, 8)
    assert color.images.shape == (64, 3, 16, 16)
    assert torch.equal(line.images, grey.images.flatten(1))
    assert torch.equal(color.images[:, 0], color.images[:, 2])
    assert grey.targets is not None
    assert set(grey.targets.tolist()) <= set(range(10))
    assert grey.description == "scikit-learn's digits"
    assert color.description == "scikit-learn's digits, resized to 16 x 16 px"
    assert grey.images.mean().abs() < 0.1
    assert grey.images.std() == pytest.approx(1, abs=0.15)
    for shape in [(10,), (7, 5), (4, 9, 9)]:
        noise = load_batch(loaded(*shape))
        assert (noise.images.shape, noise.targets, noise.description) == ((64, *shape), None, "normal noise")
    assert load_batch(loaded(3, 80, 80)).images.shape[0] == 16
    assert torch.equal(load_batch(loaded(1, 8, 8), seed=0).images, grey.images)
    assert not torch.equal(load_batch(loaded(1, 8, 8), seed=1).images, grey.images)


def test_targets_that_a_network_has_no_output_for_are_left_out() -> None:
    batch = load_batch(load_model(f"{HERE}:convolutional"))  # three classes, and digits have ten
    assert batch.targets is None
    assert batch.description.endswith("with random classes")


def test_data_of_the_users_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 6, 6, 3), np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "set.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    batch = load_batch(loaded(3, 6, 6), str(tmp_path / "set.npz"), size=40)
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
    batch = load_batch(loaded(3, 8, 8), str(tmp_path / "pets"), size=8)
    assert batch.images.shape == (8, 3, 8, 8)
    assert batch.targets is not None
    assert sorted(batch.targets.tolist()) == [0] * 4 + [1] * 4
    alone = load_batch(loaded(1, 8, 8), str(tmp_path / "pets" / "cats"), size=4)
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
        load_batch(loaded(*shape), data, size=size)


def test_trying_a_network_out_leaves_it_as_it_was() -> None:
    network = nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 10))
    network[1].eval()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    load_batch(LoadedModel(name="net", model=network, input_size=(64,)))
    assert [module.training for module in network] == [True, False, True]
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_what_a_network_can_not_read_is_said_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"can't read a batch of shape 2x3x32x32: 20 px, not 32\. That shape is a guess"
    ):
        load_batch(load_model(f"{HERE}:Picky"))
    loaded = load_model(f"{HERE}:Picky", input_size=(3, 20, 20))
    assert load_batch(loaded).images.shape == (64, 3, 20, 20)


def test_lazy_layers_take_their_shape_from_the_batch() -> None:
    loaded = load_model(f"{HERE}:lazy", input_size=(64,))
    load_batch(loaded)
    assert loaded.model[0].weight.shape == (8, 64)
    assert loaded.model[1].running_mean.shape == (8,)


@pytest.mark.parametrize("precision", [torch.float64, torch.bfloat16])
def test_a_network_gets_numbers_of_its_own_precision(precision: torch.dtype) -> None:
    network = nn.Linear(64, 10).to(precision)
    assert load_batch(LoadedModel(name="net", model=network, input_size=(64,))).images.dtype == precision


def test_nothing_is_compiled_or_changed_by_a_try() -> None:
    def refuse(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        raise AssertionError("compiled")

    network = nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10, track_running_stats=True), nn.Dropout())
    network[2].eval()
    before = snapshot(network)
    load_batch(LoadedModel(name="net", model=torch.compile(network, backend=refuse), input_size=(64,)))  # type: ignore[arg-type]
    assert same(before, snapshot(network))
