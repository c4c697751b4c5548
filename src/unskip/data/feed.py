"""Feeds: batches of a data set on the device, normalised, augmented, and the same after a restart.

A set that fits stays on the device as uint8 and is cropped and mirrored there, a batch at a time (`DeviceFeed`). The
rest is read and augmented by worker processes with torchvision's transforms v2 and timm's RandAugment (`WorkerFeed`).
What happens in an epoch follows from the seed and the epoch's number alone, so any batch can be made again.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2

from unskip._core.limits import check_file, check_memory
from unskip._core.rng import seed_of, seeded
from unskip.data.config import DataConfig
from unskip.data.sets import DataSet, Split

Batch = tuple[Tensor, Tensor]
MAX_PIXELS = 2**21  # of an evaluation batch: 2,048 images of 32 px
ORDER, SAMPLE, MIX, ERASE = 1, 2, 3, 4  # which stream of random numbers a seed is for


@dataclass(frozen=True)
class Partition:
    """Which part of each batch this process takes: the rank-th of `world` equal ones."""

    rank: int = 0
    world: int = 1

    def of(self, batch: Tensor) -> Tensor:
        each = len(batch) // self.world
        return batch[self.rank * each : (self.rank + 1) * each]


CPU, WHOLE = torch.device("cpu"), Partition()


def make_feed(
    data: DataSet,
    config: DataConfig,
    *,
    batch: int,
    seed: int = 0,
    smoothing: float = 0.0,
    channels_last: bool = False,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    partition: Partition = WHOLE,
) -> "Feed":
    """The feed that fits a data set: on the device where that is possible, else through workers (arguments: `Feed`)."""
    each = batch // partition.world
    if batch % partition.world:
        raise ValueError(f"recipe: batch={batch} can't be shared by {partition.world} processes; use a multiple.")
    if config.mixes and each % 2:
        raise ValueError(
            f"recipe: batch={batch} is {each} images for each of {partition.world} processes, and mixup and cutmix "
            f"pair them; use a multiple of {2 * partition.world}."
        )
    if data.vocabulary:
        if config.mixes or config.crop != "none" or config.flip or config.erase or config.repeats > 1:
            raise ValueError("recipe: crop, flip, erase, mixup, cutmix and repeats are for images, and this is a text.")
        return TextFeed(data, config, batch, seed, smoothing, False, device, dtype, partition)
    if len(data.train) < batch:
        raise ValueError(f"recipe: batch={batch} is larger than the training set ({len(data.train)} images); lower it.")
    by_image = config.crop == "resized" or config.color_jitter or config.rand_augment
    count = len(data.train) + len(data.val or ()) + len(data.test)
    side = data.image_size + 2 * config.pad * (config.crop == "pad")
    fits = count * data.channels * side**2 <= config.cache_gib * 2**30
    check_memory(
        each * data.channels * side**2 * dtype.itemsize, f"recipe: a batch of {each} images of {side} x {side} px"
    )
    kind: type[Feed] = WorkerFeed
    if fits and not by_image:
        kind, data = DeviceFeed, _decoded(data, config)
    return kind(data, config, batch, seed, smoothing, channels_last, device, dtype, partition)


@dataclass(eq=False)
class Feed(ABC):
    """What both feeds share: the order of an epoch, normalisation, mixing, and the batches of an evaluation."""

    data: DataSet
    config: DataConfig  # what happens to training images
    batch: int  # images, over all processes
    seed: int = 0  # of order and augmentation
    smoothing: float = 0.0  # of labels, where mixup or cutmix make soft ones
    channels_last: bool = False  # memory format of the images
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    partition: Partition = WHOLE  # the part of each batch that this process takes

    def __post_init__(self) -> None:
        data, config, device, dtype = self.data, self.config, self.device, self.dtype
        self.steps = len(data.train) // self.batch  # in an epoch; what is left over waits for another epoch's order
        mean, std = (torch.tensor(v, dtype=torch.float64) * 255 for v in (data.mean, data.std))
        self.scale = (1 / std).to(device, dtype).view(-1, 1, 1)
        self.shift = (-mean / std).to(device, dtype).view(-1, 1, 1)
        self.memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        self.mix = None
        if config.mixes:
            self.mix = Mixup(
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
                prob=config.mix_prob,
                label_smoothing=self.smoothing,
                num_classes=data.classes,
            )

    def order(self, epoch: int) -> Tensor:
        """The training images of an epoch: (steps * batch,) indices, the same for all processes."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, ORDER, epoch))
        order = torch.randperm(len(self.data.train), generator=generator)
        return order[torch.arange(self.steps * self.batch) // self.config.repeats]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's part of the batches of an epoch, from number `start` on."""
        for step, (x, y) in enumerate(self.batches(epoch, start), start):
            yield self.mixed(x, y, (self.seed, MIX, epoch, step, self.partition.rank))

    def mixed(self, x: Tensor, y: Tensor, key: tuple[int, ...]) -> Batch:
        """A batch after mixup and cutmix, where the configuration asks for them."""
        if self.mix is None:
            return x, y
        with seeded(*key):
            mixed: Batch = self.mix(x, y)
            return mixed

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """This process's part of the batches of an epoch from number `start` on, before they are mixed."""

    def evaluation(self, split: Split) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(images, labels, weights): all images of a split once over all processes.

        Each process sees equally many batches, as FSDP needs; what fills up the last ones has weight 0.
        """
        count = self.count(split)
        per_batch = max(4 * self.batch, MAX_PIXELS // self.data.image_size**2)
        size = max(1, min(count, per_batch) // self.partition.world)
        each = -(-count // self.partition.world)
        mine = torch.arange(self.partition.rank * each, (self.partition.rank + 1) * each)
        for at, (x, y) in zip(mine.split(size), self.plain_batches(split, mine.split(size)), strict=True):
            yield x, y, (at < count).to(self.device, self.dtype)

    def count(self, split: Split) -> int:
        """How many inputs a split has."""
        return len(split)

    @abstractmethod
    def plain_batches(self, split: Split, parts: tuple[Tensor, ...]) -> Iterator[Batch]:
        """Batches of a split as they are, by index; an index beyond the end stands for the last image."""

    def normalise(self, x: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to what the network reads, in place where that is possible."""
        return x.to(self.dtype).mul_(self.scale).add_(self.shift).contiguous(memory_format=self.memory_format)


class DeviceFeed(Feed):
    """All images on the device as uint8, NHWC. An epoch's crops and mirrors are drawn at its start."""

    @cached_property
    def padded(self) -> Tensor:
        """The training images on the device, with zeros around them as torchvision's crop has them."""
        return self.held(self.data.train, self.pad)[0]

    @cached_property
    def labels(self) -> Tensor:
        return self.held(self.data.train, self.pad)[1]

    @property
    def pad(self) -> int:
        return self.config.pad if self.config.crop == "pad" else 0

    def held(self, split: Split, pad: int = 0) -> tuple[Tensor, Tensor]:
        """A split on the device, put there when first used; all feeds of a data set share it."""
        held = self.data.on_device
        key = (id(split), pad, self.device)
        if key not in held:
            assert isinstance(split.images, Tensor)
            images = F.pad(split.images.to(self.device), (0, 0, *[pad] * 4)) if pad else split.images.to(self.device)
            held[key] = images, split.labels.to(self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a feed on another stream may read them next
        return held[key]

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        size, batch = self.data.image_size, self.batch
        order = self.order(epoch)
        n = len(order)
        line = torch.arange(size, device=self.device)
        generator = torch.Generator().manual_seed(seed_of(self.seed, SAMPLE, epoch))
        dy, dx = torch.randint(2 * self.pad + 1, (2, n, 1), generator=generator)
        mirror = torch.rand(n, 1, generator=generator) < self.config.flip
        erased = self.erased(n, generator).to(self.device)
        order, dy, dx, mirror = (t.to(self.device) for t in (order, dy, dx, mirror))
        rows, columns = dy + line, dx + torch.where(mirror, size - 1 - line, line)  # (n, size) each
        still = not self.pad and not self.config.flip
        for at in range(start * batch, n, batch):
            part = [self.partition.of(t[at : at + batch]) for t in (order, rows, columns, erased)]
            if still:
                x = self.padded[part[0]]
            else:
                x = self.padded[part[0][:, None, None], part[1][:, :, None], part[2][:, None, :]]  # (B, H, W, C)
            x = self.normalise(x.permute(0, 3, 1, 2))
            if self.config.erase:
                top, bottom, left, right = part[3].T[:, :, None]
                inside = ((line >= top) & (line < bottom))[:, None, :, None] & ((line >= left) & (line < right))[
                    :, None, None
                ]
                x = torch.where(inside, self.noise(x, (self.seed, ERASE, epoch, at, self.partition.rank)), x)
            yield x, self.labels[part[0]]

    def erased(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, 4): top, bottom, left and right of the rectangle that is erased from each image; empty for most.

        As timm's RandomErasing draws them: 2 % to a third of the area, sides at 0.3 to 1 / 0.3, the first of ten that
        fits; here for an epoch at once.
        """
        if not self.config.erase:
            return torch.zeros(n, 4, dtype=torch.long)
        side = self.data.image_size
        area = torch.empty(n, 10).uniform_(0.02, 1 / 3, generator=generator) * side**2
        aspect = torch.empty(n, 10).uniform_(math.log(0.3), -math.log(0.3), generator=generator).exp()
        height, width = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (height < side) & (width < side)
        first = fits.float().argmax(1, keepdim=True)
        wanted = fits.any(1, keepdim=True) & (torch.rand(n, 1, generator=generator) < self.config.erase)
        height, width = (length.gather(1, first) * wanted for length in (height, width))
        top, left = (
            (torch.rand(n, 1, generator=generator) * (side - length + 1)).floor() for length in (height, width)
        )
        return torch.cat([top, top + height, left, left + width], dim=1).long()

    def noise(self, x: Tensor, key: tuple[int, ...]) -> Tensor:
        """Standard normal numbers like `x`, of a seed."""
        generator = torch.Generator(self.device).manual_seed(seed_of(*key))
        return torch.empty_like(x).normal_(generator=generator)

    def plain_batches(self, split: Split, parts: tuple[Tensor, ...]) -> Iterator[Batch]:
        images, labels = self.held(split)
        for part in parts:
            at = part.clamp(max=len(split) - 1).to(self.device)
            yield self.normalise(images[at].permute(0, 3, 1, 2)), labels[at]


class TextFeed(Feed):
    """A text on the device, cut into pieces of `context` tokens; an epoch draws where the first begins, and the order.

    The label of each token is the one after it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps = self.count(self.data.train) // self.batch
        if not self.steps:
            raise ValueError(
                f"recipe: batch={self.batch} is larger than the training text, {self.count(self.data.train)} pieces of "
                f"{self.data.image_size} tokens; lower batch or context."
            )
        parts = [part for part in (self.data.train, self.data.val, self.data.test) if part is not None]
        self.tokens = {id(part): part.labels.to(self.device) for part in parts}

    def count(self, split: Split) -> int:
        return (len(split) - 1) // self.data.image_size

    def pieces(self, split: Split, starts: Tensor) -> Batch:
        tokens = self.tokens[id(split)]
        at = starts.to(self.device)[:, None] + torch.arange(self.data.image_size, device=self.device)
        return tokens[at], tokens[at + 1]

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        context, train = self.data.image_size, self.data.train
        generator = torch.Generator().manual_seed(seed_of(self.seed, ORDER, epoch))
        spare = len(train) - 1 - self.steps * self.batch * context
        offset = int(torch.randint(min(context, spare + 1), (1,), generator=generator))
        order = torch.randperm((len(train) - 1 - offset) // context, generator=generator) * context + offset
        for step in range(start, self.steps):
            yield self.pieces(train, self.partition.of(order[step * self.batch : (step + 1) * self.batch]))

    def plain_batches(self, split: Split, parts: tuple[Tensor, ...]) -> Iterator[Batch]:
        for part in parts:
            yield self.pieces(split, part.clamp(max=self.count(split) - 1) * self.data.image_size)


class WorkerFeed(Feed):
    """Images read and augmented one by one in worker processes, as uint8, then normalised on the device."""

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        batch = self.batch
        samples = Samples(self.data.train, train_transform(self.data, self.config), (self.seed, SAMPLE, epoch))
        places = enumerate(self.order(epoch).split(batch))
        parts = [
            self.partition.of(torch.stack([torch.arange(k * batch, (k + 1) * batch), part], dim=1)).tolist()
            for k, part in places
            if k >= start
        ]
        erase = RandomErasing(self.config.erase, mode="pixel", device=self.device)
        for step, (x, y) in enumerate(self.loaded(samples, parts), start):
            if self.config.erase:
                with seeded(self.seed, ERASE, epoch, step, self.partition.rank):
                    x = erase(x)
            yield x, y

    def plain_batches(self, split: Split, parts: tuple[Tensor, ...]) -> Iterator[Batch]:
        samples = Samples(split, eval_transform(self.data, self.config), None)
        clamped = [part.clamp(max=len(split) - 1).tolist() for part in parts]
        yield from self.loaded(samples, [[(i, i) for i in part] for part in clamped])

    def loaded(self, samples: "Samples", parts: list[Any]) -> Iterator[Batch]:
        cuda = self.device.type == "cuda"
        workers = min(self.config.workers, len(parts))
        # A generator of its own: without one a loader draws its seed from the network's.
        own = torch.Generator().manual_seed(0)
        loader = DataLoader(samples, batch_sampler=parts, num_workers=workers, pin_memory=cuda, generator=own)
        for x, y in loader:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            yield self.normalise(x), y


class Samples(Dataset[tuple[Tensor, int]]):
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
        with open_file(path) as image:
            return image.convert("RGB")
    except Exception as error:
        raise ValueError(f"data: {path} can't be read: {error}. Replace or remove it.") from error


def open_file(path: Path) -> Image.Image:
    """An image file, opened but not decoded, if it is no pipe and not too large. Pillow itself refuses 179 M pixels."""
    check_file(path, "data")
    image = Image.open(path)
    check_memory(4 * image.width * image.height, f"an image of {image.width} x {image.height} px")
    return image


def train_transform(data: DataSet, config: DataConfig) -> v2.Transform:
    """PIL image to uint8 (C, H, W), with everything that is asked for one image at a time."""
    size, bicubic = data.image_size, InterpolationMode.BICUBIC
    steps: list[Any] = []
    if config.crop == "resized":
        steps.append(v2.RandomResizedCrop(size, scale=(config.crop_scale, 1.0), interpolation=bicubic, antialias=True))
    else:
        steps += [v2.Resize(size, interpolation=bicubic, antialias=True), v2.CenterCrop(size)]
    if config.crop == "pad":
        steps.append(v2.RandomCrop(size, padding=config.pad))
    if config.flip:
        steps.append(v2.RandomHorizontalFlip(config.flip))
    if config.rand_augment:
        if data.channels != 3:
            raise ValueError(f"recipe: rand_augment needs colour images, and these have {data.channels} channels.")
        grey = tuple(min(255, round(255 * v)) for v in data.mean)
        settings = {"translate_const": int(size * 0.45), "img_mean": grey}
        try:
            steps.append(rand_augment_transform(config.rand_augment, settings))
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"recipe: rand_augment={config.rand_augment!r} is no policy of timm, such as 'rand-m9-mstd0.5-inc1'."
            ) from error
    if config.color_jitter:
        steps.append(v2.ColorJitter(*[config.color_jitter] * 3))
    return v2.Compose([*steps, v2.PILToTensor()])


def preparation(data: DataSet, config: DataConfig) -> dict[str, Any]:
    """How an image is brought to the network when testing, in the words of timm's `pretrained_cfg`.

    `timm.data.create_transform` makes the same of an image file as `eval_transform` does. Nothing of a text.
    """
    if data.vocabulary:
        return {}
    resized = 1.0 if data.in_memory else data.image_size / (_resized_side(data, config) + 0.5)  # timm rounds down
    return {
        "mean": [*data.mean], "std": [*data.std], "crop_pct": resized, "interpolation": "bicubic",
        "label_names": [*data.class_names],
    }  # fmt: skip


def _resized_side(data: DataSet, config: DataConfig) -> int:
    """px, of the shorter side before the centre crop."""
    return round(data.image_size / config.test_crop)


def eval_transform(data: DataSet, config: DataConfig) -> v2.Transform:
    if data.in_memory:
        return v2.PILToTensor()
    larger = _resized_side(data, config)
    resize = v2.Resize(larger, interpolation=InterpolationMode.BICUBIC, antialias=True)
    return v2.Compose([resize, v2.CenterCrop(data.image_size), v2.PILToTensor()])


def _decoded(data: DataSet, config: DataConfig) -> DataSet:
    """A set of files as one of arrays, each image resized and cropped to the middle once, as a WorkerFeed does it."""
    if data.in_memory:
        return data
    training, testing = train_transform(data, replace(config, crop="none", flip=0.0)), eval_transform(data, config)

    def decode(split: Split, transform: v2.Transform) -> Split:
        with ThreadPoolExecutor(max(1, config.workers)) as pool:
            images = list(pool.map(lambda i: transform(open_image(split, i)), range(len(split))))
        return Split(torch.stack(images).permute(0, 2, 3, 1).contiguous(), split.labels)

    val = None if data.val is None else decode(data.val, testing)
    return replace(data, train=decode(data.train, training), val=val, test=decode(data.test, testing))
