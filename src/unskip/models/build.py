"""Networks from a description, as recipes, checkpoints and network files hold it.

A description from a file names registered networks and methods alone: opening a file must run no code that the file
chooses. `allow_import=True`, for what the user has written or typed, also takes `package.module:function`.
"""

import importlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import timm
import torchvision
from torch import Tensor, nn

from unskip._core.config import Section
from unskip._core.text import nearest
from unskip.models.registry import ENTRIES, create_model
from unskip.surgery import plainify

# Options of timm's and torchvision's networks that read other files
LOADING = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
LOADING |= {"weights", "weights_backbone"}


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Section):
    """Which network is built. Its text is a short name: `resnet20`, or `resnet20, pnnh` with a method."""

    model: str = "pnnh_resnet56"  # a name of `unskip models` or timm, torchvision:NAME, or package.module:function; a
    # name may have options, NAME:option=value,..., which go into `options`
    method: str = ""  # plainify the network with this method; '' leaves it as it is
    options: dict[str, Any] = field(default_factory=dict)  # of the network or, where `method` is set, of the method
    pretrained: bool = False  # start from the trained weights that the name has: the package's, timm's, torchvision's
    init_from: str = ""  # start from the weights of a run, a network file or a file of weights

    def __post_init__(self) -> None:
        super().__post_init__()
        name, options = split_options(self.model, "recipe")
        if options and self.method:
            raise ValueError(
                f"recipe: model={self.model!r} has options, and method={self.method!r} is given as well; use "
                f"{name}:method={self.method},... with the options of both."
            )
        object.__setattr__(self, "model", name)
        object.__setattr__(self, "options", {**self.options, **options})
        for option, value in self.options.items():
            if value is None:
                raise ValueError(
                    f"recipe: options[{option!r}]=None can't be written down, since TOML has no such value; leave it "
                    "out, and it is what the network or method makes of that."
                )
        if self.pretrained and self.init_from:
            raise ValueError(
                f"recipe: pretrained=true and init_from={self.init_from!r} both say which weights; leave one out."
            )

    def __str__(self) -> str:
        return f"{self.model}, {self.method}" if self.method else self.model


def is_name(word: str) -> bool:
    """Whether a word is the name of a network of ours, timm or torchvision."""
    return word in ENTRIES or timm.is_model(word.removeprefix("timm:")) or word.startswith("torchvision:")


def split_options(model_spec: str, command: str = "") -> tuple[str, dict[str, Any]]:
    """The name and the options of a spec such as `resnet20:num_classes=100,widths=[12,24,48]`, lists as in TOML."""
    name, colon, rest = model_spec.partition(":")
    if name in ("timm", "torchvision"):
        more, colon, rest = rest.partition(":")
        name = f"{name}:{more}"
    if not colon or not ("=" in rest or (is_name(name) and not is_name(model_spec))):
        return model_spec, {}
    options: dict[str, Any] = {}
    for pair in re.split(r",(?![^\[{]*[\]}])", rest):  # at commas outside of brackets
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(
                f"{command}: {pair!r} in {model_spec!r} must be option=value, for instance num_classes=10."
            )
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Any:
    """The value of an option as TOML reads it; text that is no TOML stays text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def build_network(config: NetworkConfig, *, num_classes: int, in_chans: int, allow_import: bool = False) -> nn.Module:
    """The network that a description names, with fresh weights.

    Args:
        config: the network, its method and options.
        num_classes: width of its output.
        in_chans: channels of the images that it reads.
        allow_import: whether `package.module:function` is imported and called, and options may read other files.
    """
    package, colon, name = config.model.partition(":")
    options: dict[str, Any] = {} if config.method else dict(config.options)
    sizes: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_chans}
    if not allow_import:
        check_harmless(config)
    if not colon:
        network = create_model(config.model, config.pretrained, **sizes, **options)
    elif package == "torchvision":
        network = _torchvision(name, options, **sizes)
        if config.pretrained:
            start_from(network, torchvision.models.get_model(name, weights="DEFAULT").state_dict(), config.model)
    elif config.pretrained:
        raise ValueError(f"recipe: model={config.model!r} has no known trained weights; give them with init_from.")
    else:
        network = import_object(config.model)(**sizes, **options)
    return plainify(network, config.method, **config.options) if config.method else network


def start_from(model: nn.Module, state: Mapping[str, Tensor], where: str) -> str:
    """Loads weights into a model that may have another head; returns a sentence if the head keeps fresh weights.

    Args:
        model: changed in place.
        state: weights by name. Only the first axis of the head's weights may differ, the number of classes.
        where: their origin, for messages.
    """
    own = model.state_dict()
    wrong = [key for key in own if key not in state] + [key for key in state if key not in own]
    head = [key for key in own if key in state and own[key].shape != state[key].shape]
    widths = {(own[key].shape[:1], state[key].shape[:1]) for key in head}
    wrong += [key for key in head if own[key].shape[1:] != state[key].shape[1:] or len(widths) > 1]
    wrong += [key for key in own if key in state and not same_kind(own[key], state[key])]
    if wrong:
        raise ValueError(
            f"train: the weights of {where} are of another network: {len(wrong)} differ, {wrong[0]!r} first. Name the "
            "network that they belong to with --model (and --method)."
        )
    model.load_state_dict({key: own[key] if key in head else value for key, value in state.items()})
    if not head:
        return ""
    ((new, old),) = widths
    return f"the head ({', '.join(head)}) starts anew, for {new[0]} classes where {where} has {old[0]}"


def same_kind(own: Tensor, given: Tensor) -> bool:
    """Whether a weight can take the numbers of another: a complex, sparse or quantised one would lose some."""
    return (own.is_complex(), own.layout, own.is_quantized) == (given.is_complex(), given.layout, given.is_quantized)


def check_harmless(config: NetworkConfig) -> None:
    """Refuses a description that would import code or read other files."""
    package, colon, _ = config.model.partition(":")
    if colon and package != "torchvision":
        raise ValueError(
            f"model={config.model!r} names code, which is not run from a file. A file may name networks of `unskip "
            "models` and of timm, and torchvision:NAME; package.module:function is for the command line and for "
            "recipes that you pass yourself."
        )
    for option in (*config.options, *(name for name in ("pretrained", "init_from") if getattr(config, name))):
        if option in (*LOADING, "init_from"):
            raise ValueError(f"options[{option!r}] would read another file, which a file may not ask for.")


def import_object(spec: str) -> Any:
    """What `package.module:function` names. Importing it runs its code."""
    module, _, path = spec.partition(":")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except Exception as error:  # it is the user's own code, or no name of a module
        raise ValueError(
            f"model={spec!r} can't be imported: {error}. It must be package.module:function, which Python must find; "
            "for the command line the current folder counts."
        ) from error


def _torchvision(name: str, options: dict[str, Any], *, num_classes: int, in_chans: int) -> nn.Module:
    known = torchvision.models.list_models(module=torchvision.models)  # others read the weights of their backbones
    if name not in known:
        raise ValueError(f"model='torchvision:{name}': torchvision has no network {name!r}.{nearest(name, known)}")
    if in_chans != 3:
        raise ValueError(
            f"model='torchvision:{name}' reads images of 3 channels, and these have {in_chans}. timm's networks read "
            "any number."
        )
    return torchvision.models.get_model(name, **{"weights": None, "num_classes": num_classes, **options})
