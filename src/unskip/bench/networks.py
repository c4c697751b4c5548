"""The networks of a comparison: from words to modules, and the forms in which they do inference."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timm.layers.norm_act import BatchNormAct2d
from timm.models._efficientnet_blocks import InvertedResidual
from torch import nn

from unskip._core.modules import has_hooks
from unskip.io.load import Shape, is_name, load_model, split_options
from unskip.kernels.depthwise import TOPS, JoinedSequential
from unskip.kernels.stem import use_fast_stem
from unskip.ship import fold
from unskip.ship.fold import Refusal, absorb_norms, pool_stem

AS_TRAINED, FUSED = "as trained", "norms fused"
FAST = "fast"  # of the options `stem` and `depthwise`


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A network to compare."""

    name: str
    network: nn.Module
    input_size: Shape  # of one image


def load(model_spec: str) -> Candidate:
    """Whatever `unskip.load` takes.

    NAME:stem=fast is a network with the stem that `pnnh` computes its networks' with (`unskip.kernels.stem`), and
    NAME:depthwise=fast one of timm's with their depthwise convolutions (`unskip.kernels.depthwise`), so that what is
    left between the two is the blocks.
    """
    name, options = split_options(model_spec, "bench")
    fast = [part for part in QUICKEN if options.get(part) == FAST]
    rest = ",".join(f"{key}={value}" for key, value in options.items() if key not in fast)
    try:
        loaded = load_model(f"{name}:{rest}" if rest else name, command="bench")
    except ValueError as error:  # of an argument that nobody knows, among others
        for part in set(QUICKEN) & set(options) - set(fast):
            raise ValueError(
                f"bench: {part}={options[part]} in {model_spec!r} is not known; there is {part}={FAST}, and without "
                "the option the network is as it is."
            ) from error
        raise
    for part in fast:
        quicken, what = QUICKEN[part]
        if not quicken(loaded.model):
            raise ValueError(
                f"bench: {part}={FAST} in {model_spec!r} is for networks whose {what}, computed the ordinary way; "
                "leave it out."
            )
    return Candidate(name=model_spec, network=loaded.model, input_size=loaded.input_size)


def quicken_depthwise(network: nn.Module) -> bool:
    """The depthwise convolutions of timm's inverted residual blocks together with the layers around them.

    Returns whether there was one of the kind that `unskip.kernels.depthwise` is made for.
    """
    found = False
    for block in network.modules():
        if type(block) is not InvertedResidual:
            continue
        norms, conv = (block.bn1, block.bn2), block.conv_dw
        if type(conv) is not nn.Conv2d or conv.kernel_size != (3, 3) or any(map(has_hooks, (*norms, conv))):
            continue
        if not all(type(norm) is BatchNormAct2d and type(norm.act) in TOPS and idle(norm.drop) for norm in norms):
            continue
        (bn1, act1), (bn2, act2) = map(apart, norms)
        block.conv_dw = JoinedSequential(block.conv_pw, bn1, act1, conv, bn2, act2)
        block.conv_pw, block.bn1, block.bn2 = nn.Identity(), nn.Identity(), nn.Identity()
        found = True
    return found


def idle(layer: nn.Module) -> bool:
    return type(layer) is nn.Identity


def apart(norm: BatchNormAct2d) -> tuple[nn.BatchNorm2d, nn.Module]:
    """timm's norm with an activation as the two that it is, with the same parameters."""
    plain = nn.BatchNorm2d(norm.num_features, norm.eps, norm.momentum, device="meta")
    plain.weight, plain.bias = norm.weight, norm.bias
    for name, buffer in norm.named_buffers(recurse=False):
        setattr(plain, name, buffer)
    return plain.train(norm.training), norm.act


QUICKEN: dict[str, tuple[Callable[[nn.Module], bool], str]] = {
    "stem": (use_fast_stem, "first layer is a convolution of stride 2 over up to 4 channels"),
    "depthwise": (quicken_depthwise, "blocks are timm's inverted residual ones with ReLU or ReLU6 (MobileNet-V2)"),
}


def common_input(contenders: list[Candidate], size: int) -> Shape:
    """The shape of one image that all of them read; unlike ones are refused."""
    first = contenders[0]
    for other in contenders[1:]:
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
    kinds = {c.name: {p.dtype for p in c.network.parameters()} for c in contenders}
    for name, found in kinds.items():
        if found != kinds[first.name]:
            raise ValueError(
                f"bench: the weights of {first.name!r} are {_kinds(kinds[first.name])} and those of {name!r} "
                f"{_kinds(found)}; networks are compared at one precision, so bring them to one with .to()."
            )
    return (first.input_size[0], size, size) if size else first.input_size


def check_outputs(contenders: list[Candidate], outputs: dict[str, tuple[int, ...]]) -> None:
    """Heads of different widths are another difference than the one that is asked about."""
    first = contenders[0].name
    for name, shape in outputs.items():
        if shape != outputs[first]:
            raise ValueError(
                f"bench: {first!r} gives {_by(outputs[first])} numbers an image and {name!r} {_by(shape)}; build them "
                f"alike{_with(name, 'num_classes', outputs[first][-1])}."
            )


def _with(word: str, option: str, value: int) -> str:
    """What to give for the same network with an option set otherwise; '' where only its owner can build it so."""
    name, _, rest = word.partition(":")
    if not is_name(name):
        return ""
    others = [pair for pair in rest.split(",") if pair and not pair.startswith(f"{option}=")]
    return f", for instance {name}:{','.join([*others, f'{option}={value}'])}"


def _by(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "an unknown size"


def _kinds(found: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in found))


def forms(contender: Candidate, *, folded: bool, example_size: int = 64) -> dict[str, nn.Module]:
    """The forms in which a network does inference, in float32 and eval mode, by name.

    A plain network is folded, 'dense' and, where closed-form coders or a faster stem make that another network,
    'fast'. Of any other the norms go into the convolutions before them, so that no side has a rewriting that the other
    was denied.
    """
    network = copy.deepcopy(contender.network).eval()
    if not folded:
        return {AS_TRAINED: network}
    size = contender.input_size
    side = min(example_size, size[-1])
    shape = (size[0], side, side) if len(size) == 3 and not hasattr(network, "patch_embed") else size
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(2, *shape, generator=generator)
    try:
        found = {"dense": fold(network, "dense", example=example)}
    except ValueError:
        try:
            return {FUSED: fuse_norms(network, example)}
        except Refusal:
            return {AS_TRAINED: network}
    fast = fold(network, "fast", example=example)
    if {type(module) for module in fast.modules()} != {type(module) for module in found["dense"].modules()}:
        found["fast"] = fast
    return found


def fuse_norms(network: nn.Module, example: torch.Tensor) -> nn.Module:
    """A copy whose norms are part of the layers before them, with its stem, if that is ours, as `fold` has it in form
    'fast'; the same function, which is checked."""
    original = copy.deepcopy(network).to("cpu", torch.float64).eval()
    x = example.to("cpu", torch.float64)
    with torch.no_grad():
        expected = original(x.clone())
        fused = pool_stem(absorb_norms(original, x), x)
        torch.testing.assert_close(fused(x.clone()), expected, rtol=1e-8, atol=1e-8 * expected.abs().max().item())
    kind = next(network.parameters()).dtype
    return fused.to(kind)
