"""The models of a comparison: how they are built, and the forms in which they do inference."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from unskip.bench.setting import Layers
from unskip.io.load import Shape, load_model
from unskip.kernels import use_fast_layers
from unskip.models.build import is_name
from unskip.ship import fold
from unskip.ship.fold import Refusal, absorb_norms, pool_stem

AS_TRAINED, FUSED = "as trained", "norms fused"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model to compare."""

    name: str  # its model_spec, or `own_layers` of it
    model_spec: str
    model: nn.Module
    input_size: Shape  # of one image
    fast_layers: tuple[str, ...] = ()  # paths of the layers that `use_fast_layers` replaced


def own_layers(model_spec: str) -> str:
    """The name of a model as it was built, beside the same one with fast layers."""
    return f"{model_spec} (own layers)"


def load_candidates(model_specs: Sequence[str], layers: Layers, *, beside: bool) -> list[Candidate]:
    """The models of these specs. With layers='same' all of them have fast layers (`unskip.kernels.use_fast_layers`).

    `beside` adds those that this changes as they were built, behind the others, to show what the fast layers add.
    """
    candidates = [load(model_spec) for model_spec in model_specs]
    if layers == "own":
        return candidates
    as_built = [replace(c, name=own_layers(c.name), model=copy.deepcopy(c.model)) for c in candidates if beside]
    fast = [replace(c, fast_layers=tuple(use_fast_layers(c.model))) for c in candidates]
    changed = {c.model_spec for c in fast if c.fast_layers}
    return fast + [c for c in as_built if c.model_spec in changed]


def load(model_spec: str) -> Candidate:
    """The model of a spec, which is whatever `unskip.load` takes."""
    loaded = load_model(model_spec, command="bench")
    return Candidate(name=model_spec, model_spec=model_spec, model=loaded.model, input_size=loaded.input_size)


def common_input(candidates: list[Candidate], size: int) -> Shape:
    """The shape of one image that all candidates read; unlike ones are refused."""
    first = candidates[0]
    for other in candidates[1:]:
        if not size and other.input_size != first.input_size:
            raise ValueError(
                f"bench: {first.name!r} reads images of {_by(first.input_size)} and {other.name!r} of "
                f"{_by(other.input_size)}, so their times don't compare. Give one size for all with --size."
            )
        if other.input_size[:1] != first.input_size[:1]:
            raise ValueError(
                f"bench: {first.name!r} reads {first.input_size[0]} channels and {other.name!r} "
                f"{other.input_size[0]}; build them alike{_with(other.name, 'in_chans', first.input_size[0])}."
            )
    kinds = {c.name: {p.dtype for p in c.model.parameters()} for c in candidates}
    for name, found in kinds.items():
        if found != kinds[first.name]:
            raise ValueError(
                f"bench: the weights of {first.name!r} are {_kinds(kinds[first.name])} and those of {name!r} "
                f"{_kinds(found)}; networks are compared at one precision, so bring them to one with .to()."
            )
    return (first.input_size[0], size, size) if size else first.input_size


def check_outputs(candidates: list[Candidate], outputs: dict[str, tuple[int, ...]]) -> None:
    """Heads of different widths are another difference than the one that is asked about."""
    first = candidates[0].name
    for name, shape in outputs.items():
        if shape != outputs[first]:
            raise ValueError(
                f"bench: {first!r} gives {_by(outputs[first])} numbers an image and {name!r} {_by(shape)}; build them "
                f"alike{_with(name, 'num_classes', outputs[first][-1])}."
            )


def _with(model_spec: str, option: str, value: int) -> str:
    """The spec of the same model with another value of an option, as advice; '' where only its owner can build it."""
    name, _, rest = model_spec.partition(":")
    if not is_name(name):
        return ""
    others = [pair for pair in rest.split(",") if pair and not pair.startswith(f"{option}=")]
    return f", for instance {name}:{','.join([*others, f'{option}={value}'])}"


def _by(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "an unknown size"


def _kinds(found: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in found))


def forms(model: nn.Module, input_size: Shape, *, folded: bool, example_size: int = 64) -> dict[str, nn.Module]:
    """The forms in which a model does inference, in float32 and eval mode, by name.

    A plain model is folded: 'dense' and, where closed-form coders or fast layers make that another model, 'fast'. In
    any other the norms go into the convolutions before them, so that no side is denied a rewriting that the other has.
    """
    model = copy.deepcopy(model).eval()
    if not folded:
        return {AS_TRAINED: model}
    side = min(example_size, input_size[-1])
    small = len(input_size) == 3 and not hasattr(model, "patch_embed")
    shape = (input_size[0], side, side) if small else input_size
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    try:
        dense = fold(model, "dense", example=example)
    except ValueError:
        try:
            return {FUSED: fuse_norms(model, example)}
        except Refusal:
            return {AS_TRAINED: model}
    fast = fold(model, "fast", example=example)
    same = {type(module) for module in fast.modules()} == {type(module) for module in dense.modules()}
    return {"dense": dense} if same else {"dense": dense, "fast": fast}


def fuse_norms(model: nn.Module, example: torch.Tensor) -> nn.Module:
    """A copy whose norms are part of the layers before them, with its stem, if that is ours, as `fold` has it in form
    'fast'; the same function, which is checked."""
    original = copy.deepcopy(model).to("cpu", torch.float64).eval()
    x = example.to("cpu", torch.float64)
    with torch.no_grad():
        expected = original(x.clone())
        fused = pool_stem(absorb_norms(original, x), x)
        torch.testing.assert_close(fused(x.clone()), expected, rtol=1e-8, atol=1e-8 * expected.abs().max().item())
    return fused.to(next(model.parameters()).dtype)
