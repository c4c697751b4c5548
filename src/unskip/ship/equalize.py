"""Cross-layer equalisation and bias correction (Nagel et al. 2019, https://arxiv.org/abs/1906.04721), before INT8.

    W_2 relu(W_1 x + b)  =  (W_2 S) relu(S^-1 W_1 x + S^-1 b)      S = diag(s), s > 0

Channels that lie between two layers and that nothing else reads may have any scale. One that makes their ranges alike
loses less when all of them are rounded with one step. After `rm`, what is carried and what a branch computes differ in
range, and the carrying weight 1 sets the scale of small weights beside it. With powers of two for s no bit of the
float network's output changes.

Rounding weights also shifts the mean of what a layer writes; its bias takes that back.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._core.layers import behaves_as
from unskip._core.modules import copied
from unskip.ship.fake_quant import fake_quantized, rounded, run_watched, sqnr, weighted_layers
from unskip.surgery.tracing import TraceStep, trace

LAYERS = ("conv2d", "linear")
# f(s x) = s f(x) for s > 0, channel by channel
HOMOGENEOUS = ("relu", "relu_", "leaky_relu", "leaky_relu_", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
               "adaptive_max_pool2d", "mean", "amax")  # fmt: skip
EXPONENT = 40  # the largest power of two: far from where float32 under- or overflows


@torch.no_grad()
def equalize(model: nn.Module, inputs: Tensor) -> nn.Module:
    """A copy of a folded network with hidden channels brought to like ranges: the same function, to the bit.

    For targets with a scale for each output channel. With one scale for a whole layer it does harm.

    Args:
        model: a folded network in eval mode.
        inputs: like those that it will see, for the ranges of its channels.

    Raises:
        ValueError: the outputs would not be the same numbers.
    """
    before, model = model, copied("equalize", model)
    ordinary = {layer for _, layer in weighted_layers(model)}
    largest: dict[nn.Module, Tensor] = {}
    pairs = [pair for pair in _pairs(trace(model, inputs[:1].clone())) if ordinary.issuperset(pair)]

    def watch(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        r = args[0].abs().transpose(0, 1).flatten(1).amax(1)
        largest[layer] = torch.maximum(largest.get(layer, r), r)

    run_watched(model, inputs, [second.register_forward_pre_hook(watch) for _, second in pairs])
    for first, second in pairs:
        _scale(first, second, scales(largest[second], second))
    x = inputs[:64]
    if not torch.equal(model(x.clone()), before(x.clone())):
        raise ValueError(
            "equalize: the outputs are not the same numbers afterwards: layers share a weight, channels are read along "
            "another axis, or numbers are so small or large that a power of two takes them out of the range of their "
            "dtype. Leave the network as it is."
        )
    return model


def scales(r: Tensor, second: nn.Conv2d | nn.Linear) -> Tensor:
    """Powers of two near sqrt(r / w) over its geometric mean, for channels of range r that columns of range w read."""
    groups = second.groups if isinstance(second, nn.Conv2d) else 1
    w = second.weight.abs().flatten(2).amax(2) if second.weight.ndim > 2 else second.weight.abs()  # (out, in / groups)
    w = w.view(groups, -1, w.shape[1]).amax(1).flatten()
    alive = (r > 0) & (w > 0)
    log = torch.where(alive, (r.clamp_min(1e-30) / w.clamp_min(1e-30)).log2() / 2, 0)
    log = torch.where(alive, log - log.sum() / alive.sum().clamp_min(1), 0)
    return torch.exp2(log.round().clamp(-EXPONENT, EXPONENT))


def _scale(first: nn.Conv2d | nn.Linear, second: nn.Conv2d | nn.Linear, s: Tensor) -> None:
    first.weight /= s.view(-1, *[1] * (first.weight.ndim - 1))
    if first.bias is not None:
        first.bias /= s
    groups = second.groups if isinstance(second, nn.Conv2d) else 1
    columns = s.view(groups, -1).repeat_interleave(second.weight.shape[0] // groups, 0)  # what each row reads
    second.weight *= columns.view(*columns.shape, *[1] * (second.weight.ndim - 2))


def _pairs(steps: list[TraceStep]) -> list[tuple[nn.Conv2d | nn.Linear, nn.Conv2d | nn.Linear]]:
    """Layers that run once, each with the one that alone reads what it writes, channel by channel."""
    runs: dict[nn.Module, int] = {}
    for step in steps:
        if step.function in LAYERS:
            runs[step.module] = runs.get(step.module, 0) + 1
    pairs = []
    for start in steps:
        step, channels = start, start.shape[1] if len(start.shape) > 1 else 0
        while (step.function in LAYERS and step is start) or step.function in HOMOGENEOUS or _keeps(step):
            if len(step.readers) != 1 or (step is not start and step.shape[1:2] != (channels,)):
                break
            step = step.readers[0]
        if start.function in LAYERS and step is not start and step.function in LAYERS:
            first, second = start.module, step.module
            reads = getattr(second, "in_channels", getattr(second, "in_features", 0))
            if runs[first] == runs[second] == 1 and reads == channels:
                pairs.append((first, second))
    return pairs  # type: ignore[return-value]


def _keeps(step: TraceStep) -> bool:
    """Whether a step adds zeros around or drops axes of one pixel, so that channels stay what they are."""
    if step.function == "pad":
        return behaves_as(step.module, nn.ZeroPad2d)
    (source,) = step.sources[:1]
    return step.function in ("flatten", "squeeze", "reshape", "view") and (
        source is not None and step.shape[:2] == source.shape[:2] and step.shape.numel() == step.shape[:2].numel()
    )


@torch.no_grad()
def bias_shifts(model: nn.Module, inputs: Tensor, bits: int) -> dict[str, Tensor]:
    """For each layer with a bias, by path: -E[(Q(W) - W) x], which takes back what rounding W shifts the mean by."""
    layers = {layer: path for path, layer in weighted_layers(model) if layer.bias is not None}
    sums: dict[str, Tensor] = {}

    def watch(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        error = rounded(layer.weight, bits) - layer.weight
        shift = F.linear(args[0], error) if isinstance(layer, nn.Linear) else layer._conv_forward(args[0], error, None)
        axes = [axis for axis in range(shift.ndim) if axis != (shift.ndim - 1 if isinstance(layer, nn.Linear) else 1)]
        path = layers[layer]
        sums[path] = sums.get(path, torch.zeros(())) - len(args[0]) * shift.mean(axes)

    run_watched(model, inputs, [layer.register_forward_hook(watch) for layer in layers])
    return {path: total / len(inputs) for path, total in sums.items()}


@torch.no_grad()
def shifted(model: nn.Module, shifts: dict[str, Tensor]) -> nn.Module:
    """A copy of a model with these numbers added to its layers' biases."""
    model = copied("quantize", model)
    for path, shift in shifts.items():
        model.get_parameter(f"{path}.bias" if path else "bias").add_(shift)
    return model


@torch.no_grad()
def output_sqnr(model: nn.Module, inputs: Tensor, bits: int, exact: Tensor) -> float:
    """Signal to noise, in dB, of a model's output where it is rounded as its INT8 file would be."""
    return sqnr(exact, fake_quantized(model, inputs, bits=bits)(inputs.clone()))
