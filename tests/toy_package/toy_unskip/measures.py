"""A measure of one number per layer."""

from torch import Tensor

from unskip.measures import Layer, register_measure


@register_measure
def share_of_zeros(layer: Layer, x: Tensor | None, y: Tensor) -> float | None:
    """Zeros among the outputs

    About half of them after a ReLU.
    """
    return (y == 0).double().mean().item() if layer.kind == "activation" else None
