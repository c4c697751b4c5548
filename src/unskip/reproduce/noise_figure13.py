"""Yu and Tomasi 2019, arXiv:1905.10944, Figure 13 (section E, Eq. 14 and 15): P(|X| > |Y|) of two normal variables.

Eq. 14 as the paper has it, an integral, here by quadrature; its closed form (2/π) arctan r; the paper's logistic
approximation (Eq. 15); and a simulation.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from unskip._core.drawing import FAINT, INK, OTHER, PLAIN, dress, legend, panels
from unskip.reproduce.registry import SEED, Outcome, Settings, between, reproduction
from unskip.theory import probability_larger, probability_larger_logistic

NODE, WEIGHT = np.polynomial.legendre.leggauss(200)
REACH = 10.0  # standard deviations


@dataclass(frozen=True, kw_only=True)
class Figure13(Settings):
    """What can be set."""

    samples: Annotated[int, "pairs (X, Y) drawn for each simulated point", between(100, 10**8)] = 200_000
    seed: Annotated[int, "seed of the simulation", SEED] = 0


def as_printed(r: float) -> float:
    """φ(r) of Eq. 14, 4 ∫ g_r(u) G(u) du - 1 over u from 0 on, by Gauss-Legendre quadrature."""
    x = (NODE + 1) / 2 * REACH  # u = r x
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * (1 + math.erf(r * value / math.sqrt(2))) for value in x])
    return float(4 * (WEIGHT * density * below).sum() * REACH / 2 - 1)


def simulated(r: float, samples: int, generator: torch.Generator) -> float:
    x, y = torch.randn(2, samples, generator=generator, dtype=torch.float64)
    return (r * x.abs() > y.abs()).double().mean().item()


@reproduction("noise-figure13", settings=Figure13)
def figure13(settings: Figure13) -> Outcome:
    """φ against r on a logarithmic axis, with its approximation, and the errors of both formulas."""
    ratios = np.logspace(-2, 2, 161).tolist()
    printed, closed = [as_printed(r) for r in ratios], [probability_larger(r) for r in ratios]
    logistic = [probability_larger_logistic(r) for r in ratios]
    points = np.logspace(-2, 2, 9).tolist()
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = [simulated(r, settings.samples, generator) for r in points]
    integral = max(abs(a - b) for a, b in zip(printed, closed, strict=True))
    approximation = max(abs(a - b) for a, b in zip(logistic, closed, strict=True))
    sigmas = [
        abs(p - probability_larger(r))
        / math.sqrt(probability_larger(r) * (1 - probability_larger(r)) / settings.samples)
        for r, p in zip(points, drawn, strict=True)
    ]
    figure, axes = panels(1, 2, size=(8.6, 3.6), title="P(|X| > |Y|) of two normal variables, r = σ_X / σ_Y")
    axes[0].plot(ratios, closed, color=PLAIN, linewidth=2.2, label="(2/π) arctan r, Eq. 14")
    axes[0].plot(ratios, logistic, color=OTHER, linewidth=0.9, label="1 / (1 + r^-1.2), Eq. 15")
    axes[0].plot(points, drawn, "o", color=INK, markersize=3.5, label=f"simulated, {settings.samples:,} pairs each")
    axes[0].axvline(1, color=FAINT, linestyle=":", linewidth=1)
    axes[0].axhline(0.5, color=FAINT, linestyle=":", linewidth=1)
    axes[1].plot(ratios, [a - b for a, b in zip(logistic, closed, strict=True)], color=OTHER)
    dress(axes[0], x="r", y="probability", title="Figure 13", log_x=True)
    dress(axes[1], x="r", y="Eq. 15 less Eq. 14", title="error of the approximation", log_x=True)
    legend(axes[0])
    lines = (
        f"Eq. 14, the integral, is (2/π) arctan r: largest difference {integral:.1e} at r from 0.01 to 100; simulated "
        f"points are within {max(sigmas):.1f} standard errors.",
        f"Eq. 15 is off by at most {approximation:.4f}; the paper calls the difference barely visible.",
    )
    numbers = {"r": ratios, "Eq. 14 by quadrature": printed, "Eq. 14 closed": closed, "Eq. 15": logistic}
    numbers |= {"simulated r": points, "simulated": drawn}
    return Outcome(lines=lines, numbers=numbers, figure=figure)
