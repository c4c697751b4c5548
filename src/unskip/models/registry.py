"""Networks by name, in one registry that timm shares.

`@backbone` names a residual network `x` and its skip-free versions `plain_x`, `pnnh_x`, ...; `@network` names one that
is what it is (SeqNet, PlainNet, the simplified networks).
"""

import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import timm
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_model
from torch import nn

from unskip._core.text import nearest
from unskip.methods import method_options
from unskip.models import weights
from unskip.surgery import plainify

Build = Callable[..., nn.Module]
TIMM_OPTIONS = ("num_classes", "in_chans", "drop_rate", "drop_path_rate", "features_only", "out_indices")
SKIP_FREE = ("plain", "pnnh")  # the methods that every backbone has a name for
RIVALS = ("dirac", "iso", "delta_tanh", "looks_linear")  # those that a handful of backbones have a name for
SHOWN_WHOLE = 32  # px: images up to this size are tested as they are, without timm's resizing and centre crop


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered name."""

    name: str
    family: str
    builder: Build
    method: str | None  # None: what the builder returns, as it is
    input_size: tuple[int, int, int]
    num_classes: int
    paper_params: float | None  # millions, as the network's paper prints it
    options: tuple[str, ...] = ()  # the builder's own arguments beside timm's
    presets: dict[str, Any] = field(default_factory=dict)  # options of the method that are not its defaults
    feature_cfg: dict[str, Any] = field(default_factory=dict)
    feature_maps: bool = True  # False: fully connected, so there are none

    def build(self, pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if kwargs.get("features_only") and not self.feature_maps:
            raise ValueError(
                f"create_model: {self.name!r} is fully connected and has no feature maps (features_only=True). Take "
                "its last layer with forward_features, or hook the layers you want."
            )
        known = [] if self.method is None else method_options(self.method)
        if pretrained:
            overlay = self._weights([name for name in kwargs if name in (*known, *self.options)], **kwargs)
            kwargs["pretrained_cfg_overlay"] = overlay
        options = self.presets | {name: kwargs.pop(name) for name in list(kwargs) if name in known}

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
        raise ValueError(f"create_model: {self.name!r} has no argument {wrong!r}.{nearest(wrong, known)}")

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
    """Which of these arguments Python says that nobody takes; '' where the error is about something else."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return found[1] if found is not None and found[1] in arguments else ""


ENTRIES: dict[str, Entry] = {}


def backbone(
    *,
    residual: bool = False,
    methods: tuple[str, ...] = SKIP_FREE,
    paper: dict[str, float] | None = None,
    presets: dict[str, dict[str, Any]] | None = None,
    name: str = "",
    **about: Any,
) -> Callable[[Build], Build]:
    """Decorator: registers a backbone's skip-free names and, if `residual`, its own (timm has the other ones already).

    Args:
        residual: whether the residual network gets a name too.
        methods: the methods to name, `method_backbone` each.
        paper: parameters that Zhang et al. 2024 prints, in millions, by method ('residual', 'plain', 'pnnh', 'dirac').
        presets: options of a method, by method, where its name means others than its defaults.
        name: of the backbone, where it is not that of the function.
        about: what `network` takes.
    """

    def register(fn: Build) -> Build:
        base = name or fn.__name__
        for method in (None, *methods) if residual else methods:
            full = base if method is None else f"{method}_{base}"
            printed, options = (paper or {}).get(method or "residual"), (presets or {}).get(method or "")
            _register(full, fn, method=method, paper=printed, presets=options, **about)
        return fn

    return register


def network(**about: Any) -> Callable[[Build], Build]:
    """Decorator: registers one network under the name of the function that builds it. Arguments as in `_register`."""

    def register(fn: Build) -> Build:
        _register(fn.__name__, fn, **about)
        return fn

    return register


def _register(
    name: str,
    builder: Build,
    *,
    family: str,
    input_size: tuple[int, int, int],
    num_classes: int,
    first_conv: str,
    classifier: str,
    method: str | None = None,
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN,
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD,
    paper: float | None = None,
    options: tuple[str, ...] = (),
    presets: dict[str, Any] | None = None,
    feature_cfg: dict[str, Any] | None = None,
    feature_maps: bool = True,
) -> None:
    """Makes a name known to us and to timm.

    Args:
        name: the public id.
        builder: builds the network from timm's arguments and its own `options`.
        family: networks that are built alike share it.
        input_size: channels, height and width of an image.
        num_classes: width of the head unless the user says otherwise.
        first_conv: path of the layer that reads the image.
        classifier: path of the head.
        method: the method that makes what the builder returns skip-free, None for none.
        mean: of the images' channels, for normalising.
        std: of the images' channels, for normalising.
        paper: parameters that the network's paper prints, in millions.
        options: names of the builder's own arguments, for the message about a wrong one.
        presets: options of the method where the name means others than its defaults.
        feature_cfg: how timm takes feature maps from it.
        feature_maps: whether there are any; features_only is refused where not.
    """
    module = sys.modules[builder.__module__]
    entry = Entry(
        name=name,
        family=family,
        builder=builder,
        method=method,
        input_size=input_size,
        num_classes=num_classes,
        paper_params=paper,
        options=options,
        presets=presets or {},
        feature_cfg=feature_cfg or {},
        feature_maps=feature_maps,
    )
    ENTRIES[name] = entry
    module.default_cfgs[name] = {  # timm reads it from the module of the entry point
        "num_classes": num_classes,
        "input_size": input_size,
        "mean": mean,
        "std": std,
        "first_conv": first_conv,
        "classifier": classifier,
        **({"crop_pct": 1.0} if input_size[-1] <= SHOWN_WHOLE else {}),
        **weights.pretrained_cfg(name),
    }

    def build(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return entry.build(pretrained, **kwargs)

    build.__name__ = build.__qualname__ = name
    build.__module__ = builder.__module__
    setattr(module, name, register_model(build))


def create_model(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """A network by name: one of `unskip models`, or any of timm's.

    Keyword arguments are timm's (num_classes, in_chans, features_only, drop_path_rate, ...) and, for a name that begins
    with a method, that method's options: for a `pnnh_` name those of `unskip.methods.PNNH`. `pretrained=True` loads the
    weights that come with the package, for names that have some; `network.pretrained_cfg["description"]` says how good
    they are.
    """
    if not isinstance(name, str):
        raise ValueError(f"create_model: name={name!r} must be text, for instance 'pnnh_resnet110'.")
    if name not in ENTRIES and not timm.is_model(name):
        raise ValueError(
            f"create_model: there is no network named {name!r}.{nearest(name, list(ENTRIES))} "
            "`unskip models` lists them."
        )
    try:
        return timm.create_model(name, pretrained=pretrained, **kwargs)
    except TypeError as error:
        wrong = unexpected(error, kwargs)
        if not wrong:
            raise
    raise ValueError(f"create_model: {name!r}, which timm builds, has no argument {wrong!r}; leave it out.")
