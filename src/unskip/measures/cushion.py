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
from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Findings, Measure, Series

MAX_SAMPLES = 16  # of the batch, for Jacobians
PROBES = 4  # random directions of Hutchinson's estimate
MAX_EXACT = 128  # entries of an input up to which its Jacobian is computed exactly

LAYER = Measure(
    name="layer_cushion",
    title="Noise stability of each layer",
    label="layer cushion μ, mean over inputs",
    log=True,
    healthy="Higher is more stable: noise in the weights changes the output less. Compare networks layer by layer.",
    source="Yu and Tomasi 2019, section 5",
)
INTERLAYER = Measure(
    name="interlayer_cushion",
    title="Noise stability of each block",
    label="interlayer cushion μ_ij, mean over inputs",
    log=True,
    healthy="At 1 and above, a block passes on its input better than noise. With BatchNorm in training mode it is 0 "
    "for plain blocks by construction, because scaling their input changes nothing.",
    source="Yu and Tomasi 2019, section 5",
)


def layer_cushion(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """μ(x) = ‖A x‖ / ‖A‖_F / ‖x‖ of every sample, (B,).

    As in the paper, ‖A‖_F of a convolution is the norm of its kernels. For a residual layer folded into a plain one,
    pass the weight with 1 subtracted from its ID entries (T⁻¹).

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


def mean_with_error(values: Tensor) -> Estimate:
    """The mean of the finite values and its standard error."""
    values = values[values.isfinite()]
    if len(values) == 0:
        return Estimate(math.nan, math.nan)
    error = (values.std() / math.sqrt(len(values))).item() if len(values) > 1 else math.nan
    return Estimate(values.mean().item(), error)


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> Estimate | None:
    weight = layer.weight
    if weight is None:
        return None
    bias = layer.module.bias
    if isinstance(bias, Tensor):
        y = y - (bias.detach() if layer.unit_axis == -1 else bias.detach().view(-1, *[1] * (y.ndim - 2)))
    inputs, outputs = layer.by_sample(x), layer.by_sample(y)
    return None if inputs is None or outputs is None else mean_with_error(layer_cushion(weight, inputs, outputs))


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
        # PyTorch's forward-mode formulas for BatchNorm use torch.jit and warn about it.
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
    max_exact: int = MAX_EXACT,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """μ(x) = sqrt(n) ‖J x‖ / ‖J‖_F / ‖x‖ of every sample with n entries, and its standard error, (B,) each.

    ‖J‖_F is exact for inputs of at most `max_exact` entries. For larger ones it is Hutchinson's estimate, the mean of
    ‖J v‖² over random signs v. If samples influence each other (BatchNorm in training mode), J is the derivative of a
    sample's output with respect to the whole batch.

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
    if (x.numel() if coupled else size) <= max_exact:
        # Unit vectors one at a time; independent samples share them.
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


def couples_samples(block: Block) -> bool:
    """Whether a block has a BatchNorm that uses the statistics of the batch."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats)
        for part in block.modules
        for module in part.modules()
    )


def interlayer(probe: Probe) -> tuple[dict[Block, Estimate], tuple[str, ...]]:
    """The interlayer cushion of every block, from its input to its output, on a few samples; and notes."""
    found: dict[Block, Estimate] = {}
    missing: dict[str, str] = {}  # name of the block: reason
    blocks = {block.name: block for block in blocks_of(probe.model)}
    samples = min(MAX_SAMPLES, probe.samples)

    def on_entry(path: str, args: tuple, kwargs: dict) -> None:
        block = blocks.get(path)
        if block is None or block in found or path in missing:
            return
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not x.is_floating_point() or len(args) > 1 or x.shape[0] != samples:
            missing[path] = "it takes more than one tensor of samples"
            return
        try:
            cushion, spread = interlayer_cushion(block, x.detach(), coupled=couples_samples(block), seed=probe.seed)
        except (RuntimeError, TypeError) as error:
            missing[path] = reason(error)
            return
        value, error_of_mean = mean_with_error(cushion)
        estimated = spread[spread.isfinite()].square().sum().sqrt().item() / max(len(cushion), 1)
        found[block] = Estimate(value, math.hypot(0 if math.isnan(error_of_mean) else error_of_mean, estimated))

    with torch.no_grad():
        probe.rerun(arguments=probe.first_samples(samples), on_entry=on_entry)
    if not missing:
        return found, ()
    name, why = next(iter(missing.items()))
    return found, (
        f"The interlayer cushion is not measured for {len(missing)} of {len(blocks)} blocks; for {name!r} because "
        f"{why}.",
    )


def last_layer(block: Block, probe: Probe) -> str:
    """The name of the layer that computes a block's output."""
    paths = [path for path, module in probe.model.named_modules() if module in block.modules]
    inside = [
        layer
        for layer in probe.layers
        if any(layer.path == path or layer.path.startswith(f"{path}.") for path in paths)
    ]
    # A coder that later blocks share runs under the name of the first, but never in the trunk.
    return next((layer.name for layer in reversed(inside) if layer.trunk), inside[-1].name if inside else block.name)


def report(probe: Probe) -> Findings:
    layers = probe.stats("cushion")
    blocks, notes = interlayer(probe)
    ends = {last_layer(block, probe): estimate for block, estimate in blocks.items()}
    series = [
        Series.of(measure, found, [each.value for each in found.values()], [each.error for each in found.values()])
        for measure, found in ((LAYER, layers), (INTERLAYER, ends))
    ]
    return Findings(series=tuple(series), notes=notes)


FAMILY = Family(name="cushion", report=report, forward=forward)
