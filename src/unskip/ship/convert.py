"""convert: exact removal of skips with its proof; what the command line calls for a method that keeps the function."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unskip._core.modules import unwrap
from unskip.methods import Method, out_of_range, resolve_method
from unskip.ship.proof import find_example, in_float64, proven
from unskip.ship.verify import Check
from unskip.surgery import Cost, plainify
from unskip.surgery.cost import compare


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What `convert` did. It stays with the network as its attribute `conversion`."""

    cost: Cost
    exact: float  # relative error of the output in float64, before the weights were stored
    check: Check  # of the network that is returned, in its own dtype


def convert(
    network: nn.Module,
    method: str | Method = "rm",
    *,
    example: Tensor | None = None,
    strict: bool = True,
    **options: Any,
) -> nn.Module:
    """`plainify` by an exact method, verified: the same function without skips, or an error.

    Args:
        network: a trained residual network in eval mode. It stays untouched.
        method: an exact one: 'rm', or one of your own.
        example: a batch of inputs to check the result on; without it small random images that the network takes.
        strict: as in `plainify`: with False a block that the method can't take keeps its skip, with a warning.
        options: the options of the method (`unskip models rm --methods`).

    Returns:
        A new network in the same dtype and on the same device. Its attribute `conversion` holds cost and proof.

    Raises:
        ValueError: with the path of what has no exact form, with the cost where that is above the limit, or with the
            errors where the two networks differ.
    """
    if not isinstance(network, nn.Module):
        raise ValueError(f"convert: network={network!r} is not an nn.Module; give a trained network.")
    network = unwrap(network)
    how = resolve_method(method, options)
    if not getattr(how, "exact", False):
        raise ValueError(
            f"convert: method={method!r} does not keep the network's function, so there is nothing to verify; "
            "unskip.plainify applies it, for training from scratch."
        )
    original = in_float64("convert", network)
    converted = plainify(original, how, strict=strict)
    x = find_example("convert", converted, example)  # which may ask for more than the original: even sides
    _refuse_range(converted, x)
    converted, exact, check = proven("convert", network, original, converted, x)
    price = compare(network, converted, example)
    converted.conversion = Conversion(cost=price, exact=exact, check=check)  # type: ignore[assignment]
    return converted


def _refuse_range(converted: nn.Module, x: Tensor) -> None:
    """Where rm scales what it carries, the example and random inputs like those of `verify` must stay in range."""
    random = torch.randn(x.shape, generator=torch.Generator("cpu").manual_seed(0), dtype=x.dtype)
    for path, (largest, bound) in (out_of_range(converted, x) | out_of_range(converted, random)).items():
        more = math.ceil(math.log2(largest / bound)) if math.isfinite(largest) else 1
        raise ValueError(
            f"convert: block {path!r} would have to carry {largest:.4g}, and its bound is {bound:g}; a scale that is "
            f"{more} larger, or relu6='split', does it."
        )
