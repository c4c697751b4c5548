"""Recipe: everything that decides how a network is trained, as one frozen dataclass, and the recipes that have a name.

A named recipe is a TOML file in `unskip/recipes/`, with its command, hardware, time and expected score at its head.
Each field can be overridden, on the command line (`--lr 0.05`) as from Python (`recipe.replace(lr=0.05)`).
"""

import contextlib
import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from unskip._core.text import nearest

Dataset = Literal["digits", "cifar10", "cifar100", "fashion_mnist", "imagefolder", "npz"]
Crop = Literal["none", "pad", "resized"]
Loss = Literal["cross_entropy", "binary"]
Schedule = Literal["cosine", "steps", "constant"]
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Compile = Literal["no", "blocks", "whole"]
DecayFrom = Literal["zero", "identity", "start"]

FREE = {"free": True}  # a field that may differ between a run and its continuation, since it changes no number


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a network. Only `network` and `dataset` say on what; everything else has an ordinary default."""

    # The network
    network: str = "pnnh_resnet56"  # a name of `unskip models` or of timm, or package.module:function of your own
    method: str = ""  # plainify the network with this method; '' leaves it as it is
    options: dict[str, Any] = field(default_factory=dict)  # of the network or, where `method` is set, of the method

    # The data
    dataset: Dataset = "digits"  # what is read, and how `--data` is laid out (unskip.data.sets)
    val_fraction: float = 0.1  # of the training images, held out for choosing; 0 holds none out
    image_size: int = 0  # px, what images are brought to; 0: as they come (imagefolder: 224)
    test_crop: float = 0.875  # imagefolder: the centre crop's share of the resized image's side when testing
    check_files: bool = field(default=True, metadata=FREE)  # imagefolder: decode each file once before the first step
    cache_gib: float = field(default=8.0, metadata=FREE)  # GiB, the largest set that is held on the device as uint8

    # What happens to training images
    crop: Crop = "none"  # pad: zeros around, then a random crop; resized: a random area and aspect ratio (Inception)
    pad: int = 4  # px of zeros on each side, for crop = "pad"
    crop_scale: float = 0.08  # smallest share of the area, for crop = "resized"
    flip: float = 0.0  # probability of a mirror image
    color_jitter: float = 0.0  # strength of random brightness, contrast and saturation
    rand_augment: str = ""  # timm's RandAugment, for instance "rand-m9-mstd0.5-inc1"; '' is off
    erase: float = 0.0  # probability of random erasing (timm, filled with noise)
    mixup: float = 0.0  # alpha of timm's mixup
    cutmix: float = 0.0  # alpha of timm's cutmix
    mix_prob: float = 1.0  # probability that a batch is mixed, where mixup or cutmix is on
    repeats: int = 1  # of each image in an epoch (repeated augmentation); an epoch stays as long as it is

    # The loss and the update
    loss: Loss = "cross_entropy"  # binary: a sigmoid and a yes or no for each class (timm's BCE)
    smoothing: float = 0.0  # of labels
    optimizer: str = "sgd"  # any name of timm.optim
    lr: float = 0.1  # peak learning rate, for the whole batch
    momentum: float = 0.9  # of SGD; the first beta of Adam's family
    nesterov: bool = False  # Nesterov's momentum, for SGD
    weight_decay: float = 5e-4  # not on norms and biases, unless decay_all
    decay_all: bool = False  # norms and biases decay too, as in the papers' CIFAR recipes
    lr_scales: dict[str, float] = field(default_factory=dict)  # factor on the learning rate by parameter name pattern
    clip: float = 0.0  # largest norm of the whole gradient; 0 is off
    batch: int = 128  # images in an update, over all processes
    epochs: int = 10  # times that the training images are gone through
    schedule: Schedule = "cosine"  # of the learning rate: to min_lr, in steps at milestones, or none
    warmup_epochs: float = 0.0  # linear, from warmup_lr; they count among `epochs`
    warmup_lr: float = 0.0  # where the warm-up starts
    min_lr: float = 0.0  # where the cosine ends
    milestones: tuple[int, ...] = ()  # epochs after which schedule = "steps" multiplies the rate by `gamma`
    gamma: float = 0.1  # factor at each milestone

    # Penalties and constraints
    max_norm: float = 0.0  # largest norm of a unit's incoming weights (Oyedotun et al. 2020, VI.C); 0 is off
    orthogonal: float = 0.0  # η of orthogonal regularisation (Hu, B.2); 0 is off
    decay_from: DecayFrom = "zero"  # what weight decay pulls to: 0, the identity (Yu and Tomasi 2019, 4.1), the start
    ema: float = 0.0  # decay of the average of the weights that is tested; 0 is off
    settle: int = 0  # training images, as one batch, on which norms are measured anew at the end; 0: running averages

    # The machine
    precision: Precision = "fp32"  # bf16 and fp16: mixed with fp32
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU where there is one
    channels_last: bool = True  # memory format of images and convolutions, on CPUs too
    compile: Compile = "no"  # torch.compile of each block, or of the whole network
    cuda_graph: bool = False  # a whole update as one CUDA graph (one GPU)
    sync_bn: bool = False  # batch statistics over all GPUs
    deterministic: bool = False  # the same losses twice, also on a GPU
    workers: int = field(default=4, metadata=FREE)  # processes that read and augment, for what is not on the device

    # The run
    seed: int = 0  # of weights, order and augmentation; the validation split is the same for all seeds
    keep: Literal["last", "best"] = "last"  # the weights that are tested at the end: the last or the best on validation
    save_steps: int = field(default=0, metadata=FREE)  # updates between checkpoints, besides the end of each epoch
    log_steps: int = field(default=20, metadata=FREE)  # updates between looks at the loss, which wait for the GPU
    tensorboard: bool = field(default=False, metadata=FREE)  # writes OUT/tensorboard besides metrics.jsonl

    def __post_init__(self) -> None:
        for name, kind in _types().items():
            object.__setattr__(self, name, _checked(name, getattr(self, name), kind))
        for name, (low, high, words) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high or (low == 0 and words == "above 0" and value == 0):
                raise ValueError(f"recipe: {name}={value} must be {words}.")
        for option, value in self.options.items():
            if value is None:
                raise ValueError(
                    f"recipe: options[{option!r}]=None can't be written down, since TOML has no such value; leave it "
                    "out, and it is what the network or method makes of that."
                )
        for pattern, scale in self.lr_scales.items():
            if scale < 0:
                raise ValueError(
                    f"recipe: lr_scales[{pattern!r}]={scale} must not be negative; 0 freezes what matches."
                )
        if min(self.milestones, default=1) < 1 or list(self.milestones) != sorted(self.milestones):
            raise ValueError(
                f"recipe: milestones={list(self.milestones)} must be epochs from 1 on, the earliest first."
            )
        if self.warmup_epochs > self.epochs:
            raise ValueError(
                f"recipe: warmup_epochs={self.warmup_epochs} must be at most epochs={self.epochs}. With so few epochs "
                "set warmup_epochs too; 0 is none."
            )
        if (self.mixup or self.cutmix) and self.batch % 2:
            raise ValueError(f"recipe: batch={self.batch} must be even with mixup or cutmix, which pair its images.")
        if self.settle == 1:
            raise ValueError("recipe: settle=1 is one image, which has no variance; thousands are meant, or 0 for off.")
        if self.keep == "best" and not self.val_fraction:
            raise ValueError("recipe: keep='best' chooses on validation images; set val_fraction above 0.")

    @property
    def network_in_words(self) -> str:
        """The network's name and, where it is plainified first, the method: `resnet20, pnnh`."""
        return f"{self.network}, {self.method}" if self.method else self.network

    def replace(self, **changes: Any) -> "Recipe":
        """The same recipe with some fields changed. An unknown name is refused with the nearest known one."""
        known = list(_types())
        for name in changes:
            if name not in known:
                raise ValueError(f"recipe: there is no field {name!r}.{nearest(name, known)}")
        return dataclasses.replace(self, **changes)

    @property
    def doctor(self) -> str:
        """The command that looks into the recipe's network."""
        return f"unskip doctor {self.network}" + (f" --method {self.method}" if self.method else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain values: numbers, strings, lists and dicts, as TOML, JSON and checkpoints hold them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def to_toml(self) -> str:
        """The recipe as a file that `load_recipe` reads."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in self.as_dict().items())

    def same_numbers(self) -> dict[str, Any]:
        """The fields that change a number: what a continued run must share with the run it continues."""
        free = {f.name for f in dataclasses.fields(self) if f.metadata.get("free")}
        return {name: value for name, value in self.as_dict().items() if name not in free}


INF = float("inf")
RANGES: dict[str, tuple[float, float, str]] = {
    **dict.fromkeys(("lr", "gamma", "cache_gib"), (0, INF, "above 0")),
    **dict.fromkeys(("batch", "epochs", "repeats", "log_steps"), (1, INF, "at least 1")),
    **dict.fromkeys(("flip", "erase", "mix_prob"), (0, 1, "a probability, 0 to 1")),
    **dict.fromkeys(("momentum", "ema", "smoothing", "val_fraction"), (0, 0.99999, "at least 0 and below 1")),
    **dict.fromkeys(("crop_scale", "test_crop"), (0.01, 1, "a share, 0.01 to 1")),
    **dict.fromkeys(
        ("image_size", "pad", "color_jitter", "mixup", "cutmix", "weight_decay", "clip", "warmup_epochs", "warmup_lr",
         "min_lr", "max_norm", "orthogonal", "settle", "workers", "seed", "save_steps"),
        (0, INF, "at least 0"),
    ),
}  # fmt: skip


def _types() -> dict[str, Any]:
    return get_type_hints(Recipe)


def _checked(name: str, value: Any, kind: Any) -> Any:
    """The value of a field if it has the field's type; an int where a float is asked for counts as one."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"recipe: {name}={value!r} is not known.{nearest(str(value), list(args))}")
        return value
    if origin is dict:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: v if args[1] is Any else _checked(f"{name}[{key!r}]", v, args[1]) for key, v in value.items()}
        raise ValueError(f"recipe: {name}={value!r} must be a table, for instance {{layer3 = 0.5}}.")
    if origin is tuple:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(_checked(name, v, args[0]) for v in value)
        raise ValueError(f"recipe: {name}={value!r} must be a list, for instance [120, 160].")
    assert origin not in (Union, UnionType)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not right or (kind is float and value != value):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
        raise ValueError(f"recipe: {name}={value!r} must be {words}.")
    return value


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


# ---------------------------------------------------------------- by name


def recipe_names() -> list[str]:
    """The names of the recipes that come with the package."""
    folder = resources.files("unskip") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def recipe_text(name: str | Path) -> str:
    """The file of a recipe: one that has a name, or a path to a TOML file of yours."""
    if str(name) in recipe_names():
        return (resources.files("unskip") / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    path = Path(name)
    if path.suffix != ".toml":
        raise ValueError(
            f"recipe: there is no recipe named {str(name)!r}.{nearest(str(name), recipe_names())} A recipe of your own "
            "is a TOML file, given by its path."
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe: {path} can't be read: {error}.") from error


def load_recipe(name: str | Path, **changes: Any) -> Recipe:
    """A recipe by name or path, with some fields changed."""
    try:
        values = tomllib.loads(recipe_text(name))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe: {name} is not valid TOML: {error}.") from error
    return Recipe().replace(**{**values, **changes})


# ---------------------------------------------------------------- from a command line


DEFAULT = "digits-pnnh-56"


def parse_command(words: Sequence[str]) -> tuple[str, Recipe]:
    """`[RECIPE] [--field value ...]`: the name of the run, and its recipe."""
    named = bool(words) and not words[0].startswith("--")
    name = words[0] if named else DEFAULT
    return Path(name).stem, load_recipe(name, **parse_overrides(words[1:] if named else words))


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`--lr 0.05 --val-fraction=0 --cuda-graph` as fields and values. A switch without a value is on.

    Numbers, lists and tables are written as in TOML: `--milestones [120,160]`, `--lr-scales '{"layer3.*" = 0.26}'`.
    """
    types = _types()
    changes: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ValueError(f"train: {word!r} was not expected. Fields of the recipe are given as --field value.")
        option, equals, text = word[2:].partition("=")
        name = option.replace("-", "_")
        if name not in types:
            raise ValueError(f"train: there is no option --{option}.{nearest(name, list(types))}")
        if name in changes:
            raise ValueError(f"train: --{option} was given twice; give it once.")
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif types[name] is bool:
                text = "true"
            else:
                raise ValueError(f"train: --{option} needs a value.")
        changes[name] = _parse(name, text, types[name])
    return changes


def _parse(name: str, text: str, kind: Any) -> Any:
    if kind is str or get_origin(kind) is Literal:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if kind is float:  # TOML wants a digit before the point
            with contextlib.suppress(ValueError):
                return float(text)
        return _checked(name, text, kind)  # text where something else is asked for: says what
