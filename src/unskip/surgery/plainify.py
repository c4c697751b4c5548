"""plainify: a skip-free version of a residual network."""

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import unskip.surgery.readers  # noqa: F401 - registers the readers
from unskip._core.layers import redefines
from unskip._core.modules import checked_model, copied
from unskip.coders import CoderBank
from unskip.methods import BlockSpec, Method, Unsupported, out_of_range, resolve_method
from unskip.methods.attention import ATTENTIONS, KEEP, AttentionSpec, check_attention
from unskip.methods.registry import method_name
from unskip.methods.spec import NORMS, describe
from unskip.methods.stack import stacked
from unskip.surgery.cost import Cost, compare, memory_plan, on_meta
from unskip.surgery.expose import expose
from unskip.surgery.memory import MemoryPlan, MemoryPlans
from unskip.surgery.proof import find_example, in_float64, input_shapes, prove, refuse_training, stored_as
from unskip.surgery.reading import Reader, find_blocks
from unskip.surgery.signs import decides, meta_input, nonnegative_inputs
from unskip.surgery.tracing import ADDITIONS, trace


@dataclass(frozen=True, kw_only=True)
class Surgery:
    """What `plainify` did. It stays with the network as its attribute `surgery`."""

    method: Method
    replaced: tuple[str, ...]  # paths of the blocks that are skip-free now
    left: tuple[str, ...]  # what stays (strict=False): paths of blocks, and 'path (addition n)' outside of blocks
    kept: dict[str, int]  # skips that stay by design, by kind: {'attention': 12}
    attention: str = KEEP  # how attention was made skip-free
    exact: float | None = None  # of an exact method: the relative error that was found in float64

    def __str__(self) -> str:
        blocks = f"{len(self.replaced)} blocks without skips"
        if self.replaced:
            blocks += (
                f" ({self.replaced[0]} to {self.replaced[-1]})" if len(self.replaced) > 1 else f" ({self.replaced[0]})"
            )
        lines = [f"{method_name(self.method)}: {blocks}"]
        lines += [f"{len(self.left)} left as they are: {', '.join(self.left)}"] * bool(self.left)
        lines += [f"{kind} skips kept: {count}" for kind, count in self.kept.items()]
        lines += [] if self.exact is None else [f"the same function to {self.exact:.1e} in float64"]
        return "\n".join(lines)


class UnsupportedBlockError(ValueError):
    """A residual block that the method can't make skip-free; the message names block, reason and way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} strict=False leaves such blocks as they are.")
        self.reason = reason  # the message without the way out, for callers that have another


def plainify(
    model: nn.Module,
    method: str | Method = "pnnh",
    *,
    attention: str = KEEP,
    strict: bool = True,
    example: Tensor | None = None,
    **options: Any,
) -> nn.Module:
    """Returns a skip-free version of a residual network; `model` itself stays untouched.

    Args:
        model: a timm, torchvision or unskip residual network, or one whose blocks have a registered reader.
        method: how blocks are made skip-free: a name, or a method object. `unskip models --methods` lists the names
            with their options, and so does the page *Methods* of the documentation.
        attention: how the attention of transformers is made skip-free: 'shaped', 'value_skipinit', 'espa', 'cut',
            'plain' (docs/attention.md). 'keep' leaves its skips, and `surgery.kept` counts them.
        strict: whether a residual block that can't be made skip-free, or an addition outside of blocks, is an error.
            With False it is a warning, it stays as it is, and `surgery.left` names it.
        example: a batch of inputs that an exact method checks its result on; without it small random images that the
            network takes.
        options: the options of the method.

    Stem, head and norms outside of the blocks keep their weights, and so do the blocks if the method says so
    (`keeps_weights`). If the network looks trained, a warning says how many trained weights are discarded. Stochastic
    depth stays on the learners of `pnnh` and `residual_half`; other methods remove it with the skip, because a dropped
    branch would leave nothing.

    An exact method ('rm') takes a network in eval mode and keeps its function. It is refused, with a table of the
    cost, if the network grows beyond the method's `limit`, and if the two networks differ in float64 on the example, on
    random inputs of other sizes, with or without gradients; `surgery.exact` is the error. A network on the meta device
    has no numbers to check. `unskip.ship.convert` adds the error of each layer, and the cost.

    Example:
        >>> residual = timm.create_model("resnet18", num_classes=10)
        >>> net = unskip.plainify(residual, method="pnnh")
        >>> print(net.surgery)
        pnnh: 8 blocks without skips (layer1.0 to layer4.1)
        >>> net(torch.zeros(2, 3, 64, 64)).shape  # (B, C, H, W) -> (B, classes), as before
        torch.Size([2, 10])
    """
    check_attention(attention)
    how = _resolve("plainify", model, method, options)
    model = checked_model("plainify", model)
    if attention != KEEP and getattr(how, "exact", False):
        raise ValueError(
            f"plainify: method {method_name(how)!r} keeps the function, and attention={attention!r} changes it; leave "
            "attention out, or choose a method that is trained anew, such as 'pnnh'."
        )
    if not getattr(how, "exact", False) or any(p.is_meta for p in model.parameters()):
        copy = copied("plainify", model)
        return _plainify(copy, how, example, strict=strict, attention=attention, original=model)
    original = in_float64("plainify", model)
    plain = _plainify(copied("plainify", original), how, example, strict=strict, original=model)
    x = find_example("plainify", original, example, plain)  # either may ask for more: even sides
    _refuse_range(plain, x)
    error = prove("plainify", original, plain, x)
    plain.surgery = replace(plain.surgery, exact=error)  # type: ignore[type-var]
    return plain.to(*stored_as("plainify", model))


def cost(
    model: nn.Module, method: str | Method = "rm", *, example: Tensor | None = None, strict: bool = True, **options: Any
) -> Cost:
    """Returns what `plainify` with these arguments would cost, counted without weights: `print(cost)` is a table.

    Args:
        model: a residual network.
        method: as in `plainify`.
        example: a batch of inputs, for its shape; else the input size that the network knows, or its first layer
            suggests.
        strict: as in `plainify`.
        options: the options of the method; its `limit` does not count here.

    Example:
        >>> print(unskip.cost(unskip.create_model("resnet20").eval(), "rm"))
        one image of 3 x 32 x 32            before         after    times
        parameters                          0.27 M        0.50 M     1.86
        MACs                               40.55 M       77.12 M     1.90
        activations at once ...
    """
    how = _resolve("cost", model, method, options)
    return _cost(checked_model("cost", model), how, example, strict=strict)


def memory_variants(
    model: nn.Module, example: Tensor | None = None, *, name: str = "network", in_place: bool = True
) -> MemoryPlans:
    """Returns the memory plans of what can be shipped of a model, by name, to be printed side by side.

    Of a residual network: itself, what `rm` makes of it, and what `pnnh` does, folded dense and fast. Of one that has
    no skips: itself folded, dense and, where that is another network, fast. Weights play no part.

    Args:
        model: a network; its weights may be on the meta device where it is residual and pnnh is not wanted.
        example: as in `memory_plan`, and so is `in_place`.
        name: of the network, in the table.
    """
    model = expose(checked_model("memory_plan", copied("memory_plan", model).eval()))
    blocks = [_read(block, path, reader, KEEP) for path, block, reader in find_blocks(model)]
    found: dict[str, MemoryPlan | str] = {}

    def add(label: str, build: Callable[[], nn.Module]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of lost weights, which are not wanted
                found[label] = memory_plan(build(), example, in_place=in_place)
        except ValueError as refusal:
            found[label] = getattr(refusal, "reason", str(refusal))

    def folded(network: nn.Module, label: str) -> None:
        for form in ("dense", "fast"):
            add(f"{label}, {form}", lambda form=form: stacked(network, fast=form == "fast"))  # type: ignore[misc]
        if found[f"{label}, dense"] == found[f"{label}, fast"]:
            found[label] = found.pop(f"{label}, dense")
            del found[f"{label}, fast"]

    if not any(isinstance(spec, Unsupported) or spec.skip for spec in blocks):
        folded(model, name)
        return MemoryPlans(found)
    found[name] = memory_plan(model, example, in_place=in_place)
    add(f"{name}, rm", lambda: _plainify(on_meta(model), resolve_method("rm", {}), example, strict=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = plainify(model, "pnnh").eval()
    except ValueError as refusal:
        found[f"{name}, pnnh"] = getattr(refusal, "reason", str(refusal))
    else:
        folded(plain, f"{name}, pnnh")
    return MemoryPlans(found)


def takes(model: nn.Module, method: str | Method, *, attention: str = KEEP, **options: Any) -> bool:
    """Whether `plainify` takes this model with these arguments, tried on a copy without weights."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            how, meta = resolve_method(method, options), on_meta(checked_model("plainify", model))
            _plainify(meta, how, None, strict=True, attention=attention)
    except ValueError:
        return False
    return True


def _cost(model: nn.Module, method: Method, example: Tensor | None, *, strict: bool) -> Cost:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # plainify itself warns of blocks that are left and weights that are lost
        after = _plainify(on_meta(model), method, example, strict=strict)
    return compare(model, after, example)


def _resolve(command: str, model: nn.Module, method: str | Method, options: dict[str, Any]) -> Method:
    """The method with its options, after a check of the model."""
    model = checked_model(command, model)
    how = resolve_method(method, options)
    if getattr(how, "exact", False):
        refuse_training(command, model)
    return how


def _refuse_range(plain: nn.Module, x: Tensor) -> None:
    """Where rm scales what it carries, the example and random inputs like it must stay in range."""
    random = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    for path, (largest, bound) in (out_of_range(plain, x) | out_of_range(plain, random)).items():
        more = math.ceil(math.log2(largest / bound)) if math.isfinite(largest) else 1
        raise ValueError(
            f"plainify: block {path!r} would have to carry {largest:.4g}, and its bound is {bound:g}; a scale that is "
            f"{more} larger, or relu6='split', does it."
        )


def _plainify(
    model: nn.Module,
    method: Method,
    example: Tensor | None,
    *,
    strict: bool,
    attention: str = KEEP,
    original: nn.Module | None = None,
) -> nn.Module:
    """`plainify` in place. With `original`, the network before, the method's limit on its growth is enforced."""
    exact, limit = getattr(method, "exact", False), getattr(method, "limit", math.inf)
    name, label = type(model).__name__, method_name(method)
    bank = CoderBank()
    replaced: list[str] = []
    left: list[str] = []
    kept: Counter[str] = Counter()
    discarded: list[int] = []  # trained weights, by block
    done: dict[nn.Module, nn.Module] = {}  # by the old block: a block that is used twice stays one block
    seen: list[nn.Module] = []  # blocks of earlier rounds
    additions: list[str] = []
    for number in itertools.count():  # a second round for the skips around blocks, which are plain by then
        model = expose(model)
        made = tuple(f"{path}." for path in replaced)
        found = [
            (path, block, reader)
            for path, block, reader in find_blocks(model)
            if block not in seen and not f"{path}.".startswith(made)
        ]
        blocks = [(path, block, reader, _read(block, path, reader, attention)) for path, block, reader in found]
        if number > 0:  # what can't be read is among the additions already
            blocks = [block for block in blocks if isinstance(block[-1], BlockSpec)]
            if not blocks:
                break
        attentions = _read_attention([spec for *_, spec in blocks])
        if number == 0 and all(isinstance(spec, BlockSpec) and not spec.skip for *_, spec in blocks):
            _refuse(
                ValueError(
                    f"plainify: {name} has no residual connection that can be removed: it is plain already, joins "
                    "tensors by torch.cat instead of adding them (DenseNet, ShuffleNet, U-Net), or what it adds can't "
                    "be read (docs/extending.md says what a block of your own needs)."
                ),
                strict,
            )
        additions, nonnegative = _look_around(model, [path for path, *_ in blocks], example, exact)
        for path, block, reader, spec in blocks:
            if block in done:
                model = _put(model, path, done[block])
                replaced.append(path)
                continue
            try:
                if isinstance(spec, Unsupported):
                    raise spec
                mixer = attentions.get(id(spec))
                if isinstance(mixer, Unsupported):
                    raise mixer
                new = method.build(replace(spec, nonnegative=path in nonnegative), bank)
                if exact and new is not None:
                    _refuse_unknown(block, path)
            except Unsupported as reason:
                sentence = f"plainify: method {label!r} can't make block {path!r} of {name} skip-free: {reason}."
                _refuse(UnsupportedBlockError(sentence), strict)
                left.append(path)
                seen.append(block)
                continue
            kept.update(spec.kept)
            if new is None:
                seen.append(block)
                continue
            if not isinstance(new, nn.Module):
                raise ValueError(f"plainify: method {label!r} built {new!r} for {path!r}, which is not an nn.Module.")
            if not exact and _looks_trained(block):
                discarded.append(_lost_weights(spec, new))
            new.train(block.training)
            done[block] = reader.write(block, new)
            if mixer is not None:
                mixed = ATTENTIONS[attention].build(mixer).train(block.training)
                if method.keeps_weights:  # else the MLP starts as the method says
                    mixed.start_mlp(new)
                mixer.write(done[block], mixed)
            model = _put(model, path, done[block])
            if getattr(new, "keeps_skip", False):
                kept["block"] += 1
            if spec.skip:
                replaced.append(path)
            if original is not None and _parameters(model) > limit * _parameters(original):
                _cost(original, method, example, strict=strict).check(limit, "plainify", getattr(method, "cheaper", ""))

    if additions:
        places = ", ".join(f"{path!r} ({count})" for path, count in Counter(additions).items())
        sentence = (
            f"plainify: {name} adds tensors outside of its blocks, {len(additions)} times: in {places}. They can't be "
            "read as the sums of a branch and a shortcut."
        )
        _refuse(UnsupportedBlockError(sentence), strict)
        left += [f"{path} (addition {additions[: i + 1].count(path)})" for i, path in enumerate(additions)]
    if any(discarded):
        warnings.warn(
            f"plainify: {name} looks trained, but with method {label!r} {sum(discarded):,} trained weights in "
            f"{sum(map(bool, discarded))} blocks are discarded, so the network must be trained anew.",
            stacklevel=3,
        )
    if hasattr(method, "finish"):
        method.finish(model)
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and "architecture" in config:
        # timm's save_for_hf writes this name, and the residual network of that name would not take the weights.
        name = f"{config['architecture']} after plainify by {label!r}, which timm can not build"
        model.pretrained_cfg = model.default_cfg = {**config, "architecture": name}  # type: ignore[assignment]
    model.surgery = Surgery(  # type: ignore[assignment]
        method=method, replaced=tuple(replaced), left=tuple(left), kept=dict(kept), attention=attention
    )
    return model


def _look_around(model: nn.Module, paths: list[str], example: Tensor | None, exact: bool) -> tuple[list[str], set[str]]:
    """Where the model adds tensors outside of its blocks, and which blocks are proven to read nothing negative.

    Seen in forward passes on the meta device; of a model that can't run there nothing is known. The forward of
    PyTorch's modules and of our networks adds nothing.
    """
    inside = {id(part) for path in paths for part in model.get_submodule(path).modules()}
    strange = [m for m in model.modules() if not type(m).__module__.startswith(("torch.nn", "unskip."))]
    if not exact and all(id(module) in inside for module in strange):
        return [], set()
    for shape in [tuple(example.shape[1:])] if isinstance(example, Tensor) else input_shapes(model):
        try:
            meta = on_meta(model).eval()
            steps = trace(meta, meta_input(meta, shape))
        except Exception:  # of any kind: the forward is not ours
            continue
        blocks = {path: meta.get_submodule(path) for path in paths}
        hidden = {part for block in blocks.values() for part in block.modules()}
        hidden |= {part for block in meta.modules() if getattr(block, "skip_free", False) for part in block.modules()}
        sums = [step for step in steps if step.function in ADDITIONS and len(step.sources) > 1]
        found = [
            f"{step.where} ({step.line})" if step.line else step.where for step in sums if step.module not in hidden
        ]
        return found, nonnegative_inputs(meta, blocks, shape) if exact else set()
    return [], set()


def _read(block: nn.Module, path: str, reader: Reader, attention: str) -> BlockSpec | Unsupported:
    """The spec of a block, or the reason why it can't be read. Attention that keeps its skip is not read."""
    try:
        spec = reader.read(block, path)
    except Unsupported as reason:
        return reason
    if not isinstance(spec, BlockSpec) or not spec.branch:
        raise ValueError(f"plainify: the reader of {describe(block)} gave {spec!r} for {path!r}, not a BlockSpec.")
    if attention == KEEP:
        return replace(spec, attention=None)
    if spec.attention is None and "attention" in spec.kept:
        return Unsupported("its reader does not read attention; attention='keep' leaves its skip")
    return replace(spec, kept=tuple(kind for kind in spec.kept if kind != "attention"))


def _read_attention(specs: list[BlockSpec | Unsupported]) -> dict[int, AttentionSpec | Unsupported]:
    """The attention of each block whose skip goes, numbered in order, by id of the block's spec."""
    found = [spec for spec in specs if isinstance(spec, BlockSpec) and spec.attention is not None]
    read: dict[int, AttentionSpec | Unsupported] = {}
    for layer, spec in enumerate(found):
        assert spec.attention is not None
        try:
            read[id(spec)] = replace(spec.attention(), layer=layer, depth=len(found))
        except Unsupported as reason:
            read[id(spec)] = reason
    return read


def _refuse_unknown(block: nn.Module, path: str) -> None:
    """Refuses a block for an exact method if not all that it does follows from the classes of its parts."""
    for name, module in block.named_modules():
        if name and (known := redefines(module)):
            raise Unsupported(
                f"{f'{path}.{name}'.lstrip('.')!r} ({type(module).__name__}, a {known.__name__}) has methods of its own"
            )
    if why := decides(block):
        raise Unsupported(f"{why}, and an exact method must know what it does with any input")


def _put(model: nn.Module, path: str, block: nn.Module) -> nn.Module:
    if not path:
        return block
    model.set_submodule(path, block)
    return model


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _lost_weights(spec: BlockSpec, new: nn.Module) -> int:
    """The number of weights of the block, its projection included, that the new one does not keep."""
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
