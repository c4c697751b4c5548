"""fold: a trained network as convolution (or linear layer) + bias + activation + pooling, the same function.

    γ (W x - μ) / √(ν + ε) + β  =  W' x + b'               BatchNorm goes into the layer before it (or into the one
                                                           behind it, where that does not pad)
    W_2 σ(W_1 x) + W_dec σ(W_enc x)  =  W_2' σ(W_1' x)     learner and coder are one layer (`unskip.methods.stack`)
    CReLU(W x)  =  ReLU([W; -W] x)                         looks_linear
    Ŵ, Wᵀ and whatever a special layer computes with       become weights of ordinary ones (`unskip._core.layers`)

Weights are computed in float64. What comes out is compared with what went in before anybody gets it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from unskip._core.layers import behaves_as, has_ordinary_weight
from unskip._core.modules import unwrap
from unskip.kernels.stem import PooledStem, is_folded_stem
from unskip.methods import CReLU, Unsupported, replaced, stacked
from unskip.methods.spec import DROPOUTS, NORMS, Conv, is_activation, is_batch_norm, norm_as_affine, replace_weight
from unskip.methods.stack import absorb
from unskip.surgery import find_blocks
from unskip.surgery.proof import find_example, hidden_decisions, in_float64, proven
from unskip.surgery.readers.transformer import SkipFreeBlock
from unskip.surgery.tracing import ADDITIONS, TraceStep, trace
from unskip.surgery.verify import Check

Form = Literal["dense", "fast"]
BatchNorm = nn.modules.batchnorm._BatchNorm

LAYERS = {"conv2d", "linear"}
POOLING = {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "mean", "amax"}
SHAPES = {"flatten", "reshape", "view", "squeeze"}
ACTIVATIONS = {"relu", "relu_", "leaky_relu", "prelu", "tanh", "sigmoid", "silu", "gelu", "elu", "hardtanh", "softplus"}
PER_CHANNEL = {"mean", "adaptive_avg_pool2d", "flatten"}  # an affine map of channels passes through these


@dataclass(frozen=True, kw_only=True)
class Folding:
    """What `fold` did. It stays with the network as its attribute `folding`."""

    form: Form
    exact: float  # relative error of the output in float64, before the weights were stored
    check: Check  # of the network that is returned, in its own dtype


class Refusal(ValueError):  # noqa: N818 - a refusal with a reason
    """Something in the network has no exact folded form. A whole sentence with its path."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"fold: {path!r} {reason}")


def fold(model: nn.Module, form: Form = "dense", *, example: Tensor | None = None) -> nn.Module:
    """The same function as convolution or linear layers with bias, activations and pooling, and nothing else.

    For CNNs and MLPs that our methods make. Of a transformer, learner and coder are stacked; its norms, its attention
    and the skips of that stay. The given network stays untouched.

    Args:
        model: a trained network without skips, in eval mode.
        form: 'dense' makes one layer of learner and coder; 'fast' keeps a closed-form coder beside the learner as the
            cheap operation that it is (sums of neighbouring channels, pooled in transitions), and the stem and
            depthwise convolutions as `unskip.kernels.stem` and `.depthwise` compute them on a GPU, and folds all the
            rest: fitted coders, and blocks whose sum a norm reads. The bias and ReLU of such a stem stand behind its
            pooling. Where learner and coder become one layer, what its depthwise convolution reads is filled up to a
            multiple of 8 channels, with zeros.
        example: a batch of inputs to check the result on; without it small random images that the network takes.

    Returns:
        A new network in the same dtype and on the same device. Its attribute `folding` holds what `verify` found.

    Raises:
        ValueError: with the path of whatever can't be folded exactly.

    Example:
        >>> plain = unskip.fold(unskip.create_model("pnnh_resnet20").eval())
        >>> plain(torch.zeros(2, 3, 32, 32)).shape  # (B, C, H, W) -> (B, classes), as before
        torch.Size([2, 10])
        >>> plain.folding.check.ok(1e-4)
        True
    """
    if form not in get_args(Form):
        raise ValueError(f"fold: form={form!r} must be 'dense' or 'fast'.")
    original = in_float64("fold", model)
    x = find_example("fold", original, example)
    transformer = any(isinstance(module, SkipFreeBlock) for module in original.modules())
    _refuse_skips(original)
    if not transformer and (why := hidden_decisions(original)):
        raise Refusal(type(original).__name__, why)
    for path, module in original.named_modules():
        if not transformer and isinstance(module, NORMS) and getattr(module, "running_mean", None) is None:
            kind = type(module).__name__
            raise Refusal(path, f"({kind}) depends on its input when the network runs, so no layer can absorb it.")

    fast = form == "fast"
    folded = stacked(original, fast=fast, dense=_read_by_norms(original, x) if fast else (), command="fold")
    if not transformer:
        folded = _without_chance(folded)
    folded = absorb_norms(folded, x)
    folded = _absorb_crelu(folded, x)
    folded = pool_stem(folded, x)
    folded.eval()  # what was built on the way is in training mode
    if not transformer:
        _refuse_leftovers(trace(folded, x.clone()))

    folded, exact, check = proven("fold", unwrap(model), original, folded, x)
    folded.folding = Folding(form=form, exact=exact, check=check)  # type: ignore[assignment]
    return folded


def blocks_with_skips(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of every block that keeps a skip connection of its own."""
    kept = [(path, module) for path, module in model.named_modules() if getattr(module, "keeps_skip", False)]
    for path, block, reader in find_blocks(model):
        try:
            if reader is not None and reader.read(block, path).skip:
                kept.append((path, block))
        except Unsupported:
            kept.append((path, block))
    return kept


def _refuse_skips(model: nn.Module) -> None:
    """Names the first block with a skip connection of its own."""
    for path, block in blocks_with_skips(model):
        rm = "train one that unskip.plainify has made, or remove its skips exactly with unskip.plainify(model, 'rm')"
        remedy = getattr(block, "skip_remedy", rm)
        raise Refusal(
            path, f"({type(block).__name__}) keeps its skip connection, and fold is for plain networks; {remedy}."
        )


def _read_by_norms(model: nn.Module, x: Tensor) -> set[str]:
    """Paths of modules, not themselves layers, whose output a norm reads. It goes into their ordinary layer."""
    normed = {
        step.sources[0].module
        for step in trace(model, x.clone())
        if step.function == "batch_norm" and step.sources[0] is not None and step.sources[0].function not in LAYERS
    }
    return {path for path, module in model.named_modules() if module in normed}


def _without_chance(model: nn.Module) -> nn.Module:
    """Dropout and stochastic depth do nothing in eval mode; a folded network has none."""
    for module in list(model.modules()):
        if behaves_as(module, *DROPOUTS):
            model = replaced(model, module, nn.Identity().eval())
        if isinstance(getattr(module, "drop_rate", None), float):
            module.drop_rate = 0.0  # type: ignore[assignment]
    return model


def absorb_norms(model: nn.Module, x: Tensor) -> nn.Module:
    """Every BatchNorm into the layer before it, or else into the one behind it."""
    norms = {path: module for path, module in model.named_modules() if is_batch_norm(module)}
    if not norms:
        return model
    steps = trace(model, x.clone())
    runs = _runs(steps)
    for path, norm in norms.items():
        own = [step for step in runs.get(norm, []) if step.function == "batch_norm"]
        if not own:
            continue  # it is there, but never runs
        before, behind = _layer_before(own, runs), _layer_behind(own, runs)
        if before is not None:
            layer = absorb(norm, before)
        elif behind is not None:
            before = behind
            layer = _absorb_backwards(norm, behind)
        else:
            raise Refusal(path, _why_not(norm, own[0]))
        act = norm.act if isinstance(norm, BatchNormAct2d) else nn.Identity()
        model = replaced(replaced(model, before, layer), norm, act.eval())
        runs[layer] = runs.pop(before)
        for step in runs[layer]:
            step.module = layer
        # As if the norm had never run: what was on both of its sides is neighbours now, for the next norm.
        for step in own:
            (source,) = step.sources
            readers = step.readers
            if source is not None:
                source.readers = [r for r in source.readers if r is not step] + readers
            for reader in readers:
                reader.sources = [source if s is step else s for s in reader.sources]
    return model


def _runs(steps: list[TraceStep]) -> dict[nn.Module, list[TraceStep]]:
    """The steps of each module."""
    runs: dict[nn.Module, list[TraceStep]] = {}
    for step in steps:
        runs.setdefault(step.module, []).append(step)
    return runs


def _is_layer(step: TraceStep | None) -> bool:
    return step is not None and step.function in LAYERS and has_ordinary_weight(step.module)


def _layer_before(own: list[TraceStep], runs: dict[nn.Module, list[TraceStep]]) -> Conv | None:
    """The layer that writes what these steps of one module read, and that nothing else reads."""
    found: set[nn.Module] = set()
    for step in own:
        (source,) = step.sources[:1] or (None,)
        if (
            source is None
            or not _is_layer(source)
            or any(reader.module is not step.module for reader in source.readers)
        ):
            return None
        if isinstance(source.module, nn.Linear) and isinstance(step.module, BatchNorm) and len(source.shape) != 2:
            return None  # the norm reads another axis than the layer writes
        found.add(source.module)
    (layer, *others) = found
    if others or len(runs[layer]) != len({id(step.sources[0]) for step in own}):
        return None
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    return layer


def _layer_behind(own: list[TraceStep], runs: dict[nn.Module, list[TraceStep]]) -> Conv | None:
    """The layer that alone reads what a norm writes, through pooling at most, and that does not pad."""
    if len(own) != 1 or _activates(own[0].module):
        return None
    step, channels = own[0], own[0].shape[1]
    while len(step.readers) == 1:
        step = step.readers[0]
        module = step.module
        if _is_layer(step):
            assert isinstance(module, nn.Conv2d | nn.Linear)
            read = step.sources[0]
            assert read is not None
            if isinstance(module, nn.Linear):
                fits = len(read.shape) == 2 and module.in_features == channels
            else:
                fits = module.padding in ("valid", (0, 0)) and module.in_channels == channels
            return module if fits and len(runs[module]) == 1 else None
        if step.function not in PER_CHANNEL or len(step.shape) < 2 or step.shape[1] != channels:
            return None
    return None


def _activates(norm: nn.Module) -> bool:
    return isinstance(norm, BatchNormAct2d) and not isinstance(norm.act, nn.Identity)


@torch.no_grad()
def _absorb_backwards(norm: BatchNorm, layer: Conv) -> Conv:
    """W (s x + t) + b = (W s) x + (W t + b)."""
    s, t = norm_as_affine(norm)
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    weight = layer.weight
    # (out, in / groups): what each row of the weight reads
    s, t = (v.view(groups, -1).repeat_interleave(weight.shape[0] // groups, 0) for v in (s, t))
    column = (*s.shape, *[1] * (weight.ndim - 2))
    shift = (weight * t.view(column)).flatten(1).sum(1)
    return replace_weight(
        layer, weight * s.view(column), shift if layer.bias is None else layer.bias + shift, groups=groups
    )


def _why_not(norm: BatchNorm, step: TraceStep) -> str:
    (source,) = step.sources[:1]
    kind = type(norm).__name__
    what = "the input" if source is None else f"the {source.function} of {source.where!r}"
    behind = ", ".join(f"the {r.function} of {r.where!r}" for r in step.readers) or "the output"
    return (
        f"({kind}) reads {what}, and {behind} reads it: a norm can only go into a layer whose output it alone reads, "
        "or into one behind it that does not pad, since the zeros of a padded convolution stand behind the norm."
    )


def _absorb_crelu(model: nn.Module, x: Tensor) -> nn.Module:
    """CReLU(W x + b) = ReLU([W; -W] x + [b; -b])."""
    if not any(behaves_as(module, CReLU) for module in model.modules()):
        return model
    runs = _runs(trace(model, x.clone()))
    for act in [module for module in runs if behaves_as(module, CReLU)]:
        own = [step for step in runs[act] if step.sources[0] is None or step.sources[0].module is not act]
        layer = _layer_before(own, runs)
        if layer is None or (isinstance(layer, nn.Conv2d) and layer.groups > 1):
            continue
        bias = None if layer.bias is None else torch.cat([layer.bias, -layer.bias])
        mirrored = replace_weight(layer, torch.cat([layer.weight, -layer.weight]), bias)
        model = replaced(replaced(model, layer, mirrored), act, nn.ReLU().eval())
        runs[mirrored] = runs.pop(layer)
        for step in runs[mirrored]:
            step.module = mirrored
    return model


def pool_stem(model: nn.Module, x: Tensor) -> nn.Module:
    """A stem of ours, convolution with bias, ReLU and pooling that nothing else reads, as one module."""
    runs = _runs(trace(model, x.clone()))
    pool = next((module for module, own in runs.items() if own[0].function == "max_pool2d"), None)
    found = [] if pool is None else [pool]
    while 0 < len(found) < 3:
        first = runs.get(found[0], [])
        source = first[0].sources[0] if len(first) == 1 else None
        if source is None or len(source.readers) != 1:
            return model
        found.insert(0, source.module)
    if not found or not is_folded_stem(*found) or len(runs[found[0]]) != 1:
        return model
    stem = PooledStem()
    for module, new in zip(found, (stem, nn.Identity(), nn.Identity()), strict=True):
        model = replaced(model, module, new)
    stem.extend(found)
    return model


def _refuse_leftovers(steps: list[TraceStep]) -> None:
    """Names the first function that is no layer, activation, pooling or change of shape."""
    for step in steps:
        module = step.module
        if step.function in LAYERS | POOLING | SHAPES | ACTIVATIONS or is_activation(module):
            continue
        if getattr(module, "is_activation", False) or hasattr(module, "to_fast"):
            continue
        if step.function == "pad" and behaves_as(module, nn.ZeroPad2d):
            continue  # zeros on one side, which PyTorch's convolutions can't add themselves
        if len(step.sources) > 1 and step.function in ADDITIONS:
            raise Refusal(step.where, f"({type(module).__name__}) adds two tensors: it keeps a skip connection.")
        raise Refusal(
            step.where, f"({type(module).__name__}) calls {step.function!r}, which is no convolution, linear layer, "
            "activation or pooling and has no exact folded form here."
        )  # fmt: skip
