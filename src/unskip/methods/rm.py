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
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from unskip._core.layers import inherits_from
from unskip.coders import CoderBank
from unskip.methods.pnnh import norm_like
from unskip.methods.registry import check_options, register_method
from unskip.methods.spec import (
    NO_OPS,
    NORMS,
    BlockSpec,
    BranchLayer,
    Unsupported,
    describe,
    exact,
    factory,
    is_activation,
    is_batch_norm,
    norm_as_affine,
    replace_weight,
    square,
    ungrouped,
)

KeepNorm = Literal["keep", "absorb"]
Relu6 = Literal["split", "scale"]
Middle = Literal["dense", "grouped"]
BatchNorm = nn.modules.batchnorm._BatchNorm


@runtime_checkable
class Subsampling(Protocol):
    """A shortcut without weights that takes every stride-th pixel, and says what it does to the channels."""

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
                assert isinstance(conv, nn.Conv2d)
                n = module.channels
                weight = exact(conv.weight)
                bias = weight.new_zeros(len(weight)) if conv.bias is None else exact(conv.bias)
                own, shift = _absorb(weight[:n], bias[:n], module.norm)
                # What is carried has no bias at first, and may have one after training.
                bias = torch.cat([shift, bias[n:]])
                parts[before] = replace_weight(conv, torch.cat([own, weight[n:]]), bias, groups=conv.groups)
            else:
                parts[name] = module
                before = name
        return RMBlock(parts, None if self.bound is None else self.bound.item())


class BesideNorm(nn.Module):
    """A norm of the branch's channels; the carried ones, behind them, pass."""

    def __init__(self, norm: nn.Module, channels: int) -> None:
        super().__init__()
        self.norm = norm
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        own, carried = x[:, : self.channels], x[:, self.channels :]
        return torch.cat([self.norm(own), carried], 1)


class CappedReLU(nn.Module):
    """min(max(x, 0), cap) with a cap for each channel: 6 where the block has a ReLU6, none where x is carried."""

    is_activation = True
    cap: Tensor

    def __init__(self, cap: Tensor) -> None:
        super().__init__()
        self.register_buffer("cap", cap)

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(x.relu(), self.cap.view(-1, 1, 1))


class Divisible(nn.Module):
    """Passes images whose sides are divisible by the window of an average pooling, and refuses all others."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] % self.window or x.shape[-1] % self.window:
            raise ValueError(
                f"rm: a feature map of {x.shape[-2]} x {x.shape[-1]} pixels comes to a shortcut that averages windows "
                f"of {self.window} x {self.window}; only sides that are divisible by {self.window} keep its function. "
                "Give images of another size."
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
    # What a refusal adds.
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
        front, layers, nonnegative = _in_a_row(spec)
        path = _shortcut(spec)
        inner = [layer.act for layer in layers[:-1] if layer.act is not None]
        signed = bool(inner) and not nonnegative
        capped = any(isinstance(act, nn.ReLU6) for act in inner)
        scaled = capped and self.relu6 == "scale"
        shift = self.scale if scaled else 0
        slope = math.prod(_slope(act) for act in inner)  # of negative numbers on their way
        if path.window > 1 and signed:
            _check_average(layers)

        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if path.window > 1:
            parts["guard"] = Divisible(path.window)
        parts |= {f"pre{i + 1}": module for i, module in enumerate(front)}
        channels = spec.in_features
        carry = torch.eye(channels, dtype=torch.float64, device=path.weight.device) * 2.0**-shift
        project = path.weight * 2.0**shift
        if signed:
            carry = torch.cat([carry, -carry])
            project = torch.cat([project, -project], 1) / (1 + slope)
        layouts = _layouts(layers, len(carry), self.middle)
        for i, layer in enumerate(layers):
            conv, norm = layer.conv, layer.norm
            assert isinstance(conv, nn.Conv2d)
            own, bias = exact(conv.weight), None if conv.bias is None else exact(conv.bias)
            last = i == len(layers) - 1
            if norm is not None and _absorbable(norm) and (last or self.norm == "absorb"):
                own, bias = _absorb(own, bias, norm)
                norm = None
            taps = _taps(conv, path.window if layer.stride > 1 else 1, own.device)
            read, written = layouts[i], layouts[i + 1]
            groups = 1
            if i > 0 and not last:
                weight, groups = _beside(own, conv.groups, read, written, taps, self.middle)
            elif len(layers) == 1:
                weight = ungrouped(own, conv.groups) + project[..., None, None] * taps
            elif last:
                weight = torch.cat([ungrouped(own, conv.groups), read.spread(project, 1)[..., None, None] * taps], 1)
            else:
                weight = torch.cat([ungrouped(own, conv.groups), written.spread(carry, 0)[..., None, None] * taps])
            if last and path.bias is not None:
                bias = path.bias if bias is None else bias + path.bias
            parts[f"conv{i + 1}"] = replace_weight(conv, weight, bias, groups=groups)
            if last:
                break
            if norm is not None:
                parts[f"norm{i + 1}"] = BesideNorm(_without_activation(norm), conv.out_channels)
            if layer.act is not None:
                parts[f"act{i + 1}"] = _extended(layer.act, conv.out_channels, written.width, conv.weight, scaled)
        if spec.out_act is not None:
            parts["act"] = spec.out_act
        return RMBlock(parts, 6.0 * 2.0**shift if scaled else None)


# What the block is made of, in a row


def _in_a_row(spec: BlockSpec) -> tuple[list[nn.Module], list[BranchLayer], bool]:
    """What stands before the carried input, the layers beside it, and whether that input is known to be ≥ 0."""
    layers = list(spec.layers)
    for layer in layers:
        if isinstance(layer.conv, nn.Linear):
            raise Unsupported("it is an MLP of linear layers, and rm is for convolutions; 'pnnh' takes it")
        if not square(layer.conv):
            raise Unsupported(f"{layer.conv} is not a square convolution with 'same' zero padding")
    for layer in layers:
        if layer.act is not None:
            _slope(layer.act)  # which refuses what it doesn't know
    front: list[nn.Module] = []
    nonnegative = spec.nonnegative
    first = layers[0].conv
    grouped = len(layers) > 1 and isinstance(first, nn.Conv2d) and first.groups > 1
    if spec.pre and spec.shortcut is None:
        norm, act = _pre(spec)
        layers.insert(0, BranchLayer(_identity(spec.in_features, first.weight), norm, act, 0.0))
    else:
        front = [*spec.pre]
        if spec.pre:
            nonnegative = rectifies(spec.pre[-1])
        if grouped:
            # Its groups read x alone; behind a copy of x they find the carried channels in groups of their own.
            layers.insert(0, BranchLayer(_identity(spec.in_features, first.weight), None, None, 0.0))
    last = layers[-1]
    if last.act is not None or (last.norm is not None and not _absorbable(last.norm)):
        layers.append(BranchLayer(_identity(last.out_features, last.conv.weight), None, None, 0.0))
    return front, layers, nonnegative


def _pre(spec: BlockSpec) -> tuple[nn.Module | None, nn.Module | None]:
    """Norm and activation of a pre-activation block."""
    norm: nn.Module | None = None
    act: nn.Module | None = None
    for module in spec.pre:
        if isinstance(module, NO_OPS):
            continue
        if isinstance(module, NORMS) and norm is None and act is None:
            norm = module
            act = module.act if isinstance(module, BatchNormAct2d) and is_activation(module.act) else None
        elif is_activation(module) and act is None:
            act = module
        else:
            raise Unsupported(f"before its branch stands {describe(module)} where a norm and an activation may stand")
    if norm is None and getattr(act, "inplace", False):
        raise Unsupported(f"its {act} works in place on what the shortcut reads")
    if act is not None:
        _slope(act)
    return norm, act


def rectifies(module: nn.Module | None) -> bool:
    """Whether nothing negative comes out of a module."""
    if isinstance(module, BatchNormAct2d):
        return rectifies(module.act)
    if isinstance(module, nn.Softplus):
        return module.beta > 0 and module.threshold >= 0
    return isinstance(module, nn.ReLU | nn.ReLU6 | nn.Sigmoid)


def _slope(act: nn.Module) -> float:
    """The slope a of an activation σ(z) = z for z ≥ 0, a z for z < 0, as carried channels meet it."""
    if isinstance(act, nn.ReLU | nn.ReLU6 | nn.PReLU):  # PReLU and ReLU6 are extended by plain ReLUs
        return 0.0
    if isinstance(act, nn.LeakyReLU) and 0 <= act.negative_slope <= 1:
        return float(act.negative_slope)
    raise Unsupported(
        f"its activation {act} bends what is carried, and rm is exact for ReLU, ReLU6, PReLU and LeakyReLU alone; "
        "'pnnh' and 'plain' take it, to be trained anew"
    )


def _check_average(layers: list[BranchLayer]) -> None:
    """An average of F(x) is no F of an average, where F is a LeakyReLU and x has both signs."""
    strided = next(i for i, layer in enumerate(layers) if layer.stride > 1)
    if any(_slope(layer.act) > 0 for layer in layers[:strided] if layer.act is not None):
        raise Unsupported("its shortcut averages numbers of both signs, which a LeakyReLU before that does not allow")


def _identity(channels: int, like: Tensor) -> nn.Conv2d:
    conv = nn.Conv2d(channels, channels, 1, bias=False, **_like(like))
    nn.init.dirac_(conv.weight)
    return conv


# The shortcut


@dataclass(frozen=True)
class _Path:
    """A shortcut: the mean of window x window pixels (1: none) of every window-th or stride-th, then W x + b."""

    weight: Tensor  # (out, in)
    bias: Tensor | None
    window: int


def _shortcut(spec: BlockSpec) -> _Path:
    channels = spec.in_features
    weight = torch.eye(channels, dtype=torch.float64, device=exact(spec.layers[0].conv.weight).device)
    bias: Tensor | None = None
    window = stride = 1
    stage = 0  # pooling, then a projection, then a norm; each at most once
    for module in _flat(spec.shortcut):
        if isinstance(module, NO_OPS):
            continue
        if isinstance(module, nn.AvgPool2d | nn.MaxPool2d) and stage < 1:
            window, stride = _pooling(module)
            stage = 1
        elif isinstance(module, Subsampling) and stage < 1:
            weight, stride = module.mixing(channels).to(weight.device), module.stride
            stage = 2
        elif isinstance(module, nn.Conv2d) and inherits_from(module, nn.Conv2d) and stage < 2:
            if module.kernel_size != (1, 1) or not square(module) or (window > 1 and module.stride != (1, 1)):
                raise Unsupported(f"its projection {module} is not a 1 x 1 convolution without padding")
            weight = ungrouped(exact(module.weight), module.groups)[..., 0, 0]
            bias = None if module.bias is None else exact(module.bias)
            stride *= module.stride[0]
            stage = 2
        elif isinstance(module, BatchNorm) and _absorbable(module) and stage < 3 and _is_linear(module):
            weight, bias = _absorb(weight, bias, module)
            stage = 3
        else:
            raise Unsupported(f"its shortcut holds {describe(module)}, which the last convolution can't take over")
    if weight.shape != (spec.out_features, channels) or stride != spec.stride:
        raise Unsupported(
            f"its shortcut goes from {weight.shape[1]} to {weight.shape[0]} channels with stride {stride}, its branch "
            f"from {channels} to {spec.out_features} with stride {spec.stride}"
        )
    if window > 1 and [layer.stride for layer in spec.layers if layer.stride > 1] != [window]:
        raise Unsupported(f"its strides {[layer.stride for layer in spec.layers]} leave no convolution to average in")
    return _Path(weight, bias, window)


def _flat(module: nn.Module | None) -> list[nn.Module]:
    if module is None:
        return []
    if isinstance(module, nn.Sequential) and inherits_from(module, nn.Sequential):
        return [part for child in module for part in _flat(child)]
    return [module]


def _pooling(pool: nn.AvgPool2d | nn.MaxPool2d) -> tuple[int, int]:
    """Window and stride of a pooling that the taps of a convolution can do."""
    kernel, stride, padding = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (pool.kernel_size, pool.stride or pool.kernel_size, pool.padding)
    )
    subsamples = kernel == (1, 1) and stride[0] == stride[1]
    averages = isinstance(pool, nn.AvgPool2d) and kernel == (stride[0],) * 2 == stride
    odd = getattr(pool, "divisor_override", None) is not None or getattr(pool, "return_indices", False)
    if odd or padding != (0, 0) or not (subsamples or averages):
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


def _layouts(layers: list[BranchLayer], count: int, middle: Middle) -> list[_Layout]:
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


def _sizes(layer: BranchLayer, middle: Middle) -> tuple[int, int] | None:
    """Channels that a group reads and writes; None for a convolution that is to stay one group."""
    groups = layer.conv.groups if isinstance(layer.conv, nn.Conv2d) else 1
    if groups == 1 and middle == "dense":
        return None
    return layer.in_features // groups, layer.out_features // groups


def _beside(
    own: Tensor, groups: int, read: _Layout, written: _Layout, taps: Tensor, middle: Middle
) -> tuple[Tensor, int]:
    """A convolution with the carried channels beside it: in groups like its own, or in one group with all others.

    Returns the weight and its number of groups.
    """
    size = (own.shape[1], own.shape[0] // groups)  # that a group reads and writes
    count = len(read.slots)
    in_groups = tuple(_in_groups(count, s, min(size)) for s in size)
    if (groups > 1 or middle == "grouped") and (read, written) == in_groups:
        more = read.width // size[0]
        identity = torch.eye(size[1], size[0], dtype=own.dtype, device=own.device)
        return torch.cat([own, identity.repeat(more, 1)[..., None, None] * taps]), groups + more
    own = ungrouped(own, groups)
    weight = own.new_zeros(own.shape[0] + written.width, own.shape[1] + read.width, *taps.shape)
    weight[: own.shape[0], : own.shape[1]] = own
    weight[own.shape[0] + written.on(own.device), own.shape[1] + read.on(own.device)] = taps
    return weight, 1


def _taps(conv: nn.Conv2d, window: int, device: torch.device) -> Tensor:
    """(k, k): one at the centre, or the mean of window x window pixels from the centre on."""
    k, centre = conv.kernel_size[0], conv.kernel_size[0] // 2
    if window > 1 and (centre + window > k or conv.dilation != (1, 1)):
        raise Unsupported(f"{conv} does not reach over the {window} x {window} pixels that its shortcut averages")
    taps = torch.zeros(k, k, dtype=torch.float64, device=device)
    taps[centre : centre + window, centre : centre + window] = 1 / window**2
    return taps


def _absorbable(norm: nn.Module) -> bool:
    return is_batch_norm(norm) and norm.running_mean is not None


def _absorb(weight: Tensor, bias: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """s (W x + b) + t = (s W) x + (s b + t)."""
    s, t = norm_as_affine(norm)
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
