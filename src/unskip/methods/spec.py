"""BlockSpec: the parts of a residual block of any library. Readers make it, methods turn it into a skip-free block.

A residual block computes, with any part but the branch possibly missing,

    y = out_act( shortcut + branch(pre(x)) )      the shortcut is x itself, or a projection of pre(x)

The branch is kept as the block's own modules in the order in which they run. Everything else (its layers, its family,
widths, strides, the sign of its input) is derived from them here, so that a reader only has to name the parts.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from timm.layers.drop import DropPath
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._core.layers import behaves_as, conv_settings, inherits, inherits_from, known_class, layer_with
from unskip._core.modules import square
from unskip.methods.attention.self_attention import AttentionSpec
from unskip.methods.pieces import Permute, Scale, Shift, Transpose

Conv = nn.Conv2d | nn.Linear
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
# Activations behind which there is nothing negative, or little: what follows them needs no sign.
RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.Sigmoid, nn.Softplus)
NO_OPS = (nn.Identity, DropPath)
# In eval mode they do nothing.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, DropPath)


class Unsupported(ValueError):  # noqa: N818 - users see plainify's UnsupportedBlockError instead
    """Raised by readers and methods for a block that they can't express; `plainify` catches it.

    The message is the reason alone, the end of a sentence: "its activations differ from each other".
    """


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer of a branch."""

    conv: Any  # Conv1d, Conv2d or Linear

    @property
    def in_features(self) -> int:
        width: int = self.conv.in_features if isinstance(self.conv, nn.Linear) else self.conv.in_channels
        return width

    @property
    def out_features(self) -> int:
        width: int = self.conv.out_features if isinstance(self.conv, nn.Linear) else self.conv.out_channels
        return width

    @property
    def kernel(self) -> int:
        return 1 if isinstance(self.conv, nn.Linear) else self.conv.kernel_size[0]

    @property
    def stride(self) -> int:
        return 1 if isinstance(self.conv, nn.Linear) else self.conv.stride[0]

    @property
    def groups(self) -> int:
        return 1 if isinstance(self.conv, nn.Linear) else self.conv.groups

    @property
    def depthwise(self) -> bool:
        return 1 < self.groups == self.in_features == self.out_features


@dataclass(frozen=True)
class BranchLayer(Layer):
    """A layer of a branch with the norm and the activation that follow it."""

    norm: nn.Module | None
    act: nn.Module | None
    drop: float  # the rate of dropout behind them


@dataclass(frozen=True)
class Stage(Layer):
    """A layer of a branch with all that follows it, in order, up to the next one: norm, activation, gate, gain."""

    pad: tuple[int, ...]  # zeros before it beside its own, as nn.ZeroPad2d has them
    behind: tuple[nn.Module, ...]

    @property
    def act(self) -> nn.Module | None:
        """Its one activation; Unsupported if there are several."""
        acts = [m.act if isinstance(m, BatchNormAct2d) else m for m in self.behind]
        acts = [act for act in acts if is_activation(act)]
        if len(acts) > 1:
            raise Unsupported("its branch has several activations in a row")
        return acts[0] if acts else None


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A residual block, taken apart. All modules are the block's own, not copies."""

    path: str  # where it stands in the network, e.g. 'layer1.0'
    branch: tuple[nn.Module, ...]  # everything between the input and the addition, in order
    pre: tuple[nn.Module, ...] = ()  # what the branch and a projection both read through (pre-activation, LayerNorm)
    shortcut: nn.Module | None = None  # None: the identity; else the projection
    skip: bool = True  # False: the block has no skip connection (MobileNet-V2 where the width changes)
    out_act: nn.Module | None = None  # the activation after the addition
    projects_input: bool = False  # the projection reads x itself, and not pre(x)
    kept: tuple[str, ...] = ()  # skips of this block that no method removes, by name ('attention')
    attention: Callable[[], AttentionSpec] | None = None  # reads the block's attention, to be made skip-free too
    nonnegative: bool = False  # proven that the block reads nothing negative; set by `plainify` for exact methods

    @cached_property
    def layers(self) -> tuple[BranchLayer, ...]:
        """The branch as convolution + norm + activation; Unsupported where it holds anything else."""
        layers: list[BranchLayer] = []
        for module in self.branch:
            if isinstance(module, NO_OPS):
                continue
            if inherits_from(module, nn.Conv2d, nn.Linear):
                assert isinstance(module, nn.Conv2d | nn.Linear)
                layers.append(BranchLayer(module, None, None, 0.0))
                continue
            if not layers:
                ordinary = "an ordinary convolution of images or a linear layer"
                raise Unsupported(f"its branch begins with {describe(module)}, not with {ordinary}")
            last = layers[-1]
            if isinstance(module, nn.Dropout):
                last = replace(last, drop=max(last.drop, module.p))
            elif isinstance(module, NORMS) and last.norm is None and last.act is None and not last.drop:
                own = getattr(module, "act", None)  # timm's BatchNormAct2d
                last = replace(last, norm=module, act=None if isinstance(own, nn.Identity) else own)
            elif is_activation(module) and last.act is None:
                last = replace(last, act=module)
            else:
                raise Unsupported(
                    f"its branch holds {describe(module)} where convolution, norm and activation follow each other"
                )
            layers[-1] = last
        return tuple(layers)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The branch as layers with all modules that follow each, without changes of axes (`framed`)."""
        stages: list[Stage] = []
        pad: tuple[int, ...] = ()
        for module in self.branch:
            if isinstance(module, NO_OPS) or (not stages and isinstance(module, DROPOUTS)):
                continue
            if isinstance(module, LAYERS):
                if isinstance(module, nn.Conv3d):
                    raise Unsupported(f"its branch holds {describe(module)}, a 3-D convolution; 1-D and 2-D are known")
                if not inherits_from(module, *LAYERS):
                    raise Unsupported(f"its branch holds {describe(module)}, which is no ordinary convolution")
                stages.append(Stage(module, pad, ()))
                pad = ()
            elif isinstance(module, nn.ZeroPad1d | nn.ZeroPad2d) and not pad:
                pad = tuple(module.padding)
            elif not stages or pad:
                raise Unsupported(f"its branch begins with {describe(module)}, not with a convolution")
            else:
                stages[-1] = replace(stages[-1], behind=(*stages[-1].behind, module))
        if not stages or pad:
            raise Unsupported("its branch has no convolution" if not stages else "its branch ends with a padding")
        return tuple(stages)

    def framed(self) -> tuple["BlockSpec", tuple[nn.Module, ...], tuple[nn.Module, ...]]:
        """The spec with all layers of the branch on the same axes, and the changes of axes before and behind it.

        Linear layers on the last axis of images become 1 x 1 convolutions (ConvNeXt); a branch whose layers all read
        other axes than x has (the tokens of an MLP-Mixer) is given on theirs.
        """
        frame: list[nn.Module] = []  # the changes of axes that are open
        seen: list[tuple[tuple[nn.Module, ...], nn.Module]] = []
        for module in self.branch:
            if not isinstance(module, Permute | Transpose):
                seen.append((tuple(frame), module))
            elif frame and module.undoes(frame[-1]):
                frame.pop()
            else:
                frame.append(module)
        frames = {id(frame[0]) if frame else 0: frame for frame, module in seen if isinstance(module, LAYERS)}
        if not any(frame for frame, _ in seen) and not frame:
            return self, (), ()
        if frame or any(len(frame) > 1 for frame, _ in seen):
            raise Unsupported("its branch changes the order of axes in a way that it does not take back")
        convs = any(isinstance(m, nn.Conv2d) for _, m in seen)
        if convs and all(isinstance(f[0], Permute) and f[0].order == (0, 2, 3, 1) for f, _ in seen if f):
            branch = [as_channels_first(m) if frame else m for frame, m in seen]
            return replace(self, branch=tuple(branch)), (), ()
        if len(frames) == 1 and not convs and 0 not in frames:
            ((change,),) = frames.values()
            back = change.inverse()  # type: ignore[operator]
            branch = [m if frame or is_elementwise(m) else nn.Sequential(back, m, change) for frame, m in seen]
            return replace(self, branch=tuple(branch)), (change,), (back,)
        raise Unsupported("the layers of its branch read different axes")

    @cached_property
    def family(self) -> str:
        """'vanilla', 'bottleneck', 'inverted' or 'mlp' (Zhang et al. 2024, Eq. 6-8); raises Unsupported otherwise."""
        layers = self.layers
        convs = [layer.conv for layer in layers]
        if len(layers) == 2 and all(isinstance(c, nn.Linear) for c in convs):
            return "mlp"
        for layer in layers:
            if isinstance(layer.conv, nn.Conv2d) and not square(layer.conv):
                raise Unsupported(f"{describe(layer.conv)} is not a square convolution with 'same' zero padding")
        kernels = [layer.kernel for layer in layers]
        groups = [c.groups if isinstance(c, nn.Conv2d) else 1 for c in convs]
        if len(layers) == 2 and groups == [1, 1] and kernels[0] == kernels[1]:
            return "vanilla"
        if len(layers) == 3 and kernels[0] == kernels[2] == 1 and groups[0] == groups[2] == 1:
            return "inverted" if layers[1].depthwise else "bottleneck"
        raise Unsupported(
            f"its branch of kernels {kernels} and groups {groups} has no known shape; known are two k x k "
            "convolutions, 1x1 / k x k / 1x1, 1x1 / depthwise / 1x1, or two linear layers"
        )

    @property
    def in_features(self) -> int:
        return self.framed()[0].stages[0].in_features

    @property
    def out_features(self) -> int:
        return self.framed()[0].stages[-1].out_features

    @property
    def stride(self) -> int:
        return math.prod(stage.stride for stage in self.framed()[0].stages)

    @property
    def transition(self) -> bool:
        """A block that changes width or stride."""
        return self.in_features != self.out_features or self.stride != 1

    @property
    def reads_signed(self) -> bool:
        """Whether the branch reads both signs. Without `pre` it reads what a block like itself has written."""
        last = self.pre[-1] if self.pre else self.out_act
        if isinstance(last, BatchNormAct2d):
            last = last.act
        return not isinstance(last, RECTIFIERS)

    @property
    def inner_act(self) -> nn.Module | None:
        """The first activation in the branch."""
        acts = (module.act if isinstance(module, BatchNormAct2d) else module for module in self.branch)
        return next(filter(is_activation, acts), None)

    @property
    def drop_path(self) -> float:
        """The rate of stochastic depth on the branch."""
        return max((m.drop_prob or 0.0 for m in self.branch if isinstance(m, DropPath)), default=0.0)


def as_channels_first(module: nn.Module) -> nn.Module:
    """A module that does on axis 1 of (B, C, H, W) what `module` does on the last of (B, H, W, C)."""
    if isinstance(module, nn.Linear):
        conv = layer_with(module.weight[..., None, None], module.bias)
        conv.weight.requires_grad_(module.weight.requires_grad)
        return conv.train(module.training)
    if is_elementwise(module):
        return module
    if isinstance(module, Scale | Shift) and isinstance(module.value, Tensor) and len(module.shape) <= 1:
        return type(module)(module.value, (*module.shape, 1, 1))
    if isinstance(module, Scale | Shift) and not isinstance(module.value, Tensor):
        return module
    return nn.Sequential(Permute((0, 2, 3, 1)), module, Permute((0, 3, 1, 2)))


@torch.no_grad()
def check_keeps_shape(module: nn.Module, stage: Stage) -> None:
    """Raises Unsupported for a module behind a convolution that changes the shape (pooling)."""
    axes = stage.conv.weight.ndim - 2
    if not axes or isinstance(module, (*NORMS, Scale, Shift)) or is_activation(module):
        return
    x = torch.zeros(2, stage.out_features, *[8] * axes, **factory(stage.conv))
    try:
        same = copy.deepcopy(module).eval()(x).shape == x.shape
    except Exception:  # of any kind: its forward is not ours
        same = False
    if not same:
        raise Unsupported(f"its branch holds {describe(module)}, which does not keep the shape of what it reads")


def is_elementwise(module: nn.Module) -> bool:
    """Whether a module acts on each number alone, in any order of axes."""
    return (is_activation(module) and not isinstance(module, nn.PReLU)) or isinstance(module, (nn.Dropout, *NO_OPS))


def describe(module: nn.Module) -> str:
    """The package and class of a module, 'timm.SEModule', or the function and line of a piece of a forward."""
    line = getattr(module, "meta", {}).get("line")
    if line:
        return f"{type(module).__name__!r} ({line})"
    return f"{type(module).__module__.split('.')[0]}.{type(module).__name__}"


def is_activation(module: nn.Module) -> bool:
    """Whether a module is an elementwise activation of torch.nn or timm, or a subclass that changes nothing."""
    known = known_class(module)
    listed = known.__module__.startswith(("torch.nn.modules.activation", "timm.layers.activations"))
    across = (nn.MultiheadAttention, nn.GLU, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
    return listed and inherits(type(module), known) and not isinstance(module, across)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module computes what PyTorch's BatchNorm does; timm's may have an activation behind it."""
    if behaves_as(module, BatchNormAct2d):
        return behaves_as(module.drop, nn.Identity, *DROPOUTS)  # type: ignore[arg-type]
    return behaves_as(module, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def parts(block: nn.Module, names: str) -> tuple[nn.Module, ...]:
    """The block's modules of these names, in this order; attributes that are None or missing are left out."""
    found = (getattr(block, name, None) for name in names.split())
    return tuple(module for module in found if isinstance(module, nn.Module))


def factory(module: nn.Module) -> dict[str, Any]:
    """Device and dtype of a module's first parameter, for building another beside it."""
    weight = next(module.parameters())
    return {"device": weight.device, "dtype": weight.dtype}


def conv_arguments(conv: nn.Conv2d) -> dict[str, Any]:
    """Arguments for a convolution with the same kernel size, stride, padding, dilation, device and dtype."""
    return {"kernel_size": conv.kernel_size, **conv_settings(conv), **factory(conv)}


def replace_weight(conv: Conv | nn.Conv1d, weight: Tensor, bias: Tensor | None, *, groups: int = 1) -> Conv:
    """A layer like this one with another weight and bias. A bias shorter than the weight is continued with zeros."""
    weight = weight.to(conv.weight)
    bias = None if bias is None else F.pad(bias, (0, len(weight) - len(bias))).to(weight)
    settings = {} if isinstance(conv, nn.Linear) else {**conv_settings(conv), "groups": groups}
    return layer_with(weight, bias, **settings)


def centred(weight: Tensor, kernel: int) -> Tensor:
    """A kernel in the middle of a larger one; a matrix as it is."""
    return weight if weight.ndim == 2 else F.pad(weight, [(kernel - weight.shape[-1]) // 2] * 4)


def centre_tap(weight: Tensor) -> Tensor:
    """(out, in / groups), a view: the middle tap of an odd, square kernel; a matrix as it is."""
    return weight if weight.ndim == 2 else weight[:, :, weight.shape[-1] // 2, weight.shape[-1] // 2]


def ungrouped(weight: Tensor, groups: int) -> Tensor:
    """The same convolution in one group: block-diagonal."""
    if groups == 1:
        return weight
    rows, size = weight.shape[0] // groups, weight.shape[1]
    dense = weight.new_zeros(weight.shape[0], size * groups, *weight.shape[2:])
    for g in range(groups):
        own = slice(g * rows, (g + 1) * rows)
        dense[own, g * size : (g + 1) * size] = weight[own]
    return dense


def norm_as_affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """s and t of a BatchNorm in eval mode, γ (x - μ) / √(ν + ε) + β = s x + t, in float64."""
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    s = torch.rsqrt(exact(norm.running_var) + norm.eps)
    s = s if norm.weight is None else s * exact(norm.weight)
    t = -exact(norm.running_mean) * s
    return s, t if norm.bias is None else t + exact(norm.bias)


def exact(tensor: Tensor) -> Tensor:
    """In float64, where that exists: on the CPU, or without weights on the meta device."""
    return tensor.detach().to("meta" if tensor.is_meta else "cpu", torch.float64)
