"""plainify: a skip-free version of a residual network."""

import copy
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import unskip.surgery.readers  # noqa: F401 - registers the readers
from unskip.coders import CoderBank
from unskip.methods import BlockSpec, Method, Unsupported, resolve_method
from unskip.methods.registry import method_name
from unskip.methods.spec import NORMS, describe
from unskip.surgery.cost import Cost, input_shape, on_meta, size
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
    """A block that the method can't make skip-free. A whole sentence, with the way out that the library has."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} strict=False leaves such blocks as they are.")
        self.reason = reason  # for callers who have a way out of their own


def plainify(model: nn.Module, method: str | Method = "pnnh", *, strict: bool = True, **options: Any) -> nn.Module:
    """Returns a skip-free version of a residual network; the given one stays untouched.

    Args:
        model: a timm, torchvision or unskip residual network, or one whose blocks have a registered reader.
        method: how blocks are made skip-free: 'plain', 'pnnh', 'pnnh_paper', 'residual_half' (an upper bound, which
            keeps its skips), 'seq', 'seq_bottle', 'dirac', 'iso', 'delta_tanh', 'looks_linear', 'rm' (exact: the
            network keeps its function), or a registered one.
        strict: whether a residual block that can't be made skip-free is an error. With False it is a warning, and that
            block stays as it is.
        options: the method's own options, see `unskip.methods`; for 'pnnh': ratio, pretext, norm, scale, transition,
            signed, transient, hidden, head_norm, block and seed; for 'dirac': a and b; for 'iso': shift and init; for
            'delta_tanh': gain and bias; for 'looks_linear': gain; for 'seq': init, tie, pre_relu, position and seed;
            for 'rm': norm, relu6, scale, middle and limit.

    The network's stem, head and norms outside the blocks keep their weights; `pnnh` adds a norm before the pooling of
    our CIFAR ResNets (head_norm). If the network looks trained (its norms tell), a warning says how many trained
    weights are discarded with the old blocks. Stochastic depth stays on the learners of `pnnh` and `residual_half`;
    with the other methods it goes with the skip, since where it drops a branch nothing would be left.

    An exact method takes a network in eval mode and discards nothing; where it would make the network larger than its
    `limit` allows, it is refused with what `unskip.surgery.cost` says. `unskip.ship.convert` is plainify with the proof
    that the function stayed.
    """
    how = _resolve("plainify", model, method, options)
    limit = getattr(how, "limit", math.inf)
    if limit < math.inf:
        price = _cost(model, how, None, label=_label(method), strict=strict)
        price.check(limit, "plainify", getattr(how, "cheaper", ""))
    return _plainify(copy.deepcopy(model), how, label=_label(method), strict=strict)


def cost(
    model: nn.Module, method: str | Method = "rm", *, example: Tensor | None = None, strict: bool = True, **options: Any
) -> Cost:
    """What `plainify` with these arguments would make of the network's size. Nothing is built, nothing has weights.

    Args:
        model: a residual network.
        method: as in `plainify`.
        example: a batch of inputs, for its shape; else the input size that the network knows, or an image of 224 px.
        strict: as in `plainify`.
        options: the method's own options; its `limit` does not count here.

    Returns:
        A `Cost`: `print(cost)` shows parameters, MACs and activation memory before and after.
    """
    how = _resolve("cost", model, method, options)
    return _cost(model, how, example, label=_label(method), strict=strict)


def _cost(model: nn.Module, how: Method, example: Tensor | None, *, label: str, strict: bool) -> Cost:
    shape = input_shape(model, example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is left or lost, plainify itself says
        after = _plainify(on_meta(model), how, label=label, strict=strict)
    must_run = example is not None
    surgery: Surgery = after.surgery  # type: ignore[assignment]
    return Cost(
        before=size(on_meta(model), shape, must_run=must_run),
        after=size(after, shape, must_run=must_run),
        shape=shape,
        blocks=len(surgery.replaced) + len(surgery.left),
        left=surgery.left,
    )


def _resolve(where: str, model: nn.Module, method: str | Method, options: dict[str, Any]) -> Method:
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{where}: model={model!r} is not an nn.Module; build the network first, for instance with "
            "timm.create_model(name)."
        )
    how = resolve_method(method, options)
    if getattr(how, "exact", False):
        for path, module in model.named_modules():
            if module.training:
                raise ValueError(
                    f"{where}: {path or type(model).__name__!r} is in training mode, where norms depend on the batch "
                    f"and method {_label(method)} can't keep the network's function; call .eval() on the network first."
                )
    return how


def _plainify(network: nn.Module, how: Method, *, label: str, strict: bool) -> nn.Module:
    """`plainify` of a network that may be changed."""
    exact = getattr(how, "exact", False)
    name = type(network).__name__
    bank = CoderBank()
    replaced: list[str] = []
    left: list[str] = []
    kept: dict[str, int] = {}
    discarded: list[int] = []  # trained weights, by block
    done: dict[int, nn.Module] = {}  # a block that is used twice is replaced by one and the same
    blocks = list(find_blocks(network))
    if not any(_may_skip(block, path, reader) for path, block, reader in blocks):
        _refuse(
            ValueError(
                f"plainify: {name} has no residual block that a reader knows: it is plain already, or its skips stand "
                f"elsewhere. Known blocks: {', '.join(known_families())}. Add one with unskip.surgery.register_reader."
            ),
            strict,
        )
    nonnegative = _nonnegative(network, blocks) if exact else set()
    for path, block, reader in blocks:
        if id(block) in done:
            network = _put(network, path, done[id(block)])
            replaced.append(path)
            continue
        refusal = None
        try:
            spec, new = _operate(block, path, reader, how, bank, nonnegative=id(block) in nonnegative)
        except Unsupported as reason:
            refusal = UnsupportedBlockError(
                f"plainify: method {label} can't make block {path!r} of {name} skip-free: {reason}."
            )
        if refusal:
            _refuse(refusal, strict)
            left.append(path)
            continue
        for kind in spec.kept + (("block",) if getattr(new, "keeps_skip", False) else ()):
            kept[kind] = kept.get(kind, 0) + 1
        if new is None:
            continue
        assert reader is not None
        if not exact and _looks_trained(block):
            gone = _lost_weights(spec, new)
            discarded += [gone] if gone else []
        new.train(block.training)
        done[id(block)] = reader.write(block, new)
        network = _put(network, path, done[id(block)])
        if spec.skip:
            replaced.append(path)

    if discarded:
        warnings.warn(
            f"plainify: {name} looks trained, but with method {label} {sum(discarded):,} trained weights in "
            f"{len(discarded)} blocks are discarded, so the network must be trained anew.",
            stacklevel=3,
        )
    finish = getattr(how, "finish", None)
    if finish is not None:
        finish(network)
    network.surgery = Surgery(method=how, replaced=tuple(replaced), left=tuple(left), kept=kept)  # type: ignore[assignment]
    return network


def _operate(
    block: nn.Module, path: str, reader: Reader | None, method: Method, bank: CoderBank, *, nonnegative: bool
) -> tuple[BlockSpec, nn.Module | None]:
    """The block's spec and its skip-free version, None where it stays."""
    if reader is None:
        # In full, for timm has several classes of one name.
        name = f"{type(block).__module__}.{type(block).__qualname__}"
        raise Unsupported(
            f"no reader knows the class {name}. Known blocks: {', '.join(known_families())}. "
            "Add one with unskip.surgery.register_reader"
        )
    if getattr(method, "exact", False) and any(m._forward_hooks or m._forward_pre_hooks for m in block.modules()):
        raise Unsupported("a forward hook in it may change what it computes; remove it first")
    spec = reader.read(block, path)
    if not isinstance(spec, BlockSpec) or not spec.branch:
        raise ValueError(f"plainify: the reader of {describe(block)} gave {spec!r} for {path!r}, not a BlockSpec.")
    new = method.build(replace(spec, nonnegative=True) if nonnegative else spec, bank)
    if new is not None and not isinstance(new, nn.Module):
        raise ValueError(f"plainify: method {_label(method)} built {new!r} for {path!r}, which is not an nn.Module.")
    return spec, new


def _nonnegative(network: nn.Module, blocks: list[tuple[str, nn.Module, Reader | None]]) -> set[int]:
    """The ids of the blocks that are proven to read nothing negative."""
    out_acts: dict[int, nn.Module | None] = {}
    for path, block, reader in blocks:
        try:
            out_acts[id(block)] = None if reader is None else reader.read(block, path).out_act
        except Unsupported:
            out_acts[id(block)] = None
    return nonnegative_inputs(network, {path: block for path, block, _ in blocks}, out_acts)


def _put(network: nn.Module, path: str, block: nn.Module) -> nn.Module:
    if not path:
        return block
    network.set_submodule(path, block)
    return network


def _lost_weights(spec: BlockSpec, new: nn.Module) -> int:
    """Weights of the block, its projection included, that do not live on in the new one."""
    still_there = {id(p) for p in new.parameters()}
    modules = [*spec.branch, *([] if spec.shortcut is None else [spec.shortcut])]
    return sum(p.numel() for module in modules for p in module.parameters() if id(p) not in still_there)


def _may_skip(block: nn.Module, path: str, reader: Reader | None) -> bool:
    try:
        return reader is None or getattr(reader.read(block, path), "skip", True)
    except Unsupported:
        return True


def _refuse(refusal: ValueError, strict: bool) -> None:
    if strict:
        raise refusal
    warnings.warn(getattr(refusal, "reason", str(refusal)), stacklevel=4)  # the way out has been taken


def _label(method: str | Method) -> str:
    return repr(method if isinstance(method, str) else method_name(method))


def _looks_trained(block: nn.Module) -> bool:
    """Whether a norm in the block has seen data or training: fresh ones have mean 0, gains 0 or 1 and bias 0.

    A block without norms tells nothing, and counts as fresh.
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
