"""Layers, norms and gates like those of a block, freshly initialised and at another width."""

import copy
from typing import Any

from timm.layers import LayerScale
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from unskip.methods.pieces import Scale, Shift
from unskip.methods.spec import LAYERS, NORMS, Conv, Layer, Unsupported, conv_arguments, factory, is_activation


def conv_like(stage: Layer, fan_in: int, fan_out: int) -> Conv:
    """A convolution or linear layer like that of a stage, between other widths, with the stage's padding in it."""
    old = stage.conv
    if min(fan_in, fan_out) < 1:
        raise Unsupported("its coder leaves no width for the learner; a smaller ratio does")
    if isinstance(old, nn.Linear):
        return nn.Linear(fan_in, fan_out, bias=old.bias is not None, **factory(old))
    groups = fan_out if stage.depthwise else old.groups
    if (fan_in % groups or fan_out % groups) and not (fan_out % (size := old.out_channels // old.groups)):
        groups = fan_out // size  # as many channels in a group as before
    if fan_in % groups or fan_out % groups:
        raise Unsupported(
            f"its convolution of {groups} groups can't be cut to {fan_in} -> {fan_out} channels, which {groups} does "
            "not divide; another ratio may"
        )
    made = conv_arguments(old)
    if getattr(stage, "pad", ()):
        made["padding"] = tuple(d * (k - 1) // 2 for k, d in zip(old.kernel_size, old.dilation, strict=True))
    return type(old)(fan_in, fan_out, groups=groups, bias=old.bias is not None, **made)


def norm_like(norm: nn.Module, features: int, **factory: Any) -> nn.Module:
    """A fresh norm of the same kind at another width. A norm with an activation in it comes back without."""
    if isinstance(norm, nn.modules.batchnorm._BatchNorm):
        kinds = (nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d)
        kind = next(kind for kind in kinds if isinstance(norm, kind))
        settings = {"eps": norm.eps, "momentum": norm.momentum, "affine": norm.affine}
        return kind(features, track_running_stats=norm.track_running_stats, **settings, **factory)  # type: ignore[arg-type]
    if isinstance(norm, nn.GroupNorm):
        groups = norm.num_groups
        while features % groups:
            groups -= 1
        return nn.GroupNorm(groups, features, eps=norm.eps, affine=norm.affine, **factory)
    raise Unsupported(f"its norm {type(norm).__name__} can't be made at another width")


def fresh(module: nn.Module, old: int, new: int, **factory: Any) -> list[tuple[str, nn.Module]]:
    """Freshly initialised modules, with names, in the place of one that follows a convolution, at another width.

    Gains and shifts are left out: the learner's last convolution has a small scale of its own.
    """
    if isinstance(module, Scale | Shift | LayerScale):
        return []
    if isinstance(module, nn.Dropout):
        return [("drop", nn.Dropout(module.p))]
    if isinstance(module, NORMS):
        act = getattr(module, "act", None)  # timm's BatchNormAct2d
        own = [] if act is None or isinstance(act, nn.Identity) else [("act", copy.deepcopy(act))]
        return [("norm", norm_like(module, new, **factory) if old != new else renewed(module)), *own]
    if is_activation(module):
        return [("act", copy.deepcopy(module))]
    return [("gate", gate_like(module, old, new))]


def renewed(module: nn.Module) -> nn.Module:
    """A freshly initialised copy of a module."""
    new = copy.deepcopy(module)
    for part in new.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()  # type: ignore[operator]
    if isinstance(new, BatchNormAct2d):
        new.act, new.drop = nn.Identity(), nn.Identity()
    return new


def gate_like(gate: nn.Module, old: int, new: int) -> nn.Module:
    """A freshly initialised copy of a gate (squeeze-and-excitation) at another width."""
    gate = renewed(gate)
    for path, layer in list(gate.named_modules()):
        if old == new or not path:
            continue
        if type(layer) in LAYERS:
            like = Layer(layer)
            sizes = [new if size == old else size for size in (like.in_features, like.out_features)]
            gate.set_submodule(path, conv_like(like, *sizes))
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.num_features == old:
            gate.set_submodule(path, norm_like(layer, new))
    return gate
