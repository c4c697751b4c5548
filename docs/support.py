"""The table of the page *Methods*: which method takes which kind of residual block, found by trying."""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import LayerNorm2d, SqueezeExcite
from torch import nn

from unskip.coders import CoderBank
from unskip.methods import BlockSpec, Unsupported, method_names, resolve_method
from unskip.methods.pieces import PadShortcut, Permute, Scale

C = 16  # width of the blocks


def conv(inputs: int, outputs: int, kernel: int = 3, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **settings)


def block(*branch: nn.Module, **parts: object) -> Callable[[], BlockSpec]:
    settings = {"out_act": nn.ReLU(), **parts}
    return lambda: BlockSpec(path="", branch=branch, **settings)  # type: ignore[arg-type]


def two(inputs: int = C, stride: int = 1, act: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    first = conv(inputs, C, stride=stride)
    return [first, nn.BatchNorm2d(C), act(), conv(C, C), nn.BatchNorm2d(C)]


def bottleneck(groups: int = 1, gate: bool = False, act: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    row = [conv(2 * C, C, 1), nn.BatchNorm2d(C), act(), conv(C, C, groups=groups), nn.BatchNorm2d(C), act()]
    return [*row, *([SqueezeExcite(C)] if gate else []), conv(C, 2 * C, 1), nn.BatchNorm2d(2 * C)]


def inverted(act: type[nn.Module], gate: bool = False) -> list[nn.Module]:
    wide = 4 * C
    row = [conv(C, wide, 1), nn.BatchNorm2d(wide), act(), conv(wide, wide, groups=wide), nn.BatchNorm2d(wide), act()]
    return [*row, *([SqueezeExcite(wide)] if gate else []), conv(wide, C, 1), nn.BatchNorm2d(C)]


def examples() -> dict[str, Callable[[], BlockSpec]]:
    """A small block of each kind, by its name in the table."""
    project = nn.Sequential(conv(C // 2, C, 1, stride=2), nn.BatchNorm2d(C))
    series = [nn.Conv1d(C, C, 3, padding=1), nn.BatchNorm1d(C), nn.ReLU(), nn.Conv1d(C, C, 3, padding=1)]
    depthwise = conv(C, C, 7, groups=C)
    mixed = [nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)]
    to_last, to_first = Permute((0, 2, 3, 1)), Permute((0, 3, 1, 2))
    shifted = [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(C, C, 3, 2), nn.ReLU(), conv(C, C)]
    plain = {"out_act": None}
    return {
        "two 3 x 3 convolutions": block(*two()),
        "the same with a projection at stride 2": block(*two(C // 2, 2), shortcut=project),
        "the same with zero-padded channels (option A)": block(*two(C // 2, 2), shortcut=PadShortcut(2, 4, 4)),
        "one-sided padding at stride 2": block(*shifted, shortcut=conv(C, C, 1, stride=2)),
        "two 3 x 3 convolutions, SiLU": block(*two(act=nn.SiLU), out_act=nn.SiLU()),
        "pre-activation": block(*two()[:-1], pre=(nn.BatchNorm2d(C), nn.ReLU()), **plain),
        "without norms, branch times 0.1": block(conv(C, C), nn.ReLU(), conv(C, C), Scale(0.1), **plain),
        "squeeze-and-excitation behind the branch": block(*two(), SqueezeExcite(C)),
        "bottleneck": block(*bottleneck()),
        "bottleneck in groups (ResNeXt, RegNet-X)": block(*bottleneck(groups=4)),
        "bottleneck with squeeze-and-excitation (RegNet-Y)": block(*bottleneck(groups=4, gate=True)),
        "bottleneck, SiLU": block(*bottleneck(act=nn.SiLU), out_act=nn.SiLU()),
        "inverted bottleneck, ReLU6 (MobileNet-V2)": block(*inverted(nn.ReLU6), **plain),
        "inverted bottleneck with a gate, Hardswish (MobileNet-V3)": block(*inverted(nn.Hardswish, gate=True), **plain),
        "ConvNeXt, layers on the last axis, LayerScale": block(
            depthwise,
            to_last,
            nn.LayerNorm(C),
            *mixed,
            to_first,
            Scale(nn.Parameter(torch.full((C,), 0.1)), (C, 1, 1)),
            **plain,
        ),
        "ConvNeXt, 1 x 1 convolutions": block(
            depthwise, LayerNorm2d(C), conv(C, 4 * C, 1), nn.GELU(), conv(4 * C, C, 1), **plain
        ),
        "1-D convolutions": block(*series),
        "MLP": block(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, C)),
        "the MLP of a transformer": block(*mixed, pre=(nn.LayerNorm(C),), **plain),
    }


def support() -> dict[str, dict[str, str]]:
    """By kind of block and method, why the method refuses the block; '' where it takes it."""
    found: dict[str, dict[str, str]] = {}
    for kind, make in examples().items():
        found[kind] = {}
        for name in method_names():
            try:
                resolve_method(name, {}).build(make(), CoderBank())
                found[kind][name] = ""
            except Unsupported as reason:
                found[kind][name] = str(reason)
    return found


def support_table() -> str:
    """`support` in Markdown: a row for each kind, a column for each method, and the reasons below."""
    found, names = support(), method_names()
    reasons = list(dict.fromkeys(reason for row in found.values() for reason in row.values() if reason))
    lines = [f"| | {' | '.join(f'`{name}`' for name in names)} |", "|---|" + ":-:|" * len(names)]
    for kind, row in found.items():
        cells = [f"no ({reasons.index(row[name]) + 1})" if row[name] else "yes" for name in names]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))])
