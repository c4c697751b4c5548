"""Feeds: batches of a data set on the device, normalised, augmented, and the same after a restart.

A set that fits stays on the device as uint8 and is cropped and mirrored there, a batch at a time (`DeviceFeed`). The
rest is read and augmented by worker processes with torchvision's transforms v2 and timm's RandAugment (`WorkerFeed`).
What happens in an epoch follows from the seed and the epoch's number alone, so any batch can be made again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import Mixup
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2

from unskip._core.rng import seed_of, seeded
from unskip.data.sets import DataSet, Split
from unskip.train.recipe import Recipe

Batch = tuple[Tensor, Tensor]
ORDER, SAMPLE, MIX = 1, 2, 3  # which stream of random numbers a seed is for


@dataclass(frozen=True)
class Share:
    """Which part of each batch this process takes: the rank-th of `world` equal ones."""

    rank: int = 0
    world: int = 1

    def of(self, batch: Tensor) -> Tensor:
        each = len(batch) // self.world
        return batch[self.rank * each : (self.rank + 1) * each]


def make_feed(
    data: DataSet,
    recipe: Recipe,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    share: Share | None = None,
) -> "Feed":
    """The feed that fits a data set and a recipe: on the device where that is possible, else through workers."""
    share = share or Share()
    if recipe.batch % share.world:
        raise ValueError(f"recipe: batch={recipe.batch} can't be shared by {share.world} processes; use a multiple.")
    if (recipe.mixup or recipe.cutmix) and recipe.batch // share.world % 2:
        raise ValueError(
            f"recipe: batch={recipe.batch} is {recipe.batch // share.world} images for each of {share.world} "
            f"processes, and mixup and cutmix pair them; use a multiple of {2 * share.world}."
        )
    if len(data.train) < recipe.batch:
        raise ValueError(
            f"recipe: batch={recipe.batch} is larger than the training set ({len(data.train)} images); lower it."
        )
    by_image = recipe.crop == "resized" or recipe.color_jitter or recipe.rand_augment
    count = len(data.train) + len(data.val or ()) + len(data.test)
    fits = count * data.image_size**2 * data.channels <= recipe.cache_gib * 2**30
    if by_image or not fits:
        return WorkerFeed(data, recipe, device=device, dtype=dtype, share=share)
    return DeviceFeed(_decoded(data, recipe), recipe, device=device, dtype=dtype, share=share)


class Feed(ABC):
    """What both feeds share: the order of an epoch, normalisation, mixing, and the batches of an evaluation."""

    def __init__(
        self, data: DataSet, recipe: Recipe, *, device: torch.device, dtype: torch.dtype, share: Share
    ) -> None:
        self.data, self.recipe, self.device, self.dtype, self.share = data, recipe, device, dtype, share
        self.steps = len(data.train) // recipe.batch  # in an epoch; what is left over waits for another epoch's order
        mean, std = (torch.tensor(v, dtype=torch.float64) * 255 for v in (data.mean, data.std))
        self.scale = (1 / std).to(device, dtype).view(-1, 1, 1)
        self.shift = (-mean / std).to(device, dtype).view(-1, 1, 1)
        self.memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.mix = None
        if recipe.mixup or recipe.cutmix:
            self.mix = Mixup(
                mixup_alpha=recipe.mixup,
                cutmix_alpha=recipe.cutmix,
                prob=recipe.mix_prob,
                label_smoothing=recipe.smoothing,
                num_classes=data.classes,
            )
        self.erase = RandomErasing(recipe.erase, mode="pixel", device=device) if recipe.erase else None

    def order(self, epoch: int) -> Tensor:
        """The training images of an epoch: (steps * batch,) indices, the same for all processes."""
        generator = torch.Generator().manual_seed(seed_of(self.recipe.seed, ORDER, epoch))
        order = torch.randperm(len(self.data.train), generator=generator)
        return order.repeat_interleave(self.recipe.repeats)[: self.steps * self.recipe.batch]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch, from number `start` on."""
        for step, (x, y) in enumerate(self.batches(epoch, start), start):
            yield self.mixed(x, y, (self.recipe.seed, MIX, epoch, step, self.share.rank))

    def mixed(self, x: Tensor, y: Tensor, key: tuple[int, ...]) -> Batch:
        """A batch after random erasing, mixup and cutmix, where the recipe asks for them."""
        if self.mix is None and self.erase is None:
            return x, y
        with seeded(*key):
            x = x if self.erase is None else self.erase(x)
            return (x, y) if self.mix is None else self.mix(x, y)

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """This process's share of the batches of an epoch from number `start` on, before they are mixed."""

    def evaluation(self, split: Split) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(images, labels, weights): all images of a split once over all processes.

        Each process sees equally many batches, as FSDP needs; what fills up the last ones has weight 0.
        """
        size = max(1, min(len(split), 4 * self.recipe.batch) // self.share.world)
        each = -(-len(split) // self.share.world)
        mine = torch.arange(self.share.rank * each, (self.share.rank + 1) * each)
        for at, (x, y) in zip(mine.split(size), self.plain_batches(split, mine.split(size)), strict=True):
            yield x, y, (at < len(split)).to(self.device, self.dtype)

    @abstractmethod
    def plain_batches(self, split: Split, parts: tuple[Tensor, ...]) -> Iterator[Batch]:
        """Batches of a split as they are, by index; an index beyond the end stands for the last image."""

    def normalise(self, x: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to what the network reads, in place where that is possible."""
        return x.to(self.dtype).mul_(self.scale).add_(self.shift).contiguous(memory_format=self.memory_format)


class DeviceFeed(Feed):
    """All images on the device as uint8, NHWC. An epoch's crops and mirrors are drawn at its start."""

    def __init__(
        self, data: DataSet, recipe: Recipe, *, device: torch.device, dtype: torch.dtype, share: Share
    ) -> None:
        super().__init__(data, recipe, device=device, dtype=dtype, share=share)
        pad = recipe.pad if recipe.crop == "pad" else 0
        assert isinstance(data.train.images, Tensor)
        self.padded = F.pad(data.train.images, (0, 0, pad, pad, pad, pad)).to(device)  # zeros, as torchvision's crop
        self.labels = data.train.labels.to(device)
        self.pad = pad
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # splits to evaluate on, put on the device when first used

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        recipe, size = self.recipe, self.data.image_size
        order = self.order(epoch)
        n = len(order)
        line = torch.arange(size, device=self.device)
        generator = torch.Generator().manual_seed(seed_of(recipe.seed, SAMPLE, epoch))
        dy, dx = torch.randint(2 * self.pad + 1, (2, n, 1), generator=generator)
        mirror = torch.rand(n, 1, generator=generator) < recipe.flip
        order, dy, dx, mirror = (t.to(self.device) for t in (order, dy, dx, mirror))
        rows, columns = dy + line, dx + torch.where(mirror, size - 1 - line, line)  # (n, size) each
        still = not self.pad and not recipe.flip
        for at in range(start * recipe.batch, n, recipe.batch):
            part = [self.share.of(t[at : at + recipe.batch]) for t in (order, rows, columns)]
            if still:
                x = self.padded[part[0]]
            else:
                x = self.padded[part[0][:, None, None], part[1][:, :, None], part[2][:, None, :]]  # (B, H, W, C)
            yield self.normalise(x.permute(0, 3, 1, 2)), self.labels[part[0]]

    def plain_batches(self, split: Split, parts: tuple[Tensor, ...]) -> Iterator[Batch]:
        if id(split) not in self.held:
            assert isinstance(split.images, Tensor)
            self.held[id(split)] = split.images.to(self.device), split.labels.to(self.device)
        images, labels = self.held[id(split)]
        for part in parts:
            at = part.clamp(max=len(split) - 1).to(self.device)
            yield self.normalise(images[at].permute(0, 3, 1, 2)), labels[at]


class WorkerFeed(Feed):
    """Images read and augmented one by one in worker processes, as uint8, then normalised on the device."""

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        recipe = self.recipe
        samples = Samples(self.data.train, train_transform(self.data, recipe), (recipe.seed, SAMPLE, epoch))
        places = enumerate(self.order(epoch).split(recipe.batch))
        parts = [
            self.share.of(torch.stack([torch.arange(k * recipe.batch, (k + 1) * recipe.batch), part], dim=1)).tolist()
            for k, part in places
            if k >= start
        ]
        yield from self.loaded(samples, parts)

    def plain_batches(self, split: Split, parts: tuple[Tensor, ...]) -> Iterator[Batch]:
        samples = Samples(split, eval_transform(self.data, self.recipe), None)
        clamped = [part.clamp(max=len(split) - 1).tolist() for part in parts]
        yield from self.loaded(samples, [[(i, i) for i in part] for part in clamped])

    def loaded(self, samples: "Samples", parts: list[Any]) -> Iterator[Batch]:
        cuda = self.device.type == "cuda"
        workers = min(self.recipe.workers, len(parts))
        # A generator of its own: without one a loader draws its seed from the network's.
        own = torch.Generator().manual_seed(0)
        loader = DataLoader(samples, batch_sampler=parts, num_workers=workers, pin_memory=cuda, generator=own)
        for x, y in loader:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            yield self.normalise(x), y


class Samples(Dataset):
    """Single images by (position in the epoch, index); the position seeds what happens to the image."""

    def __init__(self, split: Split, transform: v2.Transform, key: tuple[int, ...] | None) -> None:
        self.split, self.transform, self.key = split, transform, key
        self.labels = split.labels.tolist()

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, int]:
        position, index = place
        image = open_image(self.split, index)
        if self.key is None:
            return self.transform(image), self.labels[index]
        with seeded(*self.key, position):
            return self.transform(image), self.labels[index]


def open_image(split: Split, index: int) -> Image.Image:
    if isinstance(split.images, Tensor):
        array = split.images[index].numpy()
        return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    path: Path = split.images[index]
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:
        raise ValueError(f"data: {path} can't be read: {error}. Replace or remove it.") from error


def train_transform(data: DataSet, recipe: Recipe) -> v2.Transform:
    """PIL image to uint8 (C, H, W), with everything that the recipe asks for one image at a time."""
    size, bicubic = data.image_size, InterpolationMode.BICUBIC
    steps: list[Any] = []
    if recipe.crop == "resized":
        steps.append(v2.RandomResizedCrop(size, scale=(recipe.crop_scale, 1.0), interpolation=bicubic, antialias=True))
    else:
        steps += [v2.Resize(size, interpolation=bicubic, antialias=True), v2.CenterCrop(size)]
    if recipe.crop == "pad":
        steps.append(v2.RandomCrop(size, padding=recipe.pad))
    if recipe.flip:
        steps.append(v2.RandomHorizontalFlip(recipe.flip))
    if recipe.rand_augment:
        if data.channels != 3:
            raise ValueError(f"recipe: rand_augment needs colour images, and these have {data.channels} channels.")
        grey = tuple(min(255, round(255 * v)) for v in data.mean)
        settings = {"translate_const": int(size * 0.45), "img_mean": grey}
        try:
            steps.append(rand_augment_transform(recipe.rand_augment, settings))
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"recipe: rand_augment={recipe.rand_augment!r} is no policy of timm, such as 'rand-m9-mstd0.5-inc1'."
            ) from error
    if recipe.color_jitter:
        steps.append(v2.ColorJitter(*[recipe.color_jitter] * 3))
    return v2.Compose([*steps, v2.PILToTensor()])


def eval_transform(data: DataSet, recipe: Recipe) -> v2.Transform:
    if data.in_memory:
        return v2.PILToTensor()
    larger = round(data.image_size / recipe.test_crop)
    resize = v2.Resize(larger, interpolation=InterpolationMode.BICUBIC, antialias=True)
    return v2.Compose([resize, v2.CenterCrop(data.image_size), v2.PILToTensor()])


def _decoded(data: DataSet, recipe: Recipe) -> DataSet:
    """A set of files as one of arrays, each image resized and cropped to the middle once, as a WorkerFeed does it."""
    if data.in_memory:
        return data
    training, testing = train_transform(data, recipe.replace(crop="none", flip=0.0)), eval_transform(data, recipe)

    def decode(split: Split, transform: v2.Transform) -> Split:
        with ThreadPoolExecutor(max(1, recipe.workers)) as pool:
            images = list(pool.map(lambda i: transform(open_image(split, i)), range(len(split))))
        return Split(torch.stack(images).permute(0, 2, 3, 1).contiguous(), split.labels)

    val = None if data.val is None else decode(data.val, testing)
    return replace(data, train=decode(data.train, training), val=val, test=decode(data.test, testing))
