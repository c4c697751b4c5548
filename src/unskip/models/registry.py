"""Networks by name, in one registry that timm shares.

`register_backbone` names a residual network `x` and its skip-free versions `plain_x`, `pnnh_x`, ...; `register_network`
names one that is built as it is (SeqNet, PlainNet, the simplified networks).
"""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import timm
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn

from unskip._core.text import nearest
from unskip.methods import method_options
from unskip.models import weights
from unskip.surgery.plainify import plainify

Build = Callable[..., nn.Module]
TIMM_OPTIONS = (
    "num_classes", "in_chans", "drop_rate", "drop_path_rate", "global_pool", "features_only", "out_indices",
)  # fmt: skip
SKIP_FREE = ("plain", "pnnh")  # the methods that every backbone has a name for
RIVALS = ("dirac", "iso", "delta_tanh", "looks_linear")  # those that a handful of backbones have a name for
MAX_UNCROPPED = 32  # px: images up to this size are tested as they are, without timm's resizing and centre crop
CFG_FIELDS = (  # of an entry, for timm
    "num_classes", "input_size", "pool_size", "fixed_input_size", "mean", "std", "first_conv", "classifier",
)  # fmt: skip

ENTRIES: dict[str, "Entry"] = {}


class UnknownArgumentError(ValueError, TypeError):
    """An argument that a network does not have. timm's users expect a TypeError, ours a ValueError."""


default_cfgs: dict[str, dict[str, Any]] = {}  # timm reads it from the module of an entry point


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered name, known to timm too."""

    name: str
    builder: Build  # takes timm's arguments and its own `options`
    family: str  # networks that are built alike share it
    input_size: tuple[int, ...]  # channels, height and width of an image; the length of a text
    num_classes: int  # width of the head unless the user says otherwise
    first_conv: str  # path of the layer that reads the image
    classifier: str  # path of the head
    pool_size: tuple[int, int] | None = None  # height and width of the last feature map; None where there is none
    fixed_input_size: bool = False  # whether it reads images of `input_size` alone
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN  # of the images' channels, for normalising
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    method: str | None = None  # makes what the builder returns skip-free; None leaves it as it is
    presets: Mapping[str, Any] = field(default_factory=dict)  # options of the method that are not its defaults
    options: tuple[str, ...] = ()  # the builder's own arguments beside timm's
    paper_params: float | None = None  # millions, as the network's paper prints it
    feature_cfg: Mapping[str, Any] = field(default_factory=dict)  # how timm takes feature maps from it
    reads: Literal["images", "tokens"] = "images"  # tokens: numbers of characters or bytes
    feature_maps: bool = True  # False: fully connected, so there are none, and features_only is refused

    def example(self, batch: int = 1) -> Tensor:
        """A batch of random inputs."""
        if self.reads == "tokens":
            return torch.randint(self.num_classes, (batch, *self.input_size))
        return torch.randn(batch, *self.input_size)

    def build(
        self, pretrained: bool = False, device: Any = None, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> nn.Module:
        """The network, on timm's `device` and in timm's `dtype`."""
        with torch.device("meta") if str(device) == "meta" else nullcontext():
            network = self._build(pretrained, **kwargs)
        return network.to(device=device, dtype=dtype) if device or dtype else network

    def _build(self, pretrained: bool, **kwargs: Any) -> nn.Module:
        if kwargs.get("features_only") and not self.feature_maps:
            raise ValueError(
                f"create_model: {self.name!r} has no feature maps of images (features_only=True). Take "
                "its last layer with forward_features, or hook the layers you want."
            )
        known = [] if self.method is None else ["attention", *method_options(self.method)]
        if pretrained:
            overlay = self._weights([name for name in kwargs if name in (*known, *self.options)], **kwargs)
            kwargs["pretrained_cfg_overlay"] = overlay
        options = {**self.presets} | {name: kwargs.pop(name) for name in list(kwargs) if name in known}

        def build(**builder_kwargs: Any) -> nn.Module:
            network = self.builder(**builder_kwargs)
            return network if self.method is None else plainify(network, self.method, **options)

        try:
            return build_model_with_cfg(
                build, self.name, pretrained=pretrained, feature_cfg=dict(self.feature_cfg), **kwargs
            )
        except TypeError as error:
            wrong = unexpected(error, kwargs)
            if not wrong:
                raise
        known = list(dict.fromkeys([*TIMM_OPTIONS, *known, *self.options]))
        raise UnknownArgumentError(f"create_model: {self.name!r} has no argument {wrong!r}.{nearest(wrong, known)}")

    def _weights(
        self,
        changed: list[str],
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Where trained weights lie, as timm's overlay: the package's, unless the user says otherwise."""
        ours = weights.pretrained_cfg(self.name)
        if not ours and pretrained_cfg is None and not pretrained_cfg_overlay:
            there = weights.names_with_weights()
            raise ValueError(
                f"create_model: {self.name!r} has no pretrained weights (pretrained=True); "
                f"{'these have: ' + ', '.join(there) if there else 'no name has any yet'}. Build it with "
                "pretrained=False and train it, or load weights of your own with load_state_dict."
            )
        if changed:
            raise ValueError(
                f"create_model: the pretrained weights of {self.name!r} belong to it as it is, and "
                f"{', '.join(changed)} would make another network. Leave that out, or pretrained=True."
            )
        return {**ours, **(pretrained_cfg_overlay or {})}


def unexpected(error: TypeError, arguments: Collection[str]) -> str:
    """The argument among `arguments` that a TypeError calls unexpected; '' if the error is about something else."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if found is not None and found[1] in arguments else ""


def register_network(name: str, builder: Build, **about: Any) -> None:
    """Makes a name known to us and to timm. `about` has the other fields of `Entry`."""
    entry = ENTRIES[name] = Entry(name=name, builder=builder, **about)
    default_cfgs[name] = {key: getattr(entry, key) for key in CFG_FIELDS} | weights.pretrained_cfg(name)
    if entry.reads == "tokens":
        default_cfgs[name]["input_size"] = (1, 1, *entry.input_size)  # timm knows images alone
    elif entry.input_size[-1] <= MAX_UNCROPPED:
        default_cfgs[name]["crop_pct"] = 1.0

    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return entry.build(pretrained, **kwargs)

    build.__name__ = build.__qualname__ = name
    globals()[name] = register_model(build)


def register_backbone(
    name: str,
    builder: Build,
    *,
    residual: bool = False,
    methods: tuple[str, ...] = SKIP_FREE,
    paper: Mapping[str, float] | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    **about: Any,
) -> None:
    """Registers a backbone's skip-free names and, if `residual`, its own (timm has the other ones already).

    Args:
        name: of the backbone.
        builder: builds the residual network.
        residual: whether the residual network gets a name too.
        methods: the methods to name, `method_backbone` each.
        paper: parameters that Zhang et al. 2024 prints, in millions, by method ('residual', 'plain', 'pnnh', 'dirac').
        presets: options of a method, by method, where its name means others than its defaults.
        about: the other fields of `Entry`.
    """
    for method in (None, *methods) if residual else methods:
        register_network(
            name if method is None else f"{method}_{name}",
            builder,
            method=method,
            paper_params=(paper or {}).get(method or "residual"),
            presets=(presets or {}).get(method or "", {}),
            **about,
        )


def create_model(name: str, pretrained: bool = False, *, method: str = "", **kwargs: Any) -> nn.Module:
    """A network by name: one of `unskip models`, or any of timm's.

    Keyword arguments are timm's (num_classes, in_chans, features_only, drop_path_rate, ...) and, for a name that begins
    with a method, that method's options: for a `pnnh_` name those of `unskip.methods.PNNH`. `method` makes any other
    network skip-free with that method, whose options are then taken too. `pretrained=True` loads the weights that come
    with the package, for names that have some; `network.pretrained_cfg["description"]` says how good they are.

    Example:
        >>> net = unskip.create_model("pnnh_resnet20", num_classes=100, in_chans=1, ratio=0.25)
        >>> net(torch.zeros(2, 1, 32, 32)).shape  # (B, C, H, W) -> (B, classes)
        torch.Size([2, 100])
    """
    if not isinstance(name, str):
        raise ValueError(f"create_model: name={name!r} must be text, for instance 'pnnh_resnet110'.")
    if name not in ENTRIES and not timm.is_model(name):
        raise ValueError(
            f"create_model: there is no network named {name!r}.{nearest(name, list(ENTRIES))} "
            "`unskip models` lists them."
        )
    if method:
        known = ["attention", *method_options(method)]
        options = {option: kwargs.pop(option) for option in list(kwargs) if option in known}
        return plainify(create_model(name, pretrained, **kwargs), method, **options)
    try:
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    except UnknownArgumentError:
        raise
    except TypeError as error:
        wrong = unexpected(error, kwargs)
        if not wrong:
            raise
    raise ValueError(f"create_model: {name!r}, which timm builds, has no argument {wrong!r}; leave it out.")
