"""The proof that every exact rewriting comes with: made in float64, compared, and stored in the network's dtype."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unskip._core.errors import RUN_ERRORS, reason
from unskip.ship.verify import TOLERANCE, Check, in_words, verify

EXACT = 1e-9  # relative error in float64 that an exact rewriting stays below
FLOAT32_EPS_RATIO = 2.0**-29  # float64's rounding, relative to that of float32


def in_float64(where: str, network: nn.Module) -> nn.Module:
    """A copy of a network in eval mode, in float64 on the CPU; refused where it has no one dtype, or trains."""
    _stored(where, network)
    for path, module in network.named_modules():
        if module.training:
            raise ValueError(
                f"{where}: {path or type(network).__name__!r} is in training mode, where norms depend on the batch and "
                "dropout on chance; call .eval() on the network first."
            )
    try:
        return copy.deepcopy(network).to("cpu", torch.float64)
    except RuntimeError as error:  # of a weight that a hook makes from others, torch.nn.utils.prune's for instance
        raise ValueError(
            f"{where}: {type(network).__name__} can't be copied: {reason(error)}. Weights that are made from others "
            "must become plain ones first, for instance with torch.nn.utils.prune.remove(layer, 'weight')."
        ) from error


def proven(
    where: str, network: nn.Module, original: nn.Module, rewritten: nn.Module, x: Tensor
) -> tuple[nn.Module, float, Check]:
    """The rewritten network in the dtype and on the device of the given one, or an error where it differs.

    Args:
        where: the function that the user has called, for messages.
        network: what the user gave.
        original: that in float64 on the CPU.
        rewritten: made from `original`.
        x: a batch of inputs in float64.

    Returns:
        The network, its relative error in float64 before its weights were rounded, and what `verify` says of it now.
    """
    dtype, device = _stored(where, network)
    exact = verify(original, rewritten, x)
    if not exact.finite:
        raise ValueError(f"{where}: the network's output is not finite, so there is nothing to check the result by.")
    # A network that float32 moves far is moved by float64 too, by as much less as its numbers are finer.
    if exact.worst("float64") > max(EXACT, 10 * exact.rounding * FLOAT32_EPS_RATIO):
        raise ValueError(f"{where}: the new network is not the same function, so you don't get it.\n{exact}")
    rewritten = rewritten.to(device, dtype)
    check = exact if dtype == torch.float64 else verify(network, rewritten, x)
    if dtype == torch.float32 and check.worst() > max(TOLERANCE, 10 * check.rounding):
        raise ValueError(f"{where}: the new network is not the same function in float32, so you don't get it.\n{check}")
    return rewritten, exact.worst("float64"), check


def _stored(where: str, network: nn.Module) -> tuple[torch.dtype, torch.device]:
    """The one dtype and device of a network."""
    tensors = [t for t in (*network.parameters(), *network.buffers()) if t.is_floating_point()]
    kinds = {(t.dtype, t.device) for t in tensors}
    if any(t.is_meta for t in tensors):
        raise ValueError(f"{where}: the network is on the meta device and has no weights; load them first.")
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(
            f"{where}: the network's weights are of several kinds ({found}); bring them to one with .to()."
        )
    return kinds.pop() if kinds else (torch.float32, torch.device("cpu"))


def find_example(where: str, network: nn.Module, example: Tensor | None) -> Tensor:
    """The given example in float64, or random inputs of a shape that the network takes."""
    if example is not None:
        if not isinstance(example, Tensor) or not example.is_floating_point() or example.is_meta:
            raise ValueError(f"{where}: example={in_words(example)} must be a batch of floating-point inputs.")
        if not torch.isfinite(example).all():
            raise ValueError(f"{where}: example has numbers that are not finite, so nothing can be checked on it.")
        x = example.detach().to("cpu", torch.float64)
        try:
            with torch.no_grad():
                network(x.clone())
        except RUN_ERRORS as error:
            raise ValueError(
                f"{where}: {type(network).__name__} can't run on an example of shape {tuple(x.shape)}: {reason(error)}."
            ) from error
        return x
    generator = torch.Generator("cpu").manual_seed(0)
    for shape in _shapes(network):
        x = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        try:
            with torch.no_grad():
                network(x.clone())
        except RUN_ERRORS:
            continue
        return x
    raise ValueError(
        f"{where}: no input was found that {type(network).__name__} takes, to check the result on; give it as example=."
    )


def _shapes(network: nn.Module) -> Sequence[tuple[int, ...]]:
    """Shapes of one input that the network may take: small, one side odd and one even where that is its choice."""
    shapes: list[tuple[int, ...]] = []
    image_shape = getattr(network, "image_shape", None)
    if image_shape is not None:
        shapes.append(tuple(image_shape))
    first = next((m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)), None)
    if isinstance(first, nn.Linear):
        shapes.append((first.in_features,))
    channels = first.in_channels if isinstance(first, nn.Conv2d) else 3
    size = getattr(getattr(network, "patch_embed", None), "img_size", None)
    if size is not None:
        shapes.append((channels, *size))
    config = getattr(network, "pretrained_cfg", None) or {}
    input_size = tuple(config.get("input_size", (channels, 32, 32)))
    side = min(64, input_size[-1])
    return [*shapes, (channels, side + 1, side), (channels, side, side), (channels, *input_size[1:])]
