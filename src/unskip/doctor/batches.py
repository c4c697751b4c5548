"""A batch that a network can read, from real images where that is possible."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import pil_to_tensor

from unskip._core.errors import reason
from unskip._core.modules import preserved
from unskip.data.config import DataConfig
from unskip.data.feed import open_image
from unskip.data.readers import IMAGE_FILES
from unskip.data.sets import DataSet, Split, find_kind, load
from unskip.io.load import LoadedModel, Shape


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a network is shown."""

    images: Tensor
    targets: Tensor | None
    words: str  # what it is, for the reader of a report


def load_batch(loaded: LoadedModel, data: str | None = None, *, size: int | None = None, seed: int = 0) -> Batch:
    """A batch that the network reads, from real images where that is possible.

    Args:
        loaded: the network.
        data: 'digits', 'noise', a .npz file, or a folder: CIFAR, Fashion-MNIST, classes of images, or just images.
            Without it digits, brought to the network's size, for whatever reads images, and else noise.
        size: inputs in the batch; 64, or 16 for images above 64 px.
        seed: of which images are taken.
    """
    shape = loaded.input_size
    if size is None:
        size = 64 if max(shape) <= 64 or len(shape) < 3 else 16
    if size < 2:
        raise ValueError(
            f"doctor: --batch-size {size} must be at least 2, since layers are judged by comparing inputs."
        )
    picture = _picture_shape(shape)
    if data is None:
        data = "noise" if picture is None else "digits"
    if data == "noise":
        generator = torch.Generator().manual_seed(seed)
        batch = Batch(images=torch.randn(size, *shape, generator=generator), targets=None, words="normal noise")
    elif picture is None:
        raise ValueError(
            f"doctor: {loaded.name} reads inputs of shape {_by(shape)}, which no image has. Leave out --data, and it "
            "is shown noise; or give unskip.diagnose a batch of your own."
        )
    else:
        batch = _pictures(_find(data), data, picture, size, seed)
        batch = replace(batch, images=batch.images.reshape(size, *shape))
    if loaded.guessed:
        batch = replace(batch, words=f"{batch.words} (a size that was guessed)")
    batch = replace(batch, images=batch.images.to(_precision(loaded.model)))
    outputs = _try_out(loaded, batch.images)
    if batch.targets is not None and (outputs is None or int(batch.targets.max()) >= outputs):
        return replace(batch, targets=None, words=f"{batch.words}, with random classes")
    return batch


def _precision(network: nn.Module) -> torch.dtype:
    """The type of the first floating-point parameter, which is what the network reads."""
    return next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _by(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _picture_shape(shape: Shape) -> Shape | None:
    """(C, H, W) of an image that fills an input, None where none does. A vector may be a square image, line by line."""
    if len(shape) == 3 and shape[0] in (1, 3):
        return shape
    for channels in (1, 3):
        side = math.isqrt(shape[0] // channels)
        if len(shape) == 1 and side >= 4 and channels * side * side == shape[0]:
            return (channels, side, side)
    return None


def _find(data: str) -> DataSet:
    """A data set by name, or by what lies at a path."""
    if data == "digits":
        return load(DataConfig(dataset="digits", val_fraction=0.0))
    root = Path(data).expanduser()
    if not root.exists():
        raise ValueError(
            f"doctor: --data {data!r} is neither 'digits' nor 'noise', and there is no such file or folder."
        )
    kind = find_kind(root)
    if kind is None:
        return _loose(root)
    return load(DataConfig(dataset=kind, val_fraction=0.0, check_files=False), root)


def _loose(root: Path) -> DataSet:
    """A folder of images: its subfolders are classes, if it has any."""
    files = sorted(p for p in root.rglob("*") if p.suffix.lower() in IMAGE_FILES)
    if len(files) < 2:
        raise ValueError(
            f"doctor: {root} has {len(files)} images ({', '.join(IMAGE_FILES)}) in it and its subfolders; at least two "
            "are needed."
        )
    classes = sorted({p.relative_to(root).parts[0] for p in files if len(p.relative_to(root).parts) > 1})
    known = len(classes) > 1 and all(len(p.relative_to(root).parts) > 1 for p in files)
    labels = [classes.index(p.relative_to(root).parts[0]) if known else -1 for p in files]
    split = Split(files, torch.tensor(labels))
    return DataSet(
        name="images", train=split, val=None, test=split, classes=len(classes) if known else 0, channels=3,
        image_size=0, mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD,
    )  # fmt: skip


def _pictures(data: DataSet, word: str, shape: Shape, size: int, seed: int) -> Batch:
    """Images of a data set, (B, C, H, W), brought to the shape and normalised as the set is for training."""
    if len(data.train) < size:
        raise ValueError(
            f"doctor: --batch-size {size} is more than the {len(data.train)} images of --data {word!r}; lower it."
        )
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))[:size]
    split = data.train.take(order)
    if isinstance(split.images, Tensor):
        pixels = [image.permute(2, 0, 1) for image in split.images]
    else:
        pixels = [pil_to_tensor(open_image(split, i)) for i in range(size)]
    images = torch.stack([_fit(image.float() / 255, shape[1:]) for image in pixels])
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std))
    images = (images - mean) / std
    if images.shape[1] == 1:
        images = images.expand(-1, shape[0], -1, -1)
    elif shape[0] == 1:
        images = images[:, :3].mean(1, keepdim=True)
    elif images.shape[1] != shape[0]:
        raise ValueError(f"doctor: the images of --data {word!r} have {images.shape[1]} channels, not {shape[0]}.")
    native = tuple(pixels[0].shape[1:])
    scaled = "" if native == shape[1:] else f", brought to {shape[1]} x {shape[2]} px"
    source = "scikit-learn's digits" if data.name == "digits" else f"images of {word}"
    targets = split.labels if data.classes else None
    return Batch(images=images.contiguous(), targets=targets, words=source + scaled)


def _fit(image: Tensor, size: Shape) -> Tensor:
    """The largest part from the middle that has the right proportions, at the right size."""
    height, width = image.shape[1:]
    share = min(height / size[0], width / size[1])
    crop = round(size[0] * share), round(size[1] * share)
    top, left = (height - crop[0]) // 2, (width - crop[1]) // 2
    image = image[:, top : top + crop[0], left : left + crop[1]]
    if image.shape[1:] == size:
        return image
    return F.interpolate(image[None], size=list(size), mode="bilinear", antialias=True)[0]


def _try_out(loaded: LoadedModel, images: Tensor) -> int | None:
    """The number of classes that the network tells apart, None if its output is something else.

    Refuses a network that does not take the batch.
    """
    model = loaded.model
    try:
        # Eagerly, since compiling takes a minute and only a shape is wanted.
        with preserved(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            output = model.eval()(images[:2])
    except Exception as error:  # any network may fail in its own way
        how = "That shape is a guess; say" if loaded.guessed else "Say"
        raise ValueError(
            f"doctor: {loaded.name} can't read a batch of shape {_by(tuple(images[:2].shape))}: {reason(error)}. "
            f"{how} the shape of one input with --input-size, for instance 3x32x32."
        ) from error
    return output.shape[1] if isinstance(output, Tensor) and output.dim() == 2 else None
