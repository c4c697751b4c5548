"""Blocks without norms: the branch's convolutions with another activation between them, for methods that start so well
that they need no norm."""

from collections.abc import Callable

from torch import nn

from unskip.methods.plain import PlainBlock
from unskip.methods.spec import BlockSpec, Conv, Unsupported, factory, is_activation
from unskip.methods.widths import conv_like


def norm_free(
    spec: BlockSpec, *, act: Callable[[int], nn.Module], initialise: Callable[[Conv], None], bias: bool = False
) -> PlainBlock:
    """y = act(W_n ... act(W_1 pre(x))) of a block of convolutions: no shortcut, no norm.

    Args:
        spec: the residual block. Its norms go, those before the branch too; its dropout stays.
        act: from a number of channels to the activation that stands wherever the block had one.
        initialise: sets the weights of a convolution.
        bias: whether all convolutions have a bias, or those only that had one.
    """
    if spec.family == "mlp":
        raise Unsupported(
            "it is an MLP of linear layers, and the method is for convolutions; 'dirac', 'looks_linear', 'plain' or "
            "'pnnh' take it"
        )
    parts: list[nn.Module] = []
    if any(has_activation(module) for module in spec.pre):
        parts.append(act(spec.in_features).to(**factory(spec.layers[0].conv)))
    for layer in spec.layers:
        conv = conv_like(layer, layer.in_features, layer.out_features)
        if bias and conv.bias is None:
            assert isinstance(conv, nn.Conv2d)
            conv.bias = nn.Parameter(conv.weight.new_zeros(layer.out_features))
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
        initialise(conv)
        parts.append(conv)
        if layer.act is not None:
            parts.append(act(layer.out_features).to(**factory(conv)))
        if layer.drop:
            parts.append(nn.Dropout(layer.drop))
    if spec.out_act is not None:
        parts.append(act(spec.out_features).to(**factory(spec.layers[-1].conv)))
    return PlainBlock(*parts)


def has_activation(module: nn.Module) -> bool:
    """Whether a module is an activation, or a norm with one in it."""
    return any(is_activation(part) for part in module.modules())
