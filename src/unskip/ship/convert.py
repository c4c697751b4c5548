"""convert: plainify by an exact method, with the report of its proof and its cost that the command line prints."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unskip._core.modules import checked_model
from unskip.methods import Method, resolve_method
from unskip.surgery import Cost, plainify
from unskip.surgery.cost import compare
from unskip.surgery.proof import check_stored, find_example
from unskip.surgery.verify import Check


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What `convert` did. It stays with the network as its attribute `conversion`."""

    cost: Cost
    exact: float  # relative error of the output in float64, before the weights were stored
    check: Check  # of the network that is returned, in its own dtype

    def __str__(self) -> str:
        return f"the same function to {self.exact:.1e} in float64 and {self.check.worst():.1e} as stored\n{self.cost}"


def convert(
    model: nn.Module,
    method: str | Method = "rm",
    *,
    example: Tensor | None = None,
    strict: bool = True,
    **options: Any,
) -> nn.Module:
    """`plainify` by an exact method, with the error of each layer and the cost: the same function, or an error.

    Args:
        model: a trained residual network in eval mode. It stays untouched.
        method: an exact one: 'rm', or one of your own.
        example: a batch of inputs to check the result on; without it small random images that the network takes.
        strict: as in `plainify`: with False a block that the method can't take keeps its skip, with a warning.
        options: the options of the method (`unskip models rm --methods`).

    Returns:
        A new network in the same dtype and on the same device. Its attribute `conversion` holds cost and proof.

    Raises:
        ValueError: with the path of what has no exact form, with the cost where that is above the limit, or with the
            errors where the two networks differ.

    Example:
        >>> trained = unskip.create_model("resnet20").eval()
        >>> plain = unskip.convert(trained)
        >>> plain(torch.zeros(2, 3, 32, 32)).shape  # (B, C, H, W) -> (B, classes), as before
        torch.Size([2, 10])
        >>> print(plain.conversion)
        the same function to ... in float64 and ... as stored
        one image of 3 x 32 x 32 ...
    """
    how = resolve_method(method, options)
    if not getattr(how, "exact", False):
        raise ValueError(
            f"convert: method={method!r} does not keep the network's function, so there is nothing to verify; "
            "unskip.plainify applies it, for training from scratch."
        )
    model = checked_model("convert", model)
    plain = plainify(model, how, strict=strict, example=example)
    check = check_stored("plainify", model, plain, find_example("plainify", model, example, plain))
    exact = plain.surgery.exact  # type: ignore[union-attr]
    plain.conversion = Conversion(cost=compare(model, plain, example), exact=exact, check=check)  # type: ignore[assignment, arg-type]
    return plain
