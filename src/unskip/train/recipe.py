"""Recipe: everything that decides how a network is trained, in four sections, and the recipes that have a name.

A named recipe is a TOML file in `unskip/recipes/`, with its command, hardware, time and expected score at its head, and
a table for each section. Names of fields are unique, so that each can be overridden by its name alone, on the command
line (`--lr 0.05`) as from Python (`recipe.replace(lr=0.05)`).
"""

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from unskip._core.config import OLD, BelowOne, Free, NonNegative, Positive, Range, Section, bare, kinds, parse, to_toml
from unskip._core.text import nearest
from unskip.data.config import DataConfig
from unskip.data.sets import find_kind
from unskip.models.build import NetworkConfig

Loss = Literal["cross_entropy", "binary"]
Schedule = Literal["cosine", "steps", "constant"]
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Compile = Literal["no", "blocks", "whole"]
DecayFrom = Literal["zero", "identity", "start"]
MAX_EPOCHS = 1_000_000  # more than that is a slip
WeightBits = Annotated[int, Range(lambda value: value == 0 or 2 <= value <= 8, "0, or 2 to 8 bits")]
Epochs = Annotated[int, Range(lambda value: 1 <= value <= MAX_EPOCHS, f"1 to {MAX_EPOCHS:,}")]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The loss, the update, and its penalties and constraints."""

    loss: Loss = "cross_entropy"  # binary: a sigmoid and a yes or no for each class (timm's BCE)
    smoothing: BelowOne = 0.0  # of labels
    optimizer: str = "sgd"  # any name of timm.optim; muon: for hidden matrices, and AdamW for the rest
    lr: Positive[float] = 0.1  # peak learning rate, for the whole batch
    momentum: BelowOne = 0.9  # of SGD and Muon; the first beta of Adam's family
    beta2: BelowOne = 0.999  # the second beta of Adam's family, also of AdamW beside Muon
    eps: Positive[float] = 1e-8  # Adam's and AdamW's, added to the root of the second moment
    nesterov: bool = False  # Nesterov's momentum, for SGD and Muon
    weight_decay: NonNegative[float] = 5e-4  # not on norms and biases, unless decay_all
    decay_all: bool = False  # norms and biases decay too, as in the papers' CIFAR recipes
    lr_scales: dict[str, NonNegative[float]] = field(default_factory=dict)  # factors on it by parameter name; 0 freezes
    clip: NonNegative[float] = 0.0  # largest norm of the whole gradient; 0 is off
    schedule: Schedule = "cosine"  # of the learning rate: to min_lr, in steps at milestones, or none
    warmup_epochs: NonNegative[float] = 0.0  # linear, from warmup_lr; they count among `epochs`
    warmup_lr: NonNegative[float] = 0.0  # where the warm-up starts
    min_lr: NonNegative[float] = 0.0  # where the cosine ends
    milestones: tuple[int, ...] = ()  # epochs after which schedule = "steps" multiplies the rate by `gamma`
    gamma: Positive[float] = 0.1  # factor at each milestone
    max_norm: NonNegative[float] = 0.0  # largest norm of a unit's incoming weights (Oyedotun et al. 2020, VI.C); 0: off
    orthogonal: NonNegative[float] = 0.0  # η of orthogonal regularisation (Hu, B.2); 0 is off
    decay_from: DecayFrom = "zero"  # what weight decay pulls to: 0, the identity (Yu and Tomasi 2019, 4.1), the start
    ema: BelowOne = 0.0  # decay of the average of the weights that is tested; 0 is off

    def __post_init__(self) -> None:
        super().__post_init__()
        peak = math.log10(self.lr * max([1.0, *self.lr_scales.values()]))
        if peak + len(self.milestones) * max(0.0, math.log10(self.gamma)) > 38:
            raise ValueError(
                f"recipe: lr={self.lr:g}, lr_scales and gamma={self.gamma:g} at {len(self.milestones)} milestones make "
                "a learning rate above 1e38, which float32 does not hold. Lower them."
            )
        if min(self.milestones, default=1) < 1 or list(self.milestones) != sorted(self.milestones):
            raise ValueError(f"recipe: milestones={[*self.milestones]} must be epochs from 1 on, the earliest first.")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """How long, on which machine and how exactly; what is kept and written."""

    batch: Positive[int] = 128  # images in an update, over all processes
    epochs: Epochs = 10  # times that the training images are gone through
    precision: Precision = "fp32"  # bf16 and fp16: mixed with fp32
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU where there is one
    channels_last: bool = True  # memory format of images and convolutions, on CPUs too
    compile: Compile = "no"  # torch.compile of each block, or of the whole network
    cuda_graph: bool = False  # a whole update as one CUDA graph (one GPU)
    sync_bn: bool = False  # batch statistics over all GPUs
    deterministic: bool = False  # the same losses twice, also on a GPU
    seed: NonNegative[int] = 0  # of weights, order and augmentation; the validation split is the same for all seeds
    quantize: WeightBits = 0  # bits of weights in quantisation-aware training: 7 or 8, as in the INT8 file; 0: off
    keep: Literal["last", "best"] = "last"  # which weights are tested: the last, or the best on validation
    recalibrate_batchnorm: NonNegative[int] = 0  # training images, as one batch, for BatchNorm at the end; 0: off
    save_steps: Free[NonNegative[int]] = 0  # updates between checkpoints, besides the end of each epoch
    save_seconds: Free[NonNegative[float]] = 0.0  # at least so long between checkpoints at the ends of epochs
    log_steps: Free[Positive[int]] = 20  # updates between looks at the loss, which wait for the GPU
    tensorboard: Free[bool] = False  # writes OUT/tensorboard besides metrics.jsonl
    wandb: Free[bool] = False  # writes to Weights & Biases, project 'unskip', besides metrics.jsonl

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recalibrate_batchnorm == 1:
            raise ValueError("recipe: recalibrate_batchnorm=1 is one image, which has no variance; 0 switches it off.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a network. `Recipe.of` and `replace` take the fields of all sections by name."""

    network: NetworkConfig = field(default_factory=NetworkConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(f"recipe: {name}={value!r} must be a {kind.__name__}; Recipe.of takes fields by name.")
        warmup, epochs = self.optimizer.warmup_epochs, self.run.epochs
        if warmup > epochs:
            raise ValueError(f"recipe: warmup_epochs={warmup} must be at most epochs={epochs}; set it too, 0 is none.")
        if self.data.mixes and self.run.batch % 2:
            raise ValueError(f"recipe: batch={self.run.batch} must be even with mixup or cutmix, which pair images.")
        if self.run.keep == "best" and not self.data.val_fraction:
            raise ValueError("recipe: keep='best' chooses on validation images; set val_fraction above 0.")

    @classmethod
    def of(cls, **fields: Any) -> "Recipe":
        """A recipe from fields of any section: `Recipe.of(model="resnet20", lr=0.05)`."""
        return cls().replace(**fields)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], where: str = "recipe") -> "Recipe":
        """A recipe from the tables of a TOML file or a checkpoint, `where`."""
        for name, values in tables.items():
            if name in (*FIELDS, *RENAMED) and not isinstance(values, Mapping):
                raise ValueError(f"{where}: {name!r} stands outside the tables. {OLD}")
            if name not in SECTIONS:
                raise ValueError(f"{where}: there is no table [{name}].{nearest(name, list(SECTIONS))}")
        sections: dict[str, Any] = {k: kind.from_tables(tables, k, where) for k, kind in SECTIONS.items()}
        return cls(**sections)

    def replace(self, **changes: Any) -> "Recipe":
        """The same recipe with some fields changed. An unknown name is refused with the nearest known one."""
        by_section: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            if name not in FIELDS:
                raise ValueError(f"recipe: there is no field {name!r}.{_nearest(name)}")
            by_section.setdefault(FIELDS[name], {})[name] = value
        return dataclasses.replace(
            self, **{name: dataclasses.replace(getattr(self, name), **new) for name, new in by_section.items()}
        )

    @property
    def doctor(self) -> str:
        """The command that looks into the recipe's network."""
        method = f" --method {self.network.method}" if self.network.method else ""
        return f"unskip doctor {self.network.model}{method}"

    @property
    def feeding(self) -> dict[str, Any]:
        """What `unskip.data.feed.make_feed` asks for besides the section `data`."""
        settings = {name: getattr(self.run, name) for name in ("batch", "seed", "channels_last")}
        return {**settings, "smoothing": self.optimizer.smoothing}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The tables, in plain values."""
        return {name: getattr(self, name).as_dict() for name in SECTIONS}

    def flat(self) -> dict[str, Any]:
        """All fields by name, in plain values."""
        return {name: value for table in self.as_dict().values() for name, value in table.items()}

    def to_toml(self) -> str:
        """The recipe as a file that `load_recipe` reads."""
        text = ""
        for name, table in self.as_dict().items():
            text += f"\n[{name}]\n" + "".join(f"{key} = {to_toml(value)}\n" for key, value in table.items())
        return text.lstrip()

    def same_numbers(self) -> dict[str, Any]:
        """The fields that change a number: what a continued run must share with the run it continues."""
        fields = {name: kind for section in SECTIONS.values() for name, kind in kinds(section).items()}
        return {k: v for k, v in self.flat().items() if "free" not in getattr(fields[k], "__metadata__", ())}


SECTIONS: dict[str, type[Section]] = {field.name: field.type for field in dataclasses.fields(Recipe)}  # type: ignore[misc]
FIELDS = {name: section for section, kind in SECTIONS.items() for name in kinds(kind)}  # where each field stands
RENAMED = {"network": "model", "settle": "recalibrate_batchnorm"}


OPTIONS = ("data", "out", "resume", "take_over", "show", "list")  # of the command, beside the fields


def _nearest(name: str, others: Sequence[str] = ()) -> str:
    return f" It is {RENAMED[name]!r} now." if name in RENAMED else nearest(name, [*FIELDS, *others])


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
    if path.exists() and not path.is_file():
        raise ValueError(f"recipe: {path} can't be read: it is no file.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe: {path} can't be read: {error}.") from error


def load_recipe(name: str | Path, **changes: Any) -> Recipe:
    """A recipe by name or path, with some fields changed."""
    text = recipe_text(name)
    try:
        tables = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"recipe: {name} is not valid TOML: {error}.") from error
    except RecursionError as error:
        raise ValueError(f"recipe: {name} is nested too deep for a recipe, which has tables of fields.") from error
    return Recipe.from_tables(tables, f"recipe: {name}").replace(**changes)


# ---------------------------------------------------------------- from a command line


DEFAULT, DEFAULT_IMAGES = "digits-pnnh-56", "images-pnnh-20-wide"


def parse_command(words: Sequence[str], data: str | None = None) -> tuple[str, Recipe]:
    """`[RECIPE] [--field value ...]`: the name of the run, and its recipe.

    Without a recipe it is one for what lies at `data`: a folder of images is fine-tuned on, another data set is read as
    what it is.
    """
    named = bool(words) and not words[0].startswith("--")
    changes = parse_overrides(words[1:] if named else words)
    name = words[0] if named else DEFAULT
    if not named and data is not None and "dataset" not in changes:
        path = Path(data).expanduser()
        kind = find_kind(path)
        if not path.exists():
            raise ValueError(f"train: --data {data} does not exist.")
        if kind is None:
            raise ValueError(
                f"train: what --data {data} holds is not recognised. Images lie in a folder for each class, at least "
                f"two of them, for instance {data}/cat/*.jpg and {data}/dog/*.jpg. For other data say what they are "
                "with --dataset."
            )
        if kind == "imagefolder":
            name = DEFAULT_IMAGES
            if "model" in changes or "init_from" in changes:
                changes.setdefault("pretrained", False)
        else:
            changes["dataset"] = kind
    return Path(name).stem, load_recipe(name, **changes)


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`--lr 0.05 --val-fraction=0 --cuda-graph` as fields and values. A switch without a value is on.

    Numbers, lists and tables are written as in TOML: `--milestones [120,160]`, `--lr-scales '{"layer3.*" = 0.26}'`.
    """
    changes: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ValueError(f"train: {word!r} was not expected. Fields of the recipe are given as --field value.")
        option, equals, text = word[2:].partition("=")
        name = option.replace("-", "_")
        if name not in FIELDS:
            raise ValueError(f"train: there is no option --{option}.{_nearest(name, OPTIONS)}")
        if name in changes:
            raise ValueError(f"train: --{option} was given twice; give it once.")
        kind = kinds(SECTIONS[FIELDS[name]])[name]
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif bare(kind) is bool:
                text = "true"
            else:
                raise ValueError(f"train: --{option} needs a value.")
        changes[name] = parse(name, text, kind)
    return changes
