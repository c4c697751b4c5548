"""Fast layers for any model: the stem (`unskip.kernels.stem`) and depthwise convolutions (`.depthwise`)."""

from collections.abc import Callable, Sequence
from typing import Any

from timm.models._efficientnet_blocks import InvertedResidual
from torch import Tensor, nn

from unskip._core.modules import as_class, has_hooks
from unskip.kernels.depthwise import TOPS, JoinedSequential, open_sequences, run_layers, split_norm, supports_conv
from unskip.kernels.stem import StemConv2d, StemPool, is_stem, is_stem_pool


def use_fast_layers(model: nn.Module, *, stem: bool = True, depthwise: bool = True) -> list[str]:
    """Replaces layers of `model`, in place, by layers that compute the same function faster on a GPU.

    Parameters stay the same objects under the same names, so that optimizers and state dicts remain valid. Layers with
    hooks are left alone. On a CPU, in other precisions and in exported programs the replacements run as the ordinary
    layers. Each has a method `to_ordinary()` that returns the ordinary layer.

    Args:
        model: changed in place.
        stem: replaces the first convolution, if it has stride 2 and at most 4 input channels, and the first 3 x 3 max
            pooling.
        depthwise: fuses BatchNorm, ReLU or ReLU6 and a 3 x 3 depthwise convolution, where these follow one another in
            an `nn.Sequential` (torchvision's MobileNet-V2) or in timm's `InvertedResidual`.

    Returns:
        The paths of the replaced layers and blocks; '' is the model itself.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"use_fast_layers: model={model!r} must be an nn.Module, for instance unskip.create_model(...)."
        )
    found = (_stem(model) if stem else []) + (_depthwise(model) if depthwise else [])
    for _, module, kind in found:
        module.__class__ = kind  # not another object: whatever refers to the module stays valid
    return [path for path, _, _ in found]


Replacement = tuple[str, nn.Module, type[nn.Module]]  # path, module, its new class


def _stem(model: nn.Module) -> list[Replacement]:
    """The first convolution and, if that is one of a stem, the first pooling."""
    found: list[Replacement] = []
    wanted: tuple[tuple[type[nn.Module], Callable[[Any], bool], type[nn.Module]], ...] = (
        (nn.Conv2d, is_stem, StemConv2d),
        (nn.MaxPool2d, is_stem_pool, StemPool),
    )
    for kind, fits, fast in wanted:
        path, layer = next(((path, m) for path, m in model.named_modules() if isinstance(m, kind)), ("", None))
        if type(layer) is not kind or not fits(layer) or has_hooks(layer):
            break
        found.append((path, layer, fast))
    return found


def _depthwise(model: nn.Module) -> list[Replacement]:
    """The blocks and sequences with layers that can be fused."""
    found: list[Replacement] = []
    inside: set[nn.Module] = set()  # of a sequence that is replaced, whose forward sees these layers
    for path, module in model.named_modules():
        if module in inside or has_hooks(module):
            continue
        if type(module) is InvertedResidual and getattr(module, "conv_s2d", None) is None and _fusible(_branch(module)):
            found.append((path, module, FastInvertedResidual))
        elif type(module) is nn.Sequential and _fusible(open_sequences(module)):
            found.append((path, module, JoinedSequential))
            inside |= set(module.modules())
    return found


def _fusible(layers: Sequence[nn.Module]) -> bool:
    """Whether a norm, an activation and a depthwise convolution that the kernels support follow one another."""
    parts = [part for layer in layers for part in split_norm(layer)]
    for norm, act, conv in zip(parts, parts[1:], parts[2:], strict=False):
        kinds = isinstance(norm, nn.BatchNorm2d) and type(act) in TOPS and supports_conv(conv)
        if kinds and not any(map(has_hooks, (norm, act, conv))):
            return True
    return False


class FastInvertedResidual(InvertedResidual):
    """timm's inverted residual block with its layers fused as in `JoinedSequential`; the same parameters and names."""

    def forward(self, x: Tensor) -> Tensor:
        y = run_layers(_branch(self), x)
        return self.drop_path(y) + x if self.has_skip else y

    def to_ordinary(self) -> InvertedResidual:
        """timm's block with the same layers."""
        return as_class(InvertedResidual, self)


def _branch(block: InvertedResidual) -> list[nn.Module]:
    parts: Any = (block.conv_pw, block.bn1, block.conv_dw, block.bn2, block.aa, block.se, block.conv_pwl, block.bn3)
    return open_sequences(parts)
