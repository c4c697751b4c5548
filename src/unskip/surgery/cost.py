"""Parameters, multiply-accumulates and activation memory of a network, counted on the meta device."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.flop_counter import FlopCounterMode

from unskip._core.errors import RUN_ERRORS, reason
from unskip._core.modules import checked_model, copied, vocabulary
from unskip.methods.rm import BesideNorm
from unskip.methods.stack import replaced
from unskip.surgery.memory import MemoryPlan, MemoryPlans, Recorder

SIDES = (32, 224, 64, 28)  # px of images that a network of unknown input size is tried on, CIFAR's first
STEPS = 32  # of a sequence, likewise


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of one network."""

    parameters: int
    macs: int | None  # multiply-accumulates of one forward pass of one image; None where it can't be run
    memory: int | None  # bytes: the peak of activations of one image in inference, norms folded


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The size of a network before and after a conversion: `print(cost)` is a table."""

    before: Size
    after: Size
    shape: tuple[int, ...]  # of one input
    blocks: int = 0  # residual blocks, if the conversion is `plainify`
    left: tuple[str, ...] = ()  # paths of the blocks that keep their skips (strict=False)

    @property
    def growth(self) -> float:
        """Parameters after the conversion over parameters before it."""
        return self.after.parameters / max(1, self.before.parameters)

    def check(self, limit: float, where: str, hint: str = "") -> None:
        """Raises a ValueError with this table, and a hint at a cheaper way, if the growth is above the limit."""
        if self.growth > limit:
            raise ValueError(
                f"{where}: the network would have {self.growth:.1f} times its parameters, more than limit={limit:g}. "
                f"Nothing was done; a higher limit does it, at the cost below{hint}.\n{self}"
            )

    def __str__(self) -> str:
        rows = [
            ("parameters", self.before.parameters, self.after.parameters, 1e6, "M"),
            ("MACs", self.before.macs, self.after.macs, 1e6, "M"),
            ("activations at once", self.before.memory, self.after.memory, 2**20, "MiB"),
        ]
        lines = [f"{'one image of ' + ' x '.join(map(str, self.shape)):<28}{'before':>14}{'after':>14}{'times':>9}"]
        for name, before, after, unit, symbol in rows:
            if before is None or after is None:
                lines.append(f"{name:<28}{'unknown':>14}{'unknown':>14}")
                continue
            numbers = "".join(f"{f'{n / unit:,.2f} {symbol}':>14}" for n in (before, after))
            lines.append(f"{name:<28}{numbers}{after / max(1, before):>9.2f}")
        if self.left:
            lines.append(
                f"residual blocks that keep their skips ({len(self.left)} of {self.blocks}): {', '.join(self.left)}"
            )
        return "\n".join(lines)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device: its structure without memory for weights."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copied("cost", model, memo)


def input_shape(model: nn.Module, example: Tensor | None, command: str = "cost") -> tuple[int, ...]:
    """The shape of one input: of the example, or as the model's attributes tell, or as its first layer suggests."""
    if example is not None:
        if not isinstance(example, Tensor) or example.ndim < 2:
            what = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
            raise ValueError(
                f"{command}: example={what} must be a batch of inputs, for instance torch.randn(1, 3, 224, 224)."
            )
        return tuple(example.shape[1:])
    own = getattr(model, "image_shape", None)
    config = getattr(model, "pretrained_cfg", None) or {}
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    channels = 3 if first is None else first.in_channels
    if own is not None:
        return tuple(own)
    if "input_size" in config and vocabulary(model):  # timm's sizes are those of images
        return tuple(config["input_size"][-1:])
    if "input_size" in config:
        return (channels, *config["input_size"][1:])
    return guessed_shape(model) or (channels, 224, 224)


def guessed_shape(model: nn.Module) -> tuple[int, ...]:
    """The shape of one input that the first layer with weights suggests; () where it does not tell.

    A convolution of stride 1 reads images of 32 px, as in networks for CIFAR, one with a stride 224 px, unless the
    model runs on another of SIDES alone.
    """
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    match first:
        case LazyModuleMixin():
            return ()
        case nn.Conv2d():
            small = max(first.stride) == 1 and not type(model).__module__.startswith("torchvision.models.")
            sides = SIDES if small else (224, *SIDES)
            shapes = [(first.in_channels, side, side) for side in sides]
            return next((shape for shape in shapes if _runs(model, shape)), shapes[0])
        case nn.Conv1d():
            return (first.in_channels, STEPS)
        case nn.Linear():
            return (first.in_features,)
        case nn.RNNBase():
            return (STEPS, first.input_size)
    return ()


def _runs(model: nn.Module, shape: tuple[int, ...]) -> bool:
    try:
        with torch.no_grad():
            on_meta(model).eval()(torch.empty(1, *shape, device="meta"))
    except Exception:  # of any kind: the forward is not ours
        return False
    return True


def size(model: nn.Module, shape: tuple[int, ...], *, must_run: bool = False) -> Size:
    """The size of a model in eval mode.

    Args:
        model: on the meta device; it may be changed.
        shape: of one input.
        must_run: whether a model that does not take this shape is an error.
    """
    parameters = sum(p.numel() for p in model.parameters())
    try:
        plan = plan_of(model, shape)
    except RUN_ERRORS as problem:
        if must_run:
            raise ValueError(
                f"cost: {type(model).__name__} does not run on an input of shape {shape}: {reason(problem)}."
            ) from problem
        return Size(parameters=parameters, macs=None, memory=None)
    return Size(parameters=parameters, macs=plan.macs, memory=max(plan.live()) * _dtype(model).itemsize)


def plan_of(model: nn.Module, shape: tuple[int, ...], *, in_place: bool = True) -> MemoryPlan:
    """The memory plan of a model on the meta device, which is changed: into eval mode, its norms folded."""
    x = torch.empty(1, *shape, dtype=torch.long if vocabulary(model) else _dtype(model), device="meta")
    recorder = Recorder(_without_norms(model.eval()), x)
    with FlopCounterMode(display=False) as flops:
        plan = recorder.run(in_place=in_place)
    return replace(plan, macs=flops.get_total_flops() // 2)


@overload
def memory_plan(model: nn.Module, example: Tensor | None = None, *, in_place: bool = True) -> MemoryPlan: ...
@overload
def memory_plan(
    model: Mapping[str, nn.Module], example: Tensor | None = None, *, in_place: bool = True
) -> MemoryPlans: ...
def memory_plan(
    model: nn.Module | Mapping[str, nn.Module], example: Tensor | None = None, *, in_place: bool = True
) -> MemoryPlan | MemoryPlans:
    """Returns what memory the activations of `model` need for one image: live bytes by layer, the peak, and FIFOs.

    Args:
        model: a network, of any method or residual, folded or not; or several by name, to compare them.
        example: a batch of inputs, for its shape; else the input size that the network knows, or its first layer
            suggests.
        in_place: whether activations, sums and products may write into a tensor that is not read afterwards.

    How it is counted, and what the FIFOs of a streaming target hold, says `unskip.surgery.memory`.
    `unskip.surgery.memory_variants` sets a residual network beside what `rm` and `pnnh` make of it.

    Example:
        >>> plan = unskip.memory_plan(unskip.create_model("resnet20"))
        >>> plan.peak("int8"), plan.peak("float32")  # bytes, for one image
        (49152, 196608)
    """
    if isinstance(model, Mapping):
        return MemoryPlans({name: memory_plan(each, example, in_place=in_place) for name, each in model.items()})
    model = checked_model("memory_plan", model)
    shape = input_shape(model, example, "memory_plan")
    try:
        return plan_of(on_meta(model), shape, in_place=in_place)
    except RUN_ERRORS as problem:
        raise ValueError(
            f"memory_plan: {type(model).__name__} does not run on an input of shape {shape}: {reason(problem)}."
        ) from problem


def compare(before: nn.Module, after: nn.Module, example: Tensor | None = None) -> Cost:
    """The cost of a conversion that has been done, from the model `before` it and the model `after` it.

    Args:
        before: the model as it was.
        after: the converted model; `plainify` has left its `surgery` there.
        example: a batch of inputs, for its shape; else the input size that the model knows, or its first layer
            suggests.
    """
    shape = input_shape(before, example)
    sizes = [size(on_meta(model), shape, must_run=example is not None) for model in (before, after)]
    surgery = getattr(after, "surgery", None)
    left = getattr(surgery, "left", ())
    blocks = len(getattr(surgery, "replaced", ())) + len(left)
    return Cost(before=sizes[0], after=sizes[1], shape=shape, blocks=blocks, left=left)


def _dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _without_norms(model: nn.Module) -> nn.Module:
    """The model without BatchNorm, which runs inside of the convolution before it wherever speed counts."""
    for module in list(model.modules()):
        norm = module.norm if isinstance(module, BesideNorm) else module
        if isinstance(norm, BatchNormAct2d):
            model = replaced(model, module, norm.act)
        elif isinstance(norm, nn.modules.batchnorm._BatchNorm):
            model = replaced(model, module, nn.Identity())
    return model
