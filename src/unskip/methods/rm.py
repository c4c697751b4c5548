"""Method `rm`: exact removal of a skip; the block's input travels beside its branch in extra channels.

The RM operation (Meng et al., *RMNet*, which Zhang et al. 2024 build on, section 4.2). A block
y = σ(W_2 σ(W_1 x) + S x) becomes, for x ≥ 0 and with I for a Dirac kernel,

    y = σ( [W_2, S] ⊛ σ( [W_1; I] ⊛ x ) )

    x of both signs     travels as x⁺ = σ(x) and x⁻ = σ(-x), and x = x⁺ - x⁻; behind LeakyReLUs of slopes a_1, a_2, ...
                        as F(x) and F(-x), and x = (F(x) - F(-x)) / (1 + a_1 a_2 ...)
    pre-activation      begins with a 1 x 1 convolution that sets x beside what the norm reads
    a projection S      stays behind: its input is carried, and the last convolution projects it, S's norm absorbed
    a stride            takes every s-th pixel, as S does: the Dirac stands at the centre of a padded kernel
    average pooling     (ResNet-D) becomes s x s taps from the centre on; exact where s divides the image
    groups              get more groups like them, each with an identity

The norm behind the last convolution is absorbed, since the sum comes behind it. Norms before that act on the branch's
own channels and leave the carried ones alone (`norm='keep'`), so the network can be trained on; `fold` absorbs them.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from unskip._core.layers import inherits_from, layer_with
from unskip.coders import CoderBank
from unskip.methods.pieces import Scale, Shift
from unskip.methods.registry import check_options, register_method
from unskip.methods.spec import (
    DROPOUTS,
    LAYERS,
    NO_OPS,
    BlockSpec,
    Stage,
    Unsupported,
    check_keeps_shape,
    describe,
    exact,
    factory,
    is_activation,
    is_batch_norm,
    is_elementwise,
    norm_as_affine,
    replace_weight,
    ungrouped,
)
from unskip.methods.widths import norm_like

KeepNorm = Literal["keep", "absorb"]
Relu6 = Literal["split", "scale"]
Middle = Literal["dense", "grouped"]
BatchNorm = nn.modules.batchnorm._BatchNorm


@runtime_checkable
class Subsampling(Protocol):
    """A shortcut without weights that takes every stride-th pixel; `mixing` says how it maps the channels."""

    stride: int

    def mixing(self, channels: int) -> Tensor:
        """(out, in): the 1 x 1 kernel that it stands for, on the CPU in float64."""
        ...


class RMBlock(nn.Sequential):
    """A block in a row: (guard, pre,) convolutions with norms and activations, none of which reads past its neighbour.

    Under `scale`, `bound` is how large what is carried may be; `out_of_range` says where an input exceeds it.
    """

    skip_free = True
    conv1: nn.Conv2d  # reads what is carried
    bound: Tensor | None

    def __init__(self, parts: "OrderedDict[str, nn.Module]", bound: float | None = None) -> None:
        super().__init__(parts)
        self.register_buffer("bound", None if bound is None else torch.tensor(bound, **factory(parts["conv1"])))

    def to_ordinary(self) -> "RMBlock":
        """The block with its norms absorbed: convolution, bias and activation. In eval mode the same function."""
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        before = ""
        for name, module in self.named_children():
            conv = parts.get(before)
            if isinstance(module, BesideNorm) and _absorbable(module.norm):
                assert isinstance(conv, nn.Conv1d | nn.Conv2d | nn.Linear)
                n = module.channels
                weight = exact(conv.weight)
                bias = weight.new_zeros(len(weight)) if conv.bias is None else exact(conv.bias)
                own, shift = _affine(weight[:n], bias[:n], *norm_as_affine(module.norm))
                # What is carried has no bias at first, and may have one after training.
                bias = torch.cat([shift, bias[n:]])
                parts[before] = replace_weight(
                    conv, torch.cat([own, weight[n:]]), bias, groups=getattr(conv, "groups", 1)
                )
            else:
                parts[name] = module
                before = name
        return RMBlock(parts, None if self.bound is None else self.bound.item())


class BesideNorm(nn.Module):
    """A norm, gate or gain of the branch's channels, the first ones. The carried channels pass unchanged."""

    def __init__(self, norm: nn.Module, channels: int, axis: int = 1) -> None:
        super().__init__()
        self.norm = norm
        self.channels = channels
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        axis = getattr(self, "axis", 1)  # older network files lack it
        own, carried = x.tensor_split([self.channels], axis)
        return torch.cat([self.norm(own), carried], axis)


class CappedReLU(nn.Module):
    """min(max(x, 0), cap) with a cap for each channel: 6 where the block has a ReLU6, none where x is carried."""

    is_activation = True
    cap: Tensor

    def __init__(self, cap: Tensor) -> None:
        super().__init__()
        self.register_buffer("cap", cap)

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x.relu(), self.cap.view(-1, *[1] * (x.ndim - 2)))


class Divisible(nn.Module):
    """Passes images or series whose sides the window of an average pooling divides, and refuses all others."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        sides = x.shape[2:]
        if any(side % self.window for side in sides):
            size, window = " x ".join(map(str, sides)), " x ".join([str(self.window)] * len(sides))
            raise ValueError(
                f"rm: a feature map of {size} pixels comes to a shortcut that averages windows of {window}; only sides "
                f"that are divisible by {self.window} keep its function. Give inputs of another size."
            )
        return x


@register_method("rm")
@dataclass(frozen=True, kw_only=True)
class RM:
    """Exact removal of the skips: each block's input travels beside its branch in extra channels.

    It takes a network in eval mode; dropout and stochastic depth in the blocks are dropped.
    """

    norm: KeepNorm = "keep"  # norms inside the branch: kept for training on, or absorbed into the convolutions
    relu6: Relu6 = "split"  # in a ReLU6 block the carried channels have no cap, or a scale that keeps them below it
    scale: int = 3  # for relu6='scale': what is carried is multiplied by 2^-scale, and may be as large as 6 * 2^scale
    middle: Middle = "dense"  # convolutions between first and last: in one group, or the carried in their own
    limit: float = 4.0  # plainify refuses where the network would have more than this many times its parameters

    keeps_weights: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    # Appended to the refusal of a network that grows beyond `limit`.
    cheaper: ClassVar[str] = "; middle='grouped' costs less in bottlenecks and pre-activation blocks"

    def __post_init__(self) -> None:
        check_options(self)
        if not 0 <= self.scale <= 60:
            raise ValueError(f"rm: scale={self.scale!r} must be a whole number from 0 to 60, an exponent of 2.")
        if self.limit < 1:
            raise ValueError(f"rm: limit={self.limit} must be at least 1, in multiples of the network's parameters.")

    def build(self, spec: BlockSpec, bank: CoderBank) -> nn.Module | None:
        if not spec.skip:
            return None
        spec, enter, leave = spec.framed()
        front, cells, nonnegative = _in_a_row(spec, enter)
        path = _shortcut(spec)
        acts = [act for cell in cells[:-1] if (act := cell.act) is not None]
        signed = any(map(_is_odd, acts)) or (bool(acts) and not nonnegative)
        scaled = self.relu6 == "scale" and any(isinstance(act, nn.ReLU6) for act in acts)
        shift = self.scale if scaled else 0
        slope = _mix(cells) if signed else 0.0  # of negative numbers on their way
        if path.window > 1 and signed:
            _check_average(cells)

        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if path.window > 1:
            parts["guard"] = Divisible(path.window)
        parts |= {f"pre{i + 1}": module for i, module in enumerate((*front, *enter))}
        channels = cells[0].in_features
        carry = torch.eye(channels, dtype=torch.float64, device=path.weight.device) * 2.0**-shift
        project = path.weight * 2.0**shift
        if signed:
            carry = torch.cat([carry, -carry])
            project = torch.cat([project, -project], 1) / (1 + slope)
        layouts = _layouts(cells, len(carry), self.middle)
        for i, cell in enumerate(cells):
            conv = cell.conv
            last = i == len(cells) - 1
            own, bias, behind = cell.absorbed(everything=last or self.norm == "absorb")
            taps = _taps(cell, path.window if cell.stride > 1 else 1, own.device)
            around = (..., *[None] * taps.ndim)
            read, written = layouts[i], layouts[i + 1]
            groups = 1
            if i > 0 and not last:
                weight, groups = _beside(own, cell, read, written, taps, self.middle)
            elif len(cells) == 1:
                weight = ungrouped(own, cell.groups) + project[around] * taps
            elif last:
                weight = torch.cat([ungrouped(own, cell.groups), read.spread(project, 1)[around] * taps], 1)
            else:
                weight = torch.cat([ungrouped(own, cell.groups), written.spread(carry, 0)[around] * taps])
            if last and path.bias is not None:
                bias = path.bias if bias is None else bias + path.bias
            if any(cell.pad):
                parts[f"pad{i + 1}"] = (nn.ZeroPad2d if len(cell.pad) == 4 else nn.ZeroPad1d)(cell.pad)  # type: ignore[arg-type]
            parts[f"conv{i + 1}"] = replace_weight(conv, weight, bias, groups=groups)
            axis = -1 if isinstance(conv, nn.Linear) else 1
            for number, module in enumerate(() if last else behind):
                kind = "act" if is_activation(module) else "norm"
                name = f"{kind}{i + 1}" + (f"_{number}" if f"{kind}{i + 1}" in parts else "")
                if kind == "act":
                    parts[name] = _extended(module, cell.out_features, written.width, conv.weight, scaled)
                else:
                    parts[name] = BesideNorm(module, cell.out_features, axis)
        parts |= {f"post{i + 1}": module for i, module in enumerate(leave)}
        if spec.out_act is not None:
            parts["act"] = spec.out_act
        return RMBlock(parts, 6.0 * 2.0**shift if scaled else None)


# What the block is made of, in a row


@dataclass(eq=False, frozen=True)
class _Cell(Stage):
    """A layer with what follows it on the branch's own channels; `mix` takes the carried pairs apart before it."""

    mix: float | None = None  # (a, b) -> ±(a - b) / (1 + mix)

    def absorbed(self, *, everything: bool) -> tuple[Tensor, Tensor | None, tuple[nn.Module, ...]]:
        """Weight and bias after absorbing gains, shifts and, if `everything`, norms, and the modules that remain."""
        weight, bias = exact(self.conv.weight), None if self.conv.bias is None else exact(self.conv.bias)
        for number, module in enumerate(self.behind):
            affine = None
            if _absorbable(module):
                affine = norm_as_affine(module) if everything else None
            elif isinstance(module, Scale | Shift):
                value = module.of_channels(self.out_features, weight.ndim - 2)
                if value is not None:
                    affine = (value, 0 * value) if isinstance(module, Scale) else (0 * value + 1, value)
            if affine is None:
                return weight, bias, self.behind[number:]
            weight, bias = _affine(weight, bias, *affine)
        return weight, bias, ()


def _in_a_row(spec: BlockSpec, enter: tuple[nn.Module, ...]) -> tuple[list[nn.Module], list[_Cell], bool]:
    """The modules before the carried input, the layers beside it, and whether that input is known to be ≥ 0."""
    cells = [_Cell(stage.conv, stage.pad, tuple(_one_by_one(stage.behind))) for stage in spec.stages]
    first = cells[0]
    front: list[nn.Module] = []
    nonnegative = spec.nonnegative
    if spec.pre and (spec.shortcut is None or spec.projects_input):
        pre = list(_one_by_one(spec.pre))
        if pre and getattr(pre[0], "inplace", False):
            raise Unsupported(f"its {pre[0]} works in place on what the shortcut reads")
        for change in enter:
            back = change.inverse()  # type: ignore[operator]
            pre = [m if is_elementwise(m) else nn.Sequential(back, m, change) for m in pre]
        *groups, rest = _by_activation(pre)
        ahead = [
            _Cell(_identity(first.in_features, first.conv.weight), (), tuple(group))
            for group in (*groups, rest)
            if group
        ]
        cells = ahead + cells
    else:
        front = [*spec.pre]
        if spec.pre:
            nonnegative = rectifies(spec.pre[-1])
        if len(cells) > 1 and first.groups > 1:
            # Its groups read x alone; behind a copy of x they find the carried channels in groups of their own.
            cells.insert(0, _Cell(_identity(first.in_features, first.conv.weight), (), ()))
    last = cells[-1]
    if last.absorbed(everything=True)[2]:
        cells.append(_Cell(_identity(last.out_features, last.conv.weight), (), ()))
    for cell in cells:
        for module in cell.behind:
            check_keeps_shape(module, cell)
        if cell.act is not None:
            _slope(cell.act)  # raises for an unknown activation
            if isinstance(cell.act, nn.PReLU) and isinstance(cell.conv, nn.Linear):
                raise Unsupported("its PReLU behind a linear layer has no form beside carried features")
    return front, cells, nonnegative


def _one_by_one(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules that do something in eval mode. A norm with an activation inside is yielded as two modules."""
    for module in modules:
        if isinstance(module, BatchNormAct2d) and is_batch_norm(module):
            yield _without_activation(module)
            if not isinstance(module.act, nn.Identity):
                yield module.act
        elif not isinstance(module, (*NO_OPS, *DROPOUTS)):
            yield module


def _by_activation(modules: list[nn.Module]) -> list[list[nn.Module]]:
    """The modules in groups that end with an activation; the last group has none."""
    groups: list[list[nn.Module]] = [[]]
    for module in modules:
        groups[-1].append(module)
        if is_activation(module):
            groups.append([])
    return groups


def _mix(cells: list[_Cell]) -> float:
    """Has layers take the carried pairs apart where the next activation needs x itself; returns the slope at the end.

    Behind ReLUs and their like (F(x), F(-x)) is x times 1 + the product of their slopes. Behind a GELU, SiLU or
    Hardswish σ(x) - σ(-x) = x, and no other activation may follow before that difference is taken.
    """
    slope, seen, odd = 1.0, False, False
    for i, cell in enumerate(cells[:-1]):
        act = cell.act
        if act is None:
            continue
        if seen and (odd or _is_odd(act)):
            cells[i] = replace(cell, mix=0.0 if odd else slope)
            slope = 1.0
        slope, seen, odd = slope * _slope(act), True, _is_odd(act)
    return 0.0 if odd else slope


def _is_odd(act: nn.Module) -> bool:
    """Whether σ(x) - σ(-x) = x, for σ that is curved on both sides (GELU, SiLU, Hardswish); checked on a grid."""
    if isinstance(act, nn.ReLU | nn.ReLU6 | nn.PReLU | nn.LeakyReLU) or any(True for _ in act.parameters()):
        return False
    x = torch.linspace(-50, 50, 4001, dtype=torch.float64, device="cpu")
    act = copy.deepcopy(act)
    return bool(torch.allclose(act(x.clone()) - act(-x), x, rtol=1e-12, atol=1e-12))


def rectifies(module: nn.Module | None) -> bool:
    """Whether the output of a module is never negative."""
    if isinstance(module, BatchNormAct2d):
        return rectifies(module.act)
    if isinstance(module, nn.Softplus):
        return module.beta > 0 and module.threshold >= 0
    return isinstance(module, nn.ReLU | nn.ReLU6 | nn.Sigmoid)


def _slope(act: nn.Module) -> float:
    """The slope a of an activation σ(z) = z for z ≥ 0, a z for z < 0, as carried channels meet it."""
    if _is_odd(act) or isinstance(act, nn.ReLU | nn.ReLU6 | nn.PReLU):  # PReLU and ReLU6 are extended by plain ReLUs
        return 0.0
    if isinstance(act, nn.LeakyReLU) and 0 <= act.negative_slope <= 1:
        return float(act.negative_slope)
    raise Unsupported(
        f"its activation {act} bends what is carried, and rm is exact for ReLU, ReLU6, PReLU, LeakyReLU, GELU, "
        "SiLU and Hardswish alone; 'pnnh' and 'plain' take it, to be trained anew"
    )


def _check_average(cells: list[_Cell]) -> None:
    """An average of F(x) is no F of an average, where F is a LeakyReLU and x has both signs."""
    strided = next(i for i, cell in enumerate(cells) if cell.stride > 1)
    if any(_is_odd(act) or _slope(act) > 0 for cell in cells[:strided] if (act := cell.act) is not None):
        raise Unsupported("its shortcut averages numbers of both signs, which a LeakyReLU before that does not allow")


def _identity(channels: int, like: Tensor) -> nn.Module:
    eye = torch.eye(channels, **_like(like))
    return layer_with(eye[(..., *[None] * (like.ndim - 2))])


# The shortcut


@dataclass(frozen=True)
class _Path:
    """A shortcut: the mean of window x window pixels (1: none) of every window-th or stride-th, then W x + b."""

    weight: Tensor  # (out, in)
    bias: Tensor | None
    window: int


def _shortcut(spec: BlockSpec) -> _Path:
    channels, like = spec.in_features, exact(spec.stages[0].conv.weight)
    axes = like.ndim - 2  # behind that of the channels
    weight = torch.eye(channels, dtype=torch.float64, device=like.device)
    bias: Tensor | None = None
    window = stride = 1
    begun = False
    for module in _flat(spec.shortcut):
        value = module.of_channels(len(weight), axes) if isinstance(module, Scale | Shift) else None
        if isinstance(module, (*NO_OPS, *DROPOUTS)):
            continue
        if isinstance(module, nn.AvgPool1d | nn.AvgPool2d | nn.MaxPool1d | nn.MaxPool2d) and not begun:
            window, stride = _pooling(module)
        elif isinstance(module, Subsampling):
            if window > 1 and module.stride > 1:
                raise Unsupported("its shortcut averages and then leaves out pixels")
            mixing = module.mixing(len(weight)).to(weight)
            weight, bias, stride = mixing @ weight, None if bias is None else mixing @ bias, stride * module.stride
        elif isinstance(module, LAYERS) and inherits_from(module, *LAYERS):
            step = getattr(module, "stride", (1,))
            pointwise = isinstance(module, nn.Linear) or ({*module.kernel_size} == {1} and not any(module.padding))
            if not pointwise or (window > 1 and {*step} != {1}) or len({*step}) > 1:
                raise Unsupported(f"its projection {module} is not a 1 x 1 convolution without padding")
            own = ungrouped(exact(module.weight), getattr(module, "groups", 1)).flatten(1)
            shifted = None if bias is None else own @ bias
            weight, stride = own @ weight, stride * step[0]
            given = None if module.bias is None else exact(module.bias)
            bias = shifted if given is None else given if shifted is None else given + shifted
        elif isinstance(module, BatchNorm) and _absorbable(module) and _is_linear(module):
            weight, bias = _affine(weight, bias, *norm_as_affine(module))
        elif value is not None:
            affine = (value, 0 * value) if isinstance(module, Scale) else (0 * value + 1, value)
            weight, bias = _affine(weight, bias, *affine)
        else:
            raise Unsupported(f"its shortcut holds {describe(module)}, which the last convolution can't take over")
        begun = True
    if weight.shape != (spec.out_features, channels) or stride != spec.stride:
        raise Unsupported(
            f"its shortcut goes from {weight.shape[1]} to {weight.shape[0]} channels with stride {stride}, its branch "
            f"from {channels} to {spec.out_features} with stride {spec.stride}"
        )
    if window > 1 and [stage.stride for stage in spec.stages if stage.stride > 1] != [window]:
        raise Unsupported(f"its strides {[stage.stride for stage in spec.stages]} leave no convolution to average in")
    return _Path(weight, bias, window)


def _flat(module: nn.Module | None) -> list[nn.Module]:
    if module is None:
        return []
    if isinstance(module, nn.Sequential) and inherits_from(module, nn.Sequential):
        return [part for child in module for part in _flat(child)]
    return [module]


def _pooling(pool: Any) -> tuple[int, int]:
    """Window and stride of a pooling, if a convolution can compute it; raises Unsupported otherwise."""
    axes = 1 if isinstance(pool, nn.AvgPool1d | nn.MaxPool1d) else 2
    kernel, stride, padding = (
        (value,) * axes if isinstance(value, int) else tuple(value)
        for value in (pool.kernel_size, pool.stride or pool.kernel_size, pool.padding)
    )
    subsamples = {*kernel} == {1} and len({*stride}) == 1
    averages = isinstance(pool, nn.AvgPool1d | nn.AvgPool2d) and kernel == stride and len({*stride}) == 1
    odd = getattr(pool, "divisor_override", None) is not None or getattr(pool, "return_indices", False)
    if odd or any(padding) or not (subsamples or averages):
        raise Unsupported(f"its shortcut holds {pool}, which is no average over windows that lie side by side")
    return kernel[0], stride[0]


def _is_linear(norm: nn.Module) -> bool:
    return not isinstance(norm, BatchNormAct2d) or isinstance(norm.act, nn.Identity)


# Weights


@dataclass(frozen=True)
class _Layout:
    """Where carried channels stand behind the branch's own: channel i at slots[i] of `width`; the others are zero."""

    slots: tuple[int, ...] = ()
    width: int = 0

    def on(self, device: torch.device) -> Tensor:
        return torch.tensor(self.slots, dtype=torch.long, device=device)

    def spread(self, matrix: Tensor, dim: int) -> Tensor:
        """A matrix of the carried channels, with zeros along `dim` where none of them stands."""
        shape = list(matrix.shape)
        shape[dim] = self.width
        return matrix.new_zeros(shape).index_copy(dim, self.on(matrix.device), matrix)


def _in_groups(count: int, size: int, most: int) -> _Layout:
    """`count` channels in groups of `size`, of which `most` are used."""
    return _Layout(tuple(i // most * size + i % most for i in range(count)), math.ceil(count / most) * size)


def _layouts(layers: list[_Cell], count: int, middle: Middle) -> list[_Layout]:
    """The layouts before each layer and behind the last. The first reads x itself, and the last writes the sum."""
    layouts = [_Layout()]
    for i in range(1, len(layers)):
        before, behind = _sizes(layers[i - 1], middle), _sizes(layers[i], middle)
        if i > 1 and before is not None and layouts[-1] == _in_groups(count, before[0], min(before)):
            layouts.append(_in_groups(count, before[1], min(before)))  # groups write where they read
        elif i < len(layers) - 1 and behind is not None:
            layouts.append(_in_groups(count, behind[0], min(behind)))
        else:
            layouts.append(_in_groups(count, 1, 1))
    return [*layouts, _Layout()]


def _sizes(cell: _Cell, middle: Middle) -> tuple[int, int] | None:
    """The numbers of channels that a group reads and writes; None for a convolution that stays in one group."""
    if (cell.groups == 1 and middle == "dense") or cell.mix is not None or isinstance(cell.conv, nn.Linear):
        return None
    return cell.in_features // cell.groups, cell.out_features // cell.groups


def _beside(
    own: Tensor, cell: _Cell, read: _Layout, written: _Layout, taps: Tensor, middle: Middle
) -> tuple[Tensor, int]:
    """A convolution with the carried channels beside it: in groups like its own, or in one group with all others.

    Returns the weight and its number of groups.
    """
    groups = cell.groups
    size = (own.shape[1], own.shape[0] // groups)  # that a group reads and writes
    count = len(read.slots)
    in_groups = tuple(_in_groups(count, s, min(size)) for s in size)
    around = (..., *[None] * taps.ndim)
    if _sizes(cell, middle) is not None and (read, written) == in_groups:
        more = read.width // size[0]
        identity = torch.eye(size[1], size[0], dtype=own.dtype, device=own.device)
        return torch.cat([own, identity.repeat(more, 1)[around] * taps]), groups + more
    own = ungrouped(own, groups)
    through = torch.eye(count, dtype=own.dtype, device=own.device)
    if cell.mix is not None:
        half = torch.eye(count // 2, dtype=own.dtype, device=own.device) / (1 + cell.mix)
        through = torch.cat([torch.cat([half, -half], 1), torch.cat([-half, half], 1)])
    weight = own.new_zeros(own.shape[0] + written.width, own.shape[1] + read.width, *taps.shape)
    weight[: own.shape[0], : own.shape[1]] = own
    weight[own.shape[0] :, own.shape[1] :] = written.spread(read.spread(through, 1), 0)[around] * taps
    return weight, 1


def _taps(cell: _Cell, window: int, device: torch.device) -> Tensor:
    """A kernel that passes on the pixel itself, or the mean of a window that begins there."""
    conv = cell.conv
    if isinstance(conv, nn.Linear):
        return torch.ones((), dtype=torch.float64, device=device)
    kernel, axes = conv.kernel_size, len(conv.kernel_size)
    own: Any = {"valid": 0, "same": None}.get(conv.padding, 0) if isinstance(conv.padding, str) else conv.padding
    ahead: list[int] = []
    fits = (
        conv.padding_mode == "zeros" and len({*conv.stride}) == 1 and (not any(cell.pad) or len(cell.pad) == 2 * axes)
    )
    for axis in range(axes) if fits else ():
        reach = conv.dilation[axis] * (kernel[axis] - 1)
        left, right = (reach // 2, reach - reach // 2) if own is None else [(own if own == 0 else own[axis])] * 2
        if any(cell.pad):
            left += cell.pad[2 * (axes - 1 - axis)]
            right += cell.pad[2 * (axes - 1 - axis) + 1]
        steps = left // conv.dilation[axis]
        missing = reach - left - right
        fits = fits and left % conv.dilation[axis] == 0 and steps < kernel[axis] and 0 <= missing < conv.stride[0]
        ahead.append(steps)
    if not fits:
        raise Unsupported(f"{conv} pads so that it does not read the pixel that the shortcut carries past it")
    if window > 1 and ({*conv.dilation} != {1} or any(a + window > k for a, k in zip(ahead, kernel, strict=True))):
        raise Unsupported(f"{conv} does not reach over the {window} x {window} pixels that its shortcut averages")
    taps = torch.zeros(kernel, dtype=torch.float64, device=device)
    taps[tuple(slice(a, a + window) for a in ahead)] = 1 / window**axes
    return taps


def _absorbable(norm: nn.Module) -> bool:
    return is_batch_norm(norm) and norm.running_mean is not None


def _affine(weight: Tensor, bias: Tensor | None, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """s (W x + b) + t = (s W) x + (s b + t)."""
    s, t = s.to(weight), t.to(weight)
    return weight * s.view(-1, *[1] * (weight.ndim - 1)), t if bias is None else s * bias + t


def _without_activation(norm: nn.Module) -> nn.Module:
    if not isinstance(norm, BatchNormAct2d):
        return norm
    stored = next(iter(norm.state_dict().values()))
    alone = norm_like(norm, norm.num_features, **_like(stored))
    alone.load_state_dict({key: value for key, value in norm.state_dict().items() if not key.startswith("act.")})
    return alone


def _extended(act: nn.Module, own: int, carried: int, like: Tensor, scaled: bool) -> nn.Module:
    """The activation for the branch's channels and, behind them, the carried ones."""
    if isinstance(act, nn.ReLU6) and not scaled:
        cap = torch.full((own + carried,), math.inf, **_like(like))
        cap[:own] = 6.0
        return CappedReLU(cap)
    if isinstance(act, nn.PReLU):
        wide = nn.PReLU(own + carried, **_like(act.weight))
        with torch.no_grad():
            wide.weight.copy_(torch.cat([act.weight.expand(own), act.weight.new_zeros(carried)]))
        return wide
    return copy.deepcopy(act)


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


@torch.no_grad()
def out_of_range(model: nn.Module, x: Tensor) -> dict[str, tuple[float, float]]:
    """Where this input leaves the range in which a network of rm with relu6='scale' is exact.

    Args:
        model: what `plainify(model, "rm", relu6="scale")` or `fold` of that has returned.
        x: a batch of inputs.

    Returns:
        By the path of the block: the largest number that it had to carry, and the bound that this exceeds.
    """
    seen: dict[str, tuple[float, float]] = {}
    handles = []
    for path, block in model.named_modules():
        if isinstance(block, RMBlock) and block.bound is not None:

            def note(conv: nn.Module, args: Any, path: str = path, bound: float = block.bound.item()) -> None:
                largest = args[0].abs().max().item()
                if not largest <= bound:
                    seen[path] = (max(largest, seen.get(path, (0.0, bound))[0]), bound)

            handles.append(block.conv1.register_forward_pre_hook(note))
    try:
        if handles:
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return seen
