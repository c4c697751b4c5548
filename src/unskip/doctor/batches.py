"""A batch that a network can read, of real images where possible."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as transforms

from unskip._core.errors import reason
from unskip._core.modules import preserved
from unskip.data.config import DataConfig
from unskip.data.feed import open_image
from unskip.data.readers import IMAGE_FILES
from unskip.data.sets import DataSet, Split, find_kind, load
from unskip.io.load import LoadedModel, Shape


@dataclass(frozen=True, kw_only=True)
class Batch:
    """An example for a network, with its targets."""

    images: Tensor
    targets: Tensor | None
    description: str  # for the reader of a report


def load_batch(loaded: LoadedModel, data: str | None = None, *, size: int | None = None, seed: int = 0) -> Batch:
    """A batch that the network reads, of real images where possible.

    Args:
        loaded: the network.
        data: 'digits', 'noise', a .npz file, or a folder: CIFAR, Fashion-MNIST, classes of images, or just images. By
            default digits, resized, if the network reads images, and noise otherwise. For a network that reads tokens a
            text (.txt) or 'noise', random tokens, which are the default.
        size: inputs in the batch; 64, or 16 for images above 64 px.
        seed: chooses the images.
    """
    shape = loaded.input_size
    if size is None:
        size = 64 if max(shape) <= 64 or len(shape) < 3 else 16
    if size < 2:
        raise ValueError(f"doctor: --batch-size {size} must be at least 2, since the rules compare inputs.")
    if vocabulary := _vocabulary(loaded.model):
        return _draw_tokens(loaded, data, vocabulary, size, seed)
    image_shape = _image_shape(shape)
    if data is None:
        data = "noise" if image_shape is None else "digits"
    if data == "noise":
        noise = torch.randn(size, *shape, generator=torch.Generator().manual_seed(seed))
        batch = Batch(images=noise, targets=None, description="normal noise")
    elif image_shape is None:
        raise ValueError(
            f"doctor: {loaded.name} reads inputs of shape {_text(shape)}, which no image has. Leave out --data to use "
            "noise, or give unskip.diagnose a batch of your own."
        )
    else:
        batch = _draw_images(_find(data), data, image_shape, size, seed)
    description = f"{batch.description} (a size that was guessed)" if loaded.guessed else batch.description
    # In the type of the first floating-point parameter, which is what the network reads.
    parameters = loaded.model.parameters()
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.get_default_dtype())
    batch = replace(batch, images=batch.images.reshape(size, *shape).to(dtype).contiguous(), description=description)
    classes = _count_classes(loaded, batch.images)
    if batch.targets is not None and (classes is None or int(batch.targets.max()) >= classes):
        return replace(batch, targets=None, description=f"{batch.description}, with random classes")
    return batch


def _vocabulary(model: nn.Module) -> int:
    """How many tokens a network knows whose first layer is an embedding; 0 for any other network."""
    layers = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.Linear | nn.modules.conv._ConvNd))
    first = next(layers, None)
    return first.num_embeddings if isinstance(first, nn.Embedding) else 0


def _draw_tokens(loaded: LoadedModel, data: str | None, vocabulary: int, size: int, seed: int) -> Batch:
    """Tokens (B, T), and those behind them as targets if the network predicts one for each."""
    (length,), generator = loaded.input_size, torch.Generator().manual_seed(seed)
    if data in (None, "noise"):
        rows = torch.randint(vocabulary, (size, length + 1), generator=generator)
        description = "random tokens"
    else:
        root = Path(str(data)).expanduser()
        if not root.exists():
            raise ValueError(
                f"doctor: {loaded.name} reads tokens, and --data {data!r} is no text: there is no such file."
            )
        kind: Any = "bytes" if vocabulary == 256 else "characters"
        text = load(DataConfig(dataset="text", tokens=kind, context=length, val_fraction=0.0), root)
        if text.classes > vocabulary:
            raise ValueError(
                f"doctor: {root} has {text.classes} different {kind}, and {loaded.name} knows {vocabulary}; give "
                f"--num-classes {text.classes}, or another text."
            )
        starts = torch.randint(len(text.train) - length, (size, 1), generator=generator)
        rows = text.train.labels[starts + torch.arange(length + 1)]
        description = f"{kind} of {root.name}"
    ids, following = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    predicts = _output_shape(loaded, ids)[:2] == tuple(ids[:2].shape)
    return Batch(images=ids, targets=following if predicts else None, description=description)


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _image_shape(shape: Shape) -> Shape | None:
    """(C, H, W) of an image that fills an input, None if none does. A vector may be a square image, line by line."""
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
    if kind is None or (kind == "imagefolder" and not (root / "train").is_dir()):  # none of it is kept for testing
        return _image_folder(root)
    return load(DataConfig(dataset=kind, val_fraction=0.0, check_files=False), root)


def _image_folder(root: Path) -> DataSet:
    """A folder of images: its subfolders are classes, if it has any."""
    files = sorted(p for p in root.rglob("*") if p.suffix.lower() in IMAGE_FILES)
    if len(files) < 2:
        raise ValueError(
            f"doctor: {root} has {len(files)} images ({', '.join(IMAGE_FILES)}) in it and its subfolders; at least two "
            "are needed."
        )
    folders = [p.relative_to(root).parent.parts[:1] for p in files]
    classes = sorted(set(folders))
    known = len(classes) > 1 and () not in classes
    split = Split(files, torch.tensor([classes.index(folder) if known else -1 for folder in folders]))
    return DataSet(
        name="images",
        train=split,
        val=None,
        test=split,
        classes=len(classes) if known else 0,
        channels=3,
        image_size=0,
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
    )


def _draw_images(data: DataSet, spec: str, shape: Shape, size: int, seed: int) -> Batch:
    """Images of a data set, (B, C, H, W), resized to the shape and normalised as for training."""
    if len(data.train) < size:
        raise ValueError(
            f"doctor: --batch-size {size} is more than the {len(data.train)} images of --data {spec!r}; lower it."
        )
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))[:size]
    split = data.train.take(order)
    if isinstance(split.images, Tensor):
        pixels = [image.permute(2, 0, 1) for image in split.images]
    else:
        pixels = [transforms.pil_to_tensor(open_image(split, i)) for i in range(size)]
    images = torch.stack([_fit(image.float() / 255, shape[1:]) for image in pixels])
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std))
    images = (images - mean) / std
    if images.shape[1] == 1:
        images = images.expand(-1, shape[0], -1, -1)
    elif shape[0] == 1:
        images = images[:, :3].mean(1, keepdim=True)
    elif images.shape[1] != shape[0]:
        raise ValueError(f"doctor: the images of --data {spec!r} have {images.shape[1]} channels, not {shape[0]}.")
    resized = "" if pixels[0].shape[1:] == shape[1:] else f", resized to {shape[1]} x {shape[2]} px"
    source = "scikit-learn's digits" if data.name == "digits" else f"images of {spec}"
    return Batch(images=images, targets=split.labels if data.classes else None, description=source + resized)


def _fit(image: Tensor, size: Shape) -> Tensor:
    """The largest central part of an image with the right proportions, at the right size."""
    scale = min(image.shape[1] / size[0], image.shape[2] / size[1])
    part = transforms.center_crop(image, [round(side * scale) for side in size])
    fitted: Tensor = transforms.resize(part, list(size), antialias=True)
    return fitted


def _count_classes(loaded: LoadedModel, images: Tensor) -> int | None:
    """The number of classes of a network, None if its output is not (B, classes)."""
    shape = _output_shape(loaded, images)
    return shape[1] if len(shape) == 2 else None


def _output_shape(loaded: LoadedModel, images: Tensor) -> tuple[int, ...]:
    """The shape of what a network returns for two inputs, () if that is no tensor. Refuses one that can't read them."""
    model = loaded.model
    try:
        # Eagerly, since compiling takes a minute and only a shape is wanted.
        with preserved(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            output = model.eval()(images[:2])
    except Exception as error:  # any network may fail in its own way
        how = "That shape is a guess; say" if loaded.guessed else "Say"
        raise ValueError(
            f"doctor: {loaded.name} can't read a batch of shape {_text(tuple(images[:2].shape))}: {reason(error)}. "
            f"{how} the shape of one input with --input-size, for instance 3x32x32."
        ) from error
    return tuple(output.shape) if isinstance(output, Tensor) else ()
