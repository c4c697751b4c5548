"""plainify: a skip-free version of a residual network."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import unskip.surgery.readers  # noqa: F401 - registers the readers
from unskip.coders import CoderBank
from unskip.methods import BlockSpec, Method, Unsupported, resolve_method
from unskip.methods.spec import NORMS, describe
from unskip.surgery.reading import Reader, find_blocks, known_families


@dataclass(frozen=True, kw_only=True)
class Surgery:
    """What `plainify` did. It stays with the network as its attribute `surgery`."""

    method: Method
    replaced: tuple[str, ...]  # paths of the blocks that are skip-free now
    left: tuple[str, ...]  # paths of residual blocks that could not be changed (strict=False)
    kept: dict[str, int]  # skips that stay by design, by kind: {'attention': 12}


def plainify(model: nn.Module, method: str | Method = "pnnh", *, strict: bool = True, **options: Any) -> nn.Module:
    """Returns a skip-free version of a residual network; the given one stays untouched.

    Args:
        model: a timm, torchvision or unskip residual network, or one whose blocks have a registered reader.
        method: how blocks are made skip-free: 'plain', 'pnnh', 'pnnh_paper', 'residual_half' (an upper bound, which
            keeps its skips), 'seq', 'seq_bottle', 'dirac', 'iso', 'delta_tanh', 'looks_linear', or a registered one.
        strict: whether a residual block that can't be made skip-free is an error. With False it is a warning, and that
            block stays as it is.
        options: the method's own options, see `unskip.methods`; for 'pnnh': ratio, pretext, norm, scale, transition,
            signed, transient, hidden, head_norm and seed; for 'dirac': a and b; for 'iso': shift and init; for
            'delta_tanh': gain and bias; for 'looks_linear': gain; for 'seq': init, tie, pre_relu, position and seed.

    The network's stem, head and norms outside the blocks keep their weights; `pnnh` adds a norm before the pooling of
    our CIFAR ResNets (head_norm). If the network looks trained (its norms tell), a warning says how many trained
    weights are discarded with the old blocks.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"plainify: model={model!r} is not an nn.Module; build the network first, for instance with "
            "timm.create_model(name)."
        )
    how = resolve_method(method, options)
    network = copy.deepcopy(model)
    name = type(model).__name__

    bank = CoderBank()
    replaced: list[str] = []
    left: list[str] = []
    kept: dict[str, int] = {}
    discarded: list[int] = []  # trained weights, by block
    done: dict[int, nn.Module] = {}  # a block that is used twice is replaced by one and the same
    blocks = list(find_blocks(network))
    if not any(_may_skip(block, path, reader) for path, block, reader in blocks):
        _refuse(
            f"plainify: {name} has no residual block that a reader knows: it is plain already, or its skips stand "
            f"elsewhere. Known blocks: {', '.join(known_families())}. Add one with unskip.surgery.register_reader.",
            strict,
        )
    for path, block, reader in blocks:
        if id(block) in done:
            network = _put(network, path, done[id(block)])
            replaced.append(path)
            continue
        refusal = ""
        try:
            spec, new = _operate(block, path, reader, how, bank)
        except Unsupported as reason:
            refusal = f"plainify: method {_label(method)} can't make block {path!r} of {name} skip-free: {reason}. "
        if refusal:
            _refuse(refusal + "strict=False leaves such blocks as they are.", strict)
            left.append(path)
            continue
        for kind in spec.kept + (("block",) if getattr(new, "keeps_skip", False) else ()):
            kept[kind] = kept.get(kind, 0) + 1
        if new is None:
            continue
        assert reader is not None
        if _looks_trained(block):
            gone = _lost_weights(spec, new)
            discarded += [gone] if gone else []
        new.train(block.training)
        done[id(block)] = reader.write(block, new)
        network = _put(network, path, done[id(block)])
        if spec.skip:
            replaced.append(path)

    if discarded:
        warnings.warn(
            f"plainify: {name} looks trained, but with method {_label(method)} {sum(discarded):,} trained weights in "
            f"{len(discarded)} blocks are discarded, so the network must be trained anew.",
            stacklevel=2,
        )
    finish = getattr(how, "finish", None)
    if finish is not None:
        finish(network)
    network.surgery = Surgery(method=how, replaced=tuple(replaced), left=tuple(left), kept=kept)  # type: ignore[assignment]
    return network


def _operate(
    block: nn.Module, path: str, reader: Reader | None, method: Method, bank: CoderBank
) -> tuple[BlockSpec, nn.Module | None]:
    """The block's spec and its skip-free version, None where it stays."""
    if reader is None:
        raise Unsupported(
            f"no reader knows the class {describe(block)}. Known blocks: {', '.join(known_families())}. "
            "Add one with unskip.surgery.register_reader"
        )
    spec = reader.read(block, path)
    if not isinstance(spec, BlockSpec) or not spec.branch:
        raise ValueError(f"plainify: the reader of {describe(block)} gave {spec!r} for {path!r}, not a BlockSpec.")
    new = method.build(spec, bank)
    if new is not None and not isinstance(new, nn.Module):
        raise ValueError(f"plainify: method {_label(method)} built {new!r} for {path!r}, which is not an nn.Module.")
    return spec, new


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


def _refuse(message: str, strict: bool) -> None:
    if strict:
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def _label(method: str | Method) -> str:
    return repr(method) if isinstance(method, str) else repr(type(method).__name__)


def _looks_trained(block: nn.Module) -> bool:
    """Whether a norm in the block has seen data or training: fresh ones have mean 0, gains 0 or 1 and bias 0.

    A block without norms tells nothing, and counts as fresh.
    """
    for norm in block.modules():
        if not isinstance(norm, NORMS) or any(p.is_meta for p in norm.parameters()):
            continue
        mean, gain, bias = (getattr(norm, name, None) for name in ("running_mean", "weight", "bias"))
        for state in (mean, bias):
            if isinstance(state, torch.Tensor) and torch.any(state.detach() != 0):
                return True
        if isinstance(gain, torch.Tensor) and torch.any((gain.detach() != 0) & (gain.detach() != 1)):
            return True
    return False
