"""The 20-layer, 256-wide random networks of Hu, sections 2.1 and A, and their weights' gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from unskip.reproduce.registry import between

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"SELU": F.selu, "Tanh": torch.tanh, "ReLU": F.relu}
GAINS = {"SELU": 1.0, "Tanh": 2.0, "ReLU": 2.0}  # weights are N(0, gain/d) (section A)
REPEATS = between(2, 1_000_000, "; one alone gives no error bar")


@dataclass(frozen=True, kw_only=True)
class SimulatedNetwork:
    """A random fully-connected network. Layer: linear, BatchNorm where `norm`, activation."""

    activation: str = "ReLU"  # a name of ACTIVATIONS
    norm: bool = True  # BatchNorm after each linear layer, with the batch's statistics
    residual: bool = False  # a skip around every two layers, before the second activation (section 2.1)
    depth: int = 20
    width: int = 256
    batch: int = 128


def gradient_norms(network: SimulatedNetwork, *, repeats: int, seed: int) -> NDArray[np.float64]:
    """Norms of the gradients of all weight matrices, (repeats, depth), first layer first.

    Inputs N(0, I) and weights are drawn anew for each repetition, and so are the gradients N(0, I/d) at the output.
    """
    g, d = ACTIVATIONS[network.activation], network.width
    std = math.sqrt(GAINS[network.activation] / d)
    generator = torch.Generator().manual_seed(seed)
    norms = np.empty((repeats, network.depth))
    for repeat in range(repeats):
        weights = torch.randn(network.depth, d, d, generator=generator).mul_(std).requires_grad_()
        x = torch.randn(network.batch, d, generator=generator)
        skip = x
        for layer, weight in enumerate(weights.unbind()):
            z = x @ weight
            if network.norm:
                z = F.batch_norm(z, None, None, training=True)
            if network.residual and layer % 2:
                z = z + skip
            x = g(z)
            if layer % 2:
                skip = x
        top = torch.randn(network.batch, d, generator=generator) / math.sqrt(d)
        (gradient,) = torch.autograd.grad(x, weights, top)
        norms[repeat] = gradient.flatten(1).norm(dim=1).double().numpy()
    return norms


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How fast gradients grow from a layer to the one before: the slope of ln(norm) over layers."""

    value: float  # per layer, in natural logarithms
    error: float  # standard error over repetitions

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.4f}"


def log_rate(norms: NDArray[np.float64]) -> Rate:
    """The slope of ln(norm) from the last layer back to the second, one fit per repetition.

    The first layer is left out: it alone reads inputs of mean 0 and variance 1, where all others read what an
    activation gave out, so that its gradient is another multiple of the signal.
    """
    layer = np.arange(2, norms.shape[1] + 1)
    slopes = -np.polyfit(layer, np.log(norms[:, 1:]).T, 1)[0]
    return Rate(value=float(slopes.mean()), error=float(slopes.std(ddof=1) / math.sqrt(len(slopes))))


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradient norms of one kind of network by layer, over repetitions."""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    rate: Rate

    def numbers(self, **more: Any) -> dict[str, Any]:
        """For the record."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist(), "log_rate": vars(self.rate), **more}


def measure_gradients(network: SimulatedNetwork, *, repeats: int, seed: int) -> Gradients:
    norms = gradient_norms(network, repeats=repeats, seed=seed)
    return Gradients(mean=norms.mean(0), std=norms.std(0, ddof=1), rate=log_rate(norms))
