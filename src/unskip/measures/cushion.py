"""Noise stability: layer cushion and interlayer cushion (Yu and Tomasi 2019, arXiv:1905.10944, section 5)."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from unskip._core.errors import reason
from unskip.measures.blocks import Block, blocks_of
from unskip.measures.layer_types import by_sample
from unskip.measures.probe import Family, Layer, Probe, sample_axis
from unskip.measures.series import About, Findings

NAN = float("nan")
SAMPLES = 16  # of the batch, for Jacobians
PROBES = 4  # random directions of Hutchinson's estimate
EXACT = 128  # entries of an input up to which its Jacobian is taken exactly

LAYER = About(
    name="layer_cushion",
    title="How firmly a layer holds its signal",
    label="layer cushion μ, mean over inputs",
    log=True,
    healthy="Larger is firmer: noise in the weights changes the output less. Compare networks layer by layer.",
    source="Yu and Tomasi 2019, section 5",
)
INTERLAYER = About(
    name="interlayer_cushion",
    title="How firmly a block holds its signal",
    label="interlayer cushion μ_ij, mean over inputs",
    log=True,
    healthy="At 1 and above a block passes on its input better than noise. With BatchNorm in training mode a plain "
    "block's is 0 by construction, since scaling its input changes nothing.",
    source="Yu and Tomasi 2019, section 5",
)


def layer_cushion(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """μ(x) = ‖A x‖ / ‖A‖_F / ‖x‖ for every sample, (B,).

    As the paper measures it, ‖A‖_F of a convolution is that of its kernels. For a residual layer folded into a plain
    one give the weight with 1 taken off its ID entries (T⁻¹).

    Args:
        weight: A, (out, in, ...).
        x: input of the layer, (B, ...).
        y: A x, its output without bias, (B, ...).
    """
    sizes = x.flatten(1).double().norm(dim=1) * weight.double().norm()
    return y.flatten(1).double().norm(dim=1) / sizes


class Estimate(NamedTuple):
    value: float
    error: float


def mean_of(values: Tensor) -> Estimate:
    """The mean over samples and its standard error."""
    values = values[values.isfinite()]
    if len(values) == 0:
        return Estimate(NAN, NAN)
    error = (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else NAN
    return Estimate(values.mean().item(), error)


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> Estimate | None:
    weight = layer.weight
    if weight is None or x is None:
        return None
    axis = sample_axis(layer.module, tuple(x.shape), layer.samples)
    bias = layer.module.bias
    if isinstance(bias, Tensor):
        y = y - (bias.detach() if layer.unit_axis == -1 else bias.detach().view(-1, *[1] * (y.ndim - 2)))
    flat, out = (None if axis is None else by_sample(x, layer.samples, axis)), layer.by_sample(y)
    return None if flat is None or out is None else mean_of(layer_cushion(weight, flat, out))


def jvp(function: Callable[[Tensor], Any], x: Tensor, v: Tensor, seed: int) -> Tensor:
    """J v, the derivative of `function` at x in the direction v, by forward-mode differentiation."""
    devices = [x.device] if x.is_cuda else []
    with (
        torch.random.fork_rng(devices),
        torch.no_grad(),
        forward_ad.dual_level(),
        sdpa_kernel(SDPBackend.MATH),
        warnings.catch_warnings(),
    ):
        # PyTorch's own rules for the derivative of BatchNorm warn that they are written with torch.jit.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.manual_seed(seed)  # the same dropout in every direction
        y = function(forward_ad.make_dual(x.clone(), v))
        if not isinstance(y, Tensor):
            raise TypeError(f"it returns {type(y).__name__}")
        tangent = forward_ad.unpack_dual(y).tangent
        return torch.zeros_like(y) if tangent is None else tangent


def interlayer_cushion(
    function: Callable[[Tensor], Any],
    x: Tensor,
    *,
    coupled: bool = False,
    probes: int = PROBES,
    exact: int = EXACT,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """μ(x) = sqrt(n) ‖J x‖ / ‖J‖_F / ‖x‖ for every sample and its standard error, (B,) each; n entries a sample.

    ‖J‖_F is exact for inputs of at most `exact` entries, else Hutchinson's estimate, the mean of ‖J v‖² over random
    signs v. Where samples influence each other (BatchNorm in training mode) J is the derivative of a sample's output by
    the whole batch.

    Args:
        function: from (B, ...) to (B, ...).
        x: (B, ...).
        coupled: whether samples influence each other.
    """
    samples = x.shape[0]
    size = x[0].numel()

    def squares(v: Tensor) -> Tensor:
        return jvp(function, x, v.reshape(x.shape), seed).reshape(samples, -1).double().square().sum(1)

    along = squares(x)
    if (x.numel() if coupled else size) <= exact:
        # Unit vectors, one a time; where samples do not influence each other, the same for all of them at once.
        basis = torch.eye(x.numel() if coupled else size, dtype=x.dtype, device=x.device)
        frobenius = sum((squares(e if coupled else e.expand(samples, -1)) for e in basis), torch.zeros_like(along))
        spread = torch.zeros_like(along)
    else:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.stack(
            [squares((torch.randint(0, 2, x.shape, generator=generator) * 2 - 1).to(x)) for _ in range(probes)]
        )
        frobenius = drawn.mean(0)
        # d μ / μ = -½ d‖J‖² / ‖J‖²
        spread = drawn.std(0) / math.sqrt(probes) / frobenius / 2
    cushion = math.sqrt(size) * (along / frobenius).sqrt() / x.reshape(samples, -1).double().norm(dim=1)
    return cushion, cushion * spread


def couples(block: Block) -> bool:
    """Whether the samples of a batch influence each other in a block: BatchNorm with the statistics of the batch."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats)
        for part in block.modules
        for module in part.modules()
    )


def interlayer(probe: Probe) -> tuple[dict[Block, Estimate], tuple[str, ...]]:
    """The interlayer cushion of every block, from its input to its output, on a few samples of the batch."""
    found: dict[Block, Estimate] = {}
    missing: dict[str, str] = {}
    blocks = {block.start: block for block in blocks_of(probe.network)}
    samples = min(SAMPLES, probe.samples)

    def on_entry(path: str, arguments: tuple, keywords: dict) -> None:
        block = blocks.get(path)
        if block is None or block in found or block.name in missing:
            return
        x = arguments[0] if arguments else None
        if not isinstance(x, Tensor) or not x.is_floating_point() or len(arguments) > 1 or x.shape[0] != samples:
            missing[block.name] = "it takes more than one tensor of samples"
            return
        try:
            cushion, spread = interlayer_cushion(block, x.detach(), coupled=couples(block), seed=probe.seed)
        except (RuntimeError, TypeError) as error:
            missing[block.name] = reason(error)
            return
        value, error_of_mean = mean_of(cushion)
        estimated = spread[spread.isfinite()].square().sum().sqrt().item() / max(len(cushion), 1)
        found[block] = Estimate(value, math.hypot(0 if math.isnan(error_of_mean) else error_of_mean, estimated))

    with torch.no_grad(), probe.with_hooks(lambda call: None, on_entry=on_entry):
        probe.run(*probe.part(samples))
    if not missing:
        return found, ()
    name, why = next(iter(missing.items()))
    return found, (
        f"The interlayer cushion of {len(missing)} of {len(blocks)} blocks is not measured, that of {name!r} because "
        f"{why}.",
    )


def end_of(block: Block, probe: Probe) -> str:
    """The name of the layer that puts out what a block puts out."""
    paths = [path for path, module in probe.network.named_modules() if module in block.modules]
    inside = [
        layer
        for layer in probe.layers
        if any(layer.path == path or layer.path.startswith(f"{path}.") for path in paths)
    ]
    # A coder that later blocks share runs under the name of the first, but never in the trunk.
    return next((layer.name for layer in reversed(inside) if layer.trunk), inside[-1].name if inside else block.name)


def report(probe: Probe) -> Findings:
    layers = [(layer.name, kept) for layer in probe.layers if (kept := layer.kept["cushion"]) is not None]
    found, notes = interlayer(probe)
    return Findings(
        series=(
            LAYER.series(
                (name for name, _ in layers), (kept.value for _, kept in layers), (kept.error for _, kept in layers)
            ),
            INTERLAYER.series(
                (end_of(block, probe) for block in found),
                (kept.value for kept in found.values()),
                (kept.error for kept in found.values()),
            ),
        ),
        notes=notes,
    )


FAMILY = Family(name="cushion", report=report, forward=forward)
