"""A network from a word of the command line, and a batch that it can read."""

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.methods.registry import nearest
from unskip.models import ENTRIES, create_model
from unskip.surgery import plainify
from unskip.train.checkpoint import FORMAT, read_torch_file
from unskip.train.recipe import Recipe
from unskip.train.rng import seeded
from unskip.train.runner import build_network
from unskip.train.sets import IMAGE_FILES, DataSet, Split, load

Shape = tuple[int, ...]
WEIGHT_FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
NATIVE = {"digits": (1, 8), "cifar10": (3, 32), "cifar100": (3, 32), "fashion_mnist": (1, 28), "imagefolder": (3, 224)}
GUESSED_SIDE = 32  # px, of images for a convolutional network that does not say what it reads
GUESSED_STEPS = 32  # of a sequence, likewise
WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before a weight's name


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network to look at."""

    name: str
    network: nn.Module
    input_size: Shape  # of one input, without the batch
    guessed: bool = False  # whether nobody said the input size


def load_network(
    word: str, *, method: str = "", weights: Path | None = None, input_size: Shape | None = None, seed: int = 0
) -> Subject:
    """A network by name, factory or checkpoint.

    Args:
        word: a name of `unskip models` or of timm, `torchvision:NAME`, `package.module:function`, or a checkpoint (or
            the folder) of a run of `unskip train`.
        method: makes the network skip-free with this method.
        weights: a file with a state dict for it.
        input_size: of one input; without it what the network says about itself, or a guess.
        seed: of its weights.
    """
    subject = _build(word, seed)
    if method:
        with seeded(seed, 1):  # not the numbers that the stem has been drawn from
            network = plainify(subject.network, method)
        subject = replace(subject, name=f"{subject.name}, {method}", network=network)
    if weights is not None:
        _load_weights(subject.network, _state_dict(weights), weights, word)
    if input_size is not None:
        return replace(subject, input_size=input_size, guessed=False)
    if not subject.input_size:
        raise ValueError(
            f"doctor: {word!r} does not say what it reads, and its first layer does not tell. Say the shape of one "
            "input with --input-size, for instance 3x32x32; a network that reads token numbers or several tensors can "
            "be looked at from Python, with unskip.diagnose(net, batch)."
        )
    return subject


def _build(word: str, seed: int) -> Subject:
    path = Path(word).expanduser()
    if path.is_dir() and (path / "checkpoint.pt").is_file():
        return _from_run(path / "checkpoint.pt")
    if path.is_file():
        return _from_run(path)
    if path.suffix in WEIGHT_FILES or "/" in word:
        raise ValueError(f"doctor: there is no file {word!r}.")
    if ":" in word:
        return _from_factory(word, seed)
    with seeded(seed):
        network = create_model(word)
    if word in ENTRIES:
        return Subject(name=word, network=network, input_size=ENTRIES[word].input_size)
    return Subject(name=word, network=network, input_size=_timm_size(network) or ())


def _timm_size(network: nn.Module) -> Shape | None:
    about = getattr(network, "pretrained_cfg", None)
    size = about.get("input_size") if isinstance(about, dict) else None
    return tuple(size) if size else None


def _from_factory(word: str, seed: int) -> Subject:
    """`torchvision:NAME` or `package.module:function`."""
    module_name, _, name = word.partition(":")
    if module_name == "torchvision":
        known = torchvision.models.list_models()
        if name not in known:
            raise ValueError(f"doctor: torchvision has no network {name!r}.{nearest(name, known)}")
        with seeded(seed):
            network = torchvision.models.get_model(name, weights=None)
        transforms = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        side = getattr(transforms, "crop_size", [224])[0]
        return Subject(name=f"torchvision {name}", network=network, input_size=(3, side, side))
    try:
        build: Any = importlib.import_module(module_name)
        for part in name.split("."):
            build = getattr(build, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"doctor: {word!r} can't be imported: {error}. It must be package.module:function, found from here (the "
            "current folder counts), and the function must take no argument."
        ) from error
    with seeded(seed):  # after the import, which may draw numbers of its own
        network = build if isinstance(build, nn.Module) else _call(build, word)
    if not isinstance(network, nn.Module):
        raise ValueError(f"doctor: {word!r} gave {type(network).__name__!r}, not an nn.Module.")
    if network.__class__.__module__.startswith("torchvision.models."):
        return Subject(name=word, network=network, input_size=(3, 224, 224), guessed=True)
    size = _timm_size(network)
    if size is not None:
        return Subject(name=word, network=network, input_size=size)
    return Subject(name=word, network=network, input_size=_guess(network), guessed=True)


def _call(build: Callable[[], Any], word: str) -> Any:
    try:
        return build()
    except Exception as error:  # it is the user's own code
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"doctor: {word!r} failed when it was called without arguments: {reason}.") from error


def _guess(network: nn.Module) -> Shape:
    """What the first layer with weights would read; () where it does not tell."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            return (module.in_channels, GUESSED_SIDE, GUESSED_SIDE)
        if isinstance(module, nn.Conv1d):
            return (module.in_channels, GUESSED_STEPS)
        if isinstance(module, nn.Linear):
            return (module.in_features,)
        if isinstance(module, nn.RNNBase):
            return (GUESSED_STEPS, module.input_size)
        if next(module.parameters(recurse=False), None) is not None:
            return ()
    return ()


# ---------------------------------------------------------------- checkpoints


def _from_run(path: Path) -> Subject:
    """The network of a run of `unskip train`, with the weights that it has reached."""
    way_out = "To look at other weights name their network, and give the file with --weights."
    if path.suffix == ".safetensors":
        raise ValueError(f"doctor: {path} holds weights alone, and does not say of which network. {way_out}")
    state = read_torch_file(path, command="doctor", way_out=way_out)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"doctor: {path} is no checkpoint of `unskip train`. {way_out}")
    recipe = Recipe().replace(**state["recipe"])
    channels, side = NATIVE.get(recipe.dataset, (3, 0))
    weights = state["network"]
    reads = next((tensor.shape[1] for tensor in weights.values() if tensor.dim() == 4), channels)
    with seeded(recipe.seed):
        network = build_network(recipe, _sizes(recipe, state["data"]["classes"], reads))
    _load_weights(network, weights, path, recipe.network)
    side = recipe.image_size or side or GUESSED_SIDE
    return Subject(
        name=f"{recipe.network} of {path.parent.name or path}",
        network=network,
        input_size=(reads, side, side),
        guessed=not recipe.image_size and recipe.dataset not in NATIVE,
    )


def _sizes(recipe: Recipe, classes: int, channels: int) -> DataSet:
    """A data set without images: what a network's builder needs to know."""
    none = Split([], torch.empty(0, dtype=torch.int64))
    return DataSet(
        name=recipe.dataset, train=none, val=None, test=none, classes=classes, channels=channels,
        image_size=recipe.image_size, mean=(), std=(),
    )  # fmt: skip


def _state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a file: a state dict, or one inside what a training script has saved."""
    way_out = (
        "A file of weights is a state dict, saved with torch.save(net.state_dict(), path) or as safetensors; a whole "
        "network that was pickled is code, and is not run."
    )
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"doctor: {path} can't be read as safetensors: {error}. {way_out}") from error
    state = read_torch_file(path, command="doctor", way_out=way_out)
    for key in ("state_dict", "model_state_dict", "model", "network"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"doctor: {path} holds no state dict. {way_out}")
    return state


def _load_weights(network: nn.Module, state: dict[str, Tensor], path: Path, name: str) -> None:
    state = {_bare(key): value for key, value in state.items()}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        reason = reason if len(reason) < 400 else reason[:400] + " ..."
        raise ValueError(f"doctor: {path} does not fit {name!r}: {reason}") from error


def _bare(key: str) -> str:
    while key.startswith(WRAPPERS):
        key = key.split(".", 1)[1]
    return key


# ---------------------------------------------------------------- a batch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a network is shown."""

    images: Tensor
    targets: Tensor | None
    words: str  # what it is, for the reader of a report


def load_batch(subject: Subject, data: str | None = None, *, size: int | None = None, seed: int = 0) -> Batch:
    """A batch that the network reads, from real images where that is possible.

    Args:
        subject: the network.
        data: 'digits', 'noise', a .npz file, or a folder: CIFAR, Fashion-MNIST, classes of images, or just images.
            Without it digits, brought to the network's size, for whatever reads images, and else noise.
        size: inputs in the batch; 64, or 16 for images above 64 px.
        seed: of which images are taken.
    """
    shape = subject.input_size
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
            f"doctor: {subject.name} reads inputs of shape {_by(shape)}, which no image has. Leave out --data, and it "
            "is shown noise; or give unskip.diagnose a batch of your own."
        )
    else:
        batch = _pictures(_find(data), data, picture, size, seed)
        batch = replace(batch, images=batch.images.reshape(size, *shape))
    outputs = _try_out(subject, batch.images)
    if batch.targets is not None and (outputs is None or int(batch.targets.max()) >= outputs):
        return replace(batch, targets=None, words=f"{batch.words}, with random classes")
    return batch


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
        return load(Recipe(dataset="digits", val_fraction=0.0))
    root = Path(data).expanduser()
    if not root.exists():
        raise ValueError(
            f"doctor: --data {data!r} is neither 'digits' nor 'noise', and there is no such file or folder."
        )
    if root.is_file():
        kind = "npz"
    elif {root.name, *(p.name for p in root.iterdir())} & {"cifar-10-batches-py"}:
        kind = "cifar10"
    elif {root.name, *(p.name for p in root.iterdir())} & {"cifar-100-python"}:
        kind = "cifar100"
    elif next(_idx_files(root), None):
        kind = "fashion_mnist"
    elif (root / "train").is_dir() and (root / "val").is_dir():
        kind = "imagefolder"
    else:
        return _loose(root)
    return load(Recipe(dataset=kind, val_fraction=0.0, check_files=False), root)  # type: ignore[arg-type]


def _idx_files(root: Path) -> Iterator[Path]:
    for folder in (root, root / "raw", root / "FashionMNIST" / "raw"):
        yield from folder.glob("train-images-idx3-ubyte*")


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
        from torchvision.transforms.v2.functional import pil_to_tensor

        from unskip.train.feed import open_image

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


def _try_out(subject: Subject, images: Tensor) -> int | None:
    """The number of classes that the network tells apart, None if its output is something else.

    Refuses a network that does not take the batch.
    """
    network = subject.network
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.no_grad(), seeded(0):
            output = network(images[:2])
    except Exception as error:  # any network may fail in its own way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        how = "That shape is a guess; say" if subject.guessed else "Say"
        raise ValueError(
            f"doctor: {subject.name} can't read a batch of shape {_by(tuple(images[:2].shape))}: {reason}. {how} the "
            "shape of one input with --input-size, for instance 3x32x32."
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    return output.shape[1] if isinstance(output, Tensor) and output.dim() == 2 else None
