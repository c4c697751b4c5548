"""plainify: a skip-free version of a residual network."""

import copy
import math
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import unskip.surgery.readers  # noqa: F401 - registers the readers
from unskip.coders import CoderBank
from unskip.methods import BlockSpec, Method, Unsupported, resolve_method
from unskip.methods.registry import method_name
from unskip.methods.spec import NORMS, describe
from unskip.surgery.cost import Cost, compare, on_meta
from unskip.surgery.reading import Reader, find_blocks, known_families
from unskip.surgery.signs import nonnegative_inputs


@dataclass(frozen=True, kw_only=True)
class Surgery:
    """What `plainify` did. It stays with the network as its attribute `surgery`."""

    method: Method
    replaced: tuple[str, ...]  # paths of the blocks that are skip-free now
    left: tuple[str, ...]  # paths of residual blocks that could not be changed (strict=False)
    kept: dict[str, int]  # skips that stay by design, by kind: {'attention': 12}


class UnsupportedBlockError(ValueError):
    """A residual block that the method can't make skip-free; the message names block, reason and way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} strict=False leaves such blocks as they are.")
        self.reason = reason  # the message without the way out, for callers that have another


def plainify(model: nn.Module, method: str | Method = "pnnh", *, strict: bool = True, **options: Any) -> nn.Module:
    """Returns a skip-free version of a residual network; `model` itself stays untouched.

    Args:
        model: a timm, torchvision or unskip residual network, or one whose blocks have a registered reader.
        method: how blocks are made skip-free: a name, or a method object. `unskip models --methods` lists the names
            with their options, and so does the page *Methods* of the documentation.
        strict: whether a residual block that can't be made skip-free is an error. With False it is a warning, and the
            block stays as it is.
        options: the options of the method.

    Stem, head and norms outside of the blocks keep their weights, and so do the blocks if the method says so
    (`keeps_weights`). If the network looks trained, a warning says how many trained weights are discarded. Stochastic
    depth stays on the learners of `pnnh` and `residual_half`; other methods remove it with the skip, because a dropped
    branch would leave nothing.

    An exact method ('rm') takes a network in eval mode and keeps its function. It is refused, with a table of the
    cost, if the network grows beyond the method's `limit`. `unskip.ship.convert` also proves that the function stayed.
    """
    how = _resolve("plainify", model, method, options)
    return _plainify(copy.deepcopy(model), how, strict=strict, original=model)


def cost(
    model: nn.Module, method: str | Method = "rm", *, example: Tensor | None = None, strict: bool = True, **options: Any
) -> Cost:
    """Returns what `plainify` with these arguments would cost, counted without weights: `print(cost)` is a table.

    Args:
        model: a residual network.
        method: as in `plainify`.
        example: a batch of inputs, for its shape; else the input size that the network knows, or an image of 224 px.
        strict: as in `plainify`.
        options: the options of the method; its `limit` does not count here.
    """
    return _cost(model, _resolve("cost", model, method, options), example, strict=strict)


def _cost(model: nn.Module, method: Method, example: Tensor | None, *, strict: bool) -> Cost:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # plainify itself warns of blocks that are left and weights that are lost
        after = _plainify(on_meta(model), method, strict=strict)
    return compare(model, after, example)


def _resolve(where: str, model: nn.Module, method: str | Method, options: dict[str, Any]) -> Method:
    """The method with its options, after a check of the model."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{where}: model={model!r} is not an nn.Module; build the network first, for instance with "
            "timm.create_model(name)."
        )
    how = resolve_method(method, options)
    training = [path for path, module in model.named_modules() if module.training]
    if getattr(how, "exact", False) and training:
        raise ValueError(
            f"{where}: {training[0] or type(model).__name__!r} is in training mode, where norms depend on the batch "
            f"and method {method_name(how)!r} can't keep the network's function; call .eval() on the network first."
        )
    return how


def _plainify(model: nn.Module, method: Method, *, strict: bool, original: nn.Module | None = None) -> nn.Module:
    """`plainify` in place. With `original`, the network before, the method's limit on its growth is enforced."""
    exact, limit = getattr(method, "exact", False), getattr(method, "limit", math.inf)
    name, label = type(model).__name__, method_name(method)
    bank = CoderBank()
    replaced: list[str] = []
    left: list[str] = []
    kept: Counter[str] = Counter()
    discarded: list[int] = []  # trained weights, by block
    done: dict[int, nn.Module] = {}  # by id of the old block: a block that is used twice stays one block
    blocks = [(path, block, reader, _read(block, path, reader, exact)) for path, block, reader in find_blocks(model)]
    if all(isinstance(spec, BlockSpec) and not spec.skip for *_, spec in blocks):
        _refuse(
            ValueError(
                f"plainify: {name} has no residual block that a reader knows: it is plain already, or its skips stand "
                f"elsewhere. Known blocks: {', '.join(known_families())}. Add one with unskip.surgery.register_reader."
            ),
            strict,
        )
    nonnegative: set[int] = set()
    if exact:
        out_acts = {id(block): getattr(spec, "out_act", None) for _, block, _, spec in blocks}
        nonnegative = nonnegative_inputs(model, {path: block for path, block, *_ in blocks}, out_acts)
    for path, block, reader, spec in blocks:
        if id(block) in done:
            model = _put(model, path, done[id(block)])
            replaced.append(path)
            continue
        try:
            if isinstance(spec, Unsupported):
                raise spec
            new = method.build(replace(spec, nonnegative=id(block) in nonnegative), bank)
        except Unsupported as reason:
            sentence = f"plainify: method {label!r} can't make block {path!r} of {name} skip-free: {reason}."
            _refuse(UnsupportedBlockError(sentence), strict)
            left.append(path)
            continue
        kept.update(spec.kept)
        if new is None:
            continue
        if not isinstance(new, nn.Module):
            raise ValueError(f"plainify: method {label!r} built {new!r} for {path!r}, which is not an nn.Module.")
        assert reader is not None
        if getattr(new, "keeps_skip", False):
            kept["block"] += 1
        if not exact and _looks_trained(block):
            discarded.append(_lost_weights(spec, new))
        new.train(block.training)
        done[id(block)] = reader.write(block, new)
        model = _put(model, path, done[id(block)])
        if spec.skip:
            replaced.append(path)
        if original is not None and _parameters(model) > limit * _parameters(original):
            _cost(original, method, None, strict=strict).check(limit, "plainify", getattr(method, "cheaper", ""))

    if any(discarded):
        warnings.warn(
            f"plainify: {name} looks trained, but with method {label!r} {sum(discarded):,} trained weights in "
            f"{sum(map(bool, discarded))} blocks are discarded, so the network must be trained anew.",
            stacklevel=3,
        )
    if hasattr(method, "finish"):
        method.finish(model)
    model.surgery = Surgery(method=method, replaced=tuple(replaced), left=tuple(left), kept=dict(kept))  # type: ignore[assignment]
    return model


def _read(block: nn.Module, path: str, reader: Reader | None, exact: bool) -> BlockSpec | Unsupported:
    """What the reader makes of a block, or why it can't be read."""
    if reader is None:
        name = f"{type(block).__module__}.{type(block).__qualname__}"  # in full: timm has several classes of one name
        return Unsupported(
            f"no reader knows the class {name}. Known blocks: {', '.join(known_families())}. "
            "Add one with unskip.surgery.register_reader"
        )
    if exact and any(m._forward_hooks or m._forward_pre_hooks for m in block.modules()):
        return Unsupported("a forward hook in it may change what it computes; remove it first")
    try:
        spec = reader.read(block, path)
    except Unsupported as reason:
        return reason
    if not isinstance(spec, BlockSpec) or not spec.branch:
        raise ValueError(f"plainify: the reader of {describe(block)} gave {spec!r} for {path!r}, not a BlockSpec.")
    return spec


def _put(model: nn.Module, path: str, block: nn.Module) -> nn.Module:
    if not path:
        return block
    model.set_submodule(path, block)
    return model


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _lost_weights(spec: BlockSpec, new: nn.Module) -> int:
    """Weights of the block, its projection included, that do not live on in the new one."""
    still_there = {id(p) for p in new.parameters()}
    modules = [*spec.branch, *([] if spec.shortcut is None else [spec.shortcut])]
    return sum(p.numel() for module in modules for p in module.parameters() if id(p) not in still_there)


def _refuse(refusal: ValueError, strict: bool) -> None:
    """Raises the error, or warns of it, without its way out, which has been taken."""
    if strict:
        raise refusal from None
    warnings.warn(getattr(refusal, "reason", str(refusal)), stacklevel=4)


def _looks_trained(block: nn.Module) -> bool:
    """Whether a norm in the block has seen data or training: fresh ones have mean 0, gains 0 or 1 and bias 0.

    A block without norms counts as fresh.
    """
    for norm in block.modules():
        if not isinstance(norm, NORMS) or any(t.is_meta for t in (*norm.parameters(), *norm.buffers())):
            continue
        mean, gain, bias = (getattr(norm, name, None) for name in ("running_mean", "weight", "bias"))
        for state in (mean, bias):
            if isinstance(state, torch.Tensor) and torch.any(state.detach() != 0):
                return True
        if isinstance(gain, torch.Tensor) and torch.any((gain.detach() != 0) & (gain.detach() != 1)):
            return True
    return False
