"""Feeds: batches against torchvision's transforms, shares of processes, restarts, workers, mixing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.data.random_erasing import RandomErasing
from torch import nn
from torchvision.transforms import functional as TF

from tests.data.test_sets import write_folder
from tests.train.small import arrays, write_npz
from unskip._core.rng import seed_of
from unskip.data.config import DataConfig
from unskip.data.feed import (
    SAMPLE,
    WHOLE,
    DeviceFeed,
    Feed,
    Partition,
    WorkerFeed,
    eval_transform,
    make_feed,
    preparation,
    train_transform,
)
from unskip.data.sets import from_splits, load, make_split
from unskip.train import Recipe


def feed(recipe: Recipe, partition: Partition = WHOLE, **kwargs: object) -> Feed:
    return make_feed(load(recipe.data), recipe.data, **recipe.feeding, partition=partition, **kwargs)  # type: ignore[arg-type]


def test_crops_and_mirrors_are_torchvisions() -> None:
    recipe = Recipe.of(batch=32, crop="pad", pad=2, flip=0.5, seed=3)
    ours = feed(recipe)
    assert isinstance(ours, DeviceFeed)
    x, y = next(ours.epoch(4))
    order = ours.order(4)[:32]
    n = len(ours.order(4))
    generator = torch.Generator().manual_seed(seed_of(3, SAMPLE, 4))
    dy, dx = torch.randint(5, (2, n, 1), generator=generator)
    mirror = torch.rand(n, 1, generator=generator) < 0.5
    mean, std = ours.data.mean, ours.data.std
    assert 0 < mirror[:32].sum() < 32
    for i, index in enumerate(order.tolist()):
        image = TF.pad(ours.data.train.images[index].permute(2, 0, 1), [2])
        image = TF.crop(image, int(dy[i]), int(dx[i]), 8, 8)
        image = TF.hflip(image) if mirror[i] else image
        expected = TF.normalize(image.float() / 255, list(mean), list(std))
        torch.testing.assert_close(x[i], expected, rtol=0, atol=2e-5)
    assert torch.equal(y, ours.data.train.labels[order])


def test_an_epoch_has_every_image_at_most_once_and_epochs_differ() -> None:
    ours = feed(Recipe.of(batch=64, val_fraction=0.0))
    assert ours.steps == 1442 // 64
    order = ours.order(0)
    assert len(order.unique()) == len(order) == 22 * 64
    assert not torch.equal(order, ours.order(1))
    assert torch.equal(order, feed(Recipe.of(batch=64, val_fraction=0.0)).order(0))


def test_repeated_augmentation_shows_fewer_images_more_often() -> None:
    order = feed(Recipe.of(batch=64, repeats=3)).order(0)
    assert torch.bincount(order).max() == 3
    assert torch.equal(order[0::3][:20], order[1::3][:20])


@pytest.mark.parametrize("kind", ["device", "workers"])
def test_any_batch_can_be_made_again(kind: str) -> None:
    recipe = Recipe.of(
        batch=128, crop="pad", pad=1, flip=0.5, color_jitter=0.4 if kind == "workers" else 0.0, workers=0
    )
    ours = feed(recipe)
    assert isinstance(ours, DeviceFeed if kind == "device" else WorkerFeed)
    whole = list(ours.epoch(2))
    rest = list(feed(recipe).epoch(2, start=6))
    assert len(rest) == len(whole) - 6
    for (x, y), (a, b) in zip(whole[6:], rest, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)


def test_two_processes_share_each_batch() -> None:
    recipe = Recipe.of(batch=64, crop="pad", pad=1, flip=0.5)
    whole = next(feed(recipe).epoch(0))
    halves = [next(feed(recipe, Partition(rank, 2)).epoch(0)) for rank in range(2)]
    assert torch.equal(whole[0], torch.cat([x for x, _ in halves]))
    assert torch.equal(whole[1], torch.cat([y for _, y in halves]))
    with pytest.raises(ValueError, match="batch=63 can't be shared by 2 processes"):
        feed(Recipe.of(batch=63), Partition(0, 2))


def test_evaluation_sees_each_image_once_over_all_processes() -> None:
    recipe = Recipe.of(batch=32)
    data = load(recipe.data)
    for world in (1, 2, 3):
        seen, batches = [], set()
        for rank in range(world):
            ours = (
                make_feed(data, recipe.data, **recipe.feeding, partition=Partition(rank, world))
                if 32 % world == 0
                else None
            )
            if ours is None:
                continue
            got = list(ours.evaluation(data.test))
            batches.add(len(got))
            seen += [label for _, y, weight in got for label, w in zip(y.tolist(), weight.tolist(), strict=True) if w]
        if seen:
            assert sorted(seen) == sorted(data.test.labels.tolist())
            assert len(batches) == 1


def test_workers_change_nothing(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    recipe = Recipe.of(
        dataset="imagefolder", batch=4, crop="resized", flip=0.5, rand_augment="rand-m9-mstd0.5-inc1", image_size=16,
        val_fraction=0.0,
    )  # fmt: skip
    data = load(recipe.data, root)
    before = torch.get_rng_state()
    none, two = (
        list(make_feed(data, replace(recipe.data, workers=workers), **recipe.feeding).epoch(1)) for workers in (0, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert len(none) == len(two) == 3
    for (x, y), (a, b) in zip(none, two, strict=True):
        assert x.shape == (4, 3, 16, 16)
        assert torch.equal(x, a)
        assert torch.equal(y, b)


def test_small_folders_are_held_as_arrays(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    recipe = Recipe.of(dataset="imagefolder", batch=4, crop="pad", image_size=16, val_fraction=0.0)
    data = load(recipe.data, root)
    ours = make_feed(data, recipe.data, **recipe.feeding)
    assert isinstance(ours, DeviceFeed)
    assert ours.data.train.images.shape == (12, 16, 16, 3)
    assert isinstance(make_feed(data, replace(recipe.data, cache_gib=1e-6), **recipe.feeding), WorkerFeed)


def test_a_folder_is_tested_on_the_same_images_wherever_they_are_held(tmp_path: Path) -> None:
    recipe = Recipe.of(dataset="imagefolder", batch=4, image_size=12, test_crop=0.75, workers=0)
    data = load(recipe.data, write_folder(tmp_path))
    feeds = [make_feed(data, replace(recipe.data, cache_gib=gib), **recipe.feeding) for gib in (8, 1e-6)]
    assert [type(each) for each in feeds] == [DeviceFeed, WorkerFeed]
    for part in ("val", "test"):
        held, read = (torch.cat([x for x, _, _ in each.evaluation(getattr(each.data, part))]) for each in feeds)
        assert torch.equal(held, read)
    held, read = (next(each.batches(0, 0))[0] for each in feeds)
    assert torch.equal(held, read)


def test_test_transform_is_resize_and_centre_crop(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    recipe = Recipe.of(dataset="imagefolder", image_size=14, test_crop=0.875)
    data = load(recipe.data, root)
    from PIL import Image

    image = Image.open(data.test.images[0]).convert("RGB")
    expected = TF.center_crop(TF.resize(image, [16], TF.InterpolationMode.BICUBIC), [14])
    assert torch.equal(eval_transform(data, recipe.data)(image), TF.pil_to_tensor(expected))
    assert train_transform(data, replace(recipe.data, crop="resized"))(image).shape == (3, 14, 14)


def test_mixing_needs_an_even_share_of_a_batch() -> None:
    recipe = Recipe.of(batch=6, mixup=0.2)
    with pytest.raises(ValueError, match="batch=6 is 3 images for each of 2 processes, and mixup and cutmix pair them"):
        make_feed(load(recipe.data), recipe.data, **recipe.feeding, partition=Partition(0, 2))


def test_mixing_gives_soft_labels_and_leaves_the_generators_alone() -> None:
    ours = feed(Recipe.of(batch=32, mixup=0.2, cutmix=1.0, smoothing=0.1, erase=0.5))
    before = torch.get_rng_state()
    x, y = next(ours.epoch(0))
    assert torch.equal(before, torch.get_rng_state())
    assert y.shape == (32, 10)
    torch.testing.assert_close(y.sum(1), torch.ones(32))
    again, labels = next(ours.epoch(0))
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    hard, _ = next(feed(Recipe.of(batch=32)).epoch(0))
    assert not torch.equal(x, hard)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_labels_are_mixed_in_the_same_proportion_as_pixels(kind: str) -> None:
    """λ is read off the images; labels are those of both images of a pair, smoothed by 0.1."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, 16, 16, 1), dtype=torch.uint8, generator=generator)
    train, test = (make_split("noise", part.numpy(), (torch.arange(32) % 4).numpy()) for part in images.split(32))
    data = from_splits(DataConfig(dataset="npz", val_fraction=0.0), train, test, classes=4)
    config = DataConfig(dataset="npz", **{kind: 1.0})
    mixed = make_feed(data, config, batch=32, smoothing=0.1)
    for epoch in range(3):
        x, y = next(mixed.epoch(epoch))
        own, labels = next(make_feed(data, DataConfig(dataset="npz"), batch=32).epoch(epoch))
        other = own.flip(0)
        if kind == "mixup":
            share = float(((x - other) * (own - other)).sum() / (own - other).square().sum())
            torch.testing.assert_close(x, share * own + (1 - share) * other, rtol=1e-5, atol=1e-5)
        else:
            box = (x != own).any(0)[0]
            share = 1 - float(box.double().mean())
            torch.testing.assert_close(x, torch.where(box, other, own))
        first, second = (torch.nn.functional.one_hot(each, 4) * 0.9 + 0.1 / 4 for each in (labels, labels.flip(0)))
        torch.testing.assert_close(y, share * first + (1 - share) * second, rtol=1e-5, atol=1e-5)


def test_feeds_of_a_data_set_share_its_images() -> None:
    recipe = Recipe.of(batch=32, crop="pad")
    data = load(recipe.data)
    one, two = (make_feed(data, recipe.data, **{**recipe.feeding, "seed": seed}) for seed in (0, 1))
    assert isinstance(one, DeviceFeed)
    assert isinstance(two, DeviceFeed)
    assert one.padded.data_ptr() == two.padded.data_ptr()
    assert not torch.equal(next(one.epoch(0))[1], next(two.epoch(0))[1])


def test_erasing_is_timms() -> None:
    """As often, as large and as long as timm's RandomErasing, filled with noise; outside the image is what it was."""
    side, n = 64, 4000
    ours = feed(Recipe.of(batch=32, image_size=side, erase=0.5))
    assert isinstance(ours, DeviceFeed)
    boxes = ours.erased(n, torch.Generator().manual_seed(0)).double()
    height, width = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    assert boxes.min() >= 0
    assert boxes.max() <= side
    erase = RandomErasing(1.0, mode="const", device="cpu")
    blank = [erase(torch.ones(1, side, side))[0] == 0 for _ in range(1500)]
    drawn = (height * width)[height > 0] / side**2
    assert len(drawn) / n == pytest.approx(0.5, abs=0.03)
    assert float(drawn.mean()) == pytest.approx(float(torch.stack(blank).double().mean()), abs=0.01)
    lengths = torch.stack([mask.any(1).sum() for mask in blank]).double()
    assert float(height[height > 0].mean()) == pytest.approx(float(lengths.mean()), rel=0.05)
    x, _ = next(ours.epoch(0))
    whole, _ = next(feed(Recipe.of(batch=32, image_size=side)).epoch(0))
    changed = (x != whole).any(1).flatten(1).double().mean(1)
    assert 4 < (changed > 0).sum() < 28
    assert changed.max() <= 0.4
    noise = x[(x != whole)]
    assert abs(noise.mean()) < 0.05
    assert float(noise.std()) == pytest.approx(1.0, abs=0.05)


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch=5000 is larger than the training set"):
        feed(Recipe.of(batch=5000))
    file = write_npz(tmp_path / "grey.npz", **arrays(channels=1))
    recipe = Recipe.of(dataset="npz", batch=8, rand_augment="rand-m9", workers=0)
    with pytest.raises(ValueError, match="rand_augment needs colour images"):
        next(make_feed(load(recipe.data, file), recipe.data, **recipe.feeding).epoch(0))
    recipe = Recipe.of(dataset="npz", batch=8, rand_augment="nonsense", workers=0)
    with pytest.raises(ValueError, match="is no policy of timm"):
        next(make_feed(load(recipe.data, write_npz(tmp_path / "c.npz")), recipe.data, **recipe.feeding).epoch(0))


def test_float64(tmp_path: Path) -> None:
    x, _ = next(feed(Recipe.of(batch=32), dtype=torch.float64).epoch(0))
    assert x.dtype == torch.float64


@pytest.mark.parametrize("side", [32, 64, 224])
def test_a_run_says_how_timm_prepares_an_image_as_it_was_tested(side: int, tmp_path: Path) -> None:
    """What `unskip.load` puts into `pretrained_cfg` is enough to make the same numbers of an image elsewhere."""
    settings = DataConfig(dataset="imagefolder", image_size=side, check_files=False)
    data = load(settings, write_folder(tmp_path))
    about = preparation(data, settings)
    assert about["label_names"] == ["cat", "dog"]
    model = nn.Identity()
    model.pretrained_cfg = {**about, "input_size": data.input_size}  # type: ignore[assignment]
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (250, 301, 3), dtype=np.uint8))
    ours = eval_transform(data, settings)(image) / 255
    theirs = create_transform(**resolve_model_data_config(model))(image)
    mean, std = (torch.tensor(about[name])[:, None, None] for name in ("mean", "std"))
    torch.testing.assert_close(theirs, (ours - mean) / std)
