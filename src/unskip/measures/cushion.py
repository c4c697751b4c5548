"""Noise stability: layer cushion and interlayer cushion (Yu and Tomasi 2019, arXiv:1905.10944, section 5)."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from unskip._core.errors import reason
from unskip.measures.blocks import Block, blocks_of
from unskip.measures.probe import Family, Layer, Probe
from unskip.measures.series import Estimate, Findings, mean_with_error, measures_of

MAX_SAMPLES = 16  # of the batch, for Jacobians
PROBES = 4  # random directions of Hutchinson's estimate
MAX_EXACT = 128  # entries of an input up to which its Jacobian is computed exactly


def layer_cushion(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """μ(x) = ‖A x‖ / ‖A‖_F / ‖x‖ of every sample, (B,).

    As in the paper, ‖A‖_F of a convolution is the norm of its kernels. For a residual layer folded into a plain one,
    pass the weight with 1 subtracted from its ID entries (T⁻¹).

    Args:
        weight: A, (out, in, ...).
        x: input of the layer, (B, ...).
        y: A x, its output without bias, (B, ...).
    """
    norm = torch.linalg.vector_norm
    mu: Tensor = norm(y.flatten(1).double(), dim=1) / norm(x.flatten(1).double(), dim=1) / norm(weight.double())
    return mu


def forward(layer: Layer, x: Tensor | None, y: Tensor) -> dict[str, Estimate] | None:
    if layer.weight is None:
        return None
    bias = getattr(layer.module, "bias", None)
    if isinstance(bias, Tensor):
        y = y - (bias.detach() if layer.unit_axis == -1 else bias.detach().view(-1, *[1] * (y.ndim - 2)))
    inputs, outputs = layer.by_sample(x), layer.by_sample(y)
    if inputs is None or outputs is None:
        return None
    return {"layer_cushion": mean_with_error(layer_cushion(layer.weight, inputs, outputs))}


def jvp(function: Callable[[Tensor], Any], x: Tensor, v: Tensor, seed: int) -> Tensor:
    """J v, the derivative of `function` at x in the direction v, by forward-mode differentiation."""
    devices = [x.device] if x.is_cuda else []
    dual: Any = forward_ad  # whose functions PyTorch leaves untyped
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
        y = function(dual.make_dual(x.clone(), v))
        if not isinstance(y, Tensor):
            raise TypeError(f"it returns {type(y).__name__}")
        tangent: Tensor | None = dual.unpack_dual(y).tangent
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


def report(probe: Probe) -> Findings:
    """The interlayer cushion of every block, from its input to its output, on a few samples."""
    missing: dict[str, str] = {}  # name of the block: reason
    blocks = {block.name: block for block in blocks_of(probe.model)}
    left = dict(blocks)  # those that have not run yet
    samples = min(MAX_SAMPLES, probe.samples)

    def on_entry(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        block = left.pop(path, None)
        if block is None:
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
        mean = mean_with_error(cushion)
        estimated = spread[spread.isfinite()].square().sum().sqrt().item() / max(len(cushion), 1)
        end = last_layer(block, probe)
        if end is not None:
            error_of_mean = 0.0 if math.isnan(mean.error) else mean.error
            end.values["interlayer_cushion"] = Estimate(mean.value, math.hypot(error_of_mean, estimated))

    with torch.no_grad():
        probe.rerun(arguments=probe.first_samples(samples), on_entry=on_entry)
    if not missing:
        return Findings()
    name, why = next(iter(missing.items()))
    count = f"{len(missing)} of {len(blocks)} blocks"
    return Findings(notes=(f"The interlayer cushion is not measured for {count}; for {name!r} because {why}.",))


def last_layer(block: Block, probe: Probe) -> Layer | None:
    """The layer that computes a block's output."""
    paths = tuple(f"{path}." for path, module in probe.model.named_modules() if module in block.modules)
    inside = [layer for layer in probe.layers if f"{layer.path}.".startswith(paths)]
    # A coder that later blocks share runs under the name of the first, but never in the trunk.
    return next((layer for layer in reversed(inside) if layer.trunk), inside[-1] if inside else None)


FAMILY = Family(name="cushion", measures=measures_of("cushion"), forward=forward, report=report)
