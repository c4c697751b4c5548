"""Yu and Tomasi 2019, Figure 11 (D.4.1): the share of dominant gradient flows, by theory and simulation."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch

from unskip._core.drawing import FAINT, INK, PLAIN, RESIDUAL, dress, legend, panels
from unskip.reproduce.registry import SEED, Outcome, Settings, between, reproduction
from unskip.theory import expected_dominance_plain, expected_dominance_residual
from unskip.theory.dominance import Form


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The model of D.4.1, with the common setting of Figure 11."""

    n: int = 20  # units of a layer
    l: int = 5  # noqa: E741  (the paper's letter for the layer)
    sigma_A: float = 0.01  # noqa: N815  deviation of A
    sigma_V: float = 0.1  # noqa: N815  deviation of the gradients at the last layer
    p: float = 0.9  # probability that a unit is on
    epsilon: float = 0.1  # of K = I + ε A
    L: int = 10  # layers


PANELS: tuple[tuple[str, str, tuple[float, ...], bool], ...] = (  # field, label, values, logarithmic axis
    ("n", "dimension n", (2, 5, 10, 15, 20, 30, 40, 50), False),
    ("l", "layer l", (1, 2, 3, 4, 5, 6, 7, 8, 9), False),
    ("sigma_A", r"deviation $\sigma_A$ of A", (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0), True),
    ("sigma_V", r"deviation $\sigma_V$ of the last gradients", (0.001, 0.01, 0.1, 1.0, 10.0), True),
    ("p", "probability p that a unit is on", (0.05, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0), False),
    ("epsilon", "scalar ε", (0.001, 0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0), True),
)

LINES = (  # key, style, colour, words
    ("plain exact", "-", PLAIN, "plain, exact"),
    ("residual Eq. 11", "-", RESIDUAL, "residual, Eq. 11"),
    ("residual corrected", ":", INK, r"residual, $p' = \sum p^k$"),
    ("residual concluded", "--", FAINT, "residual, “in conclusion”"),
)


def simulate(setting: Setting, *, residual: bool, trials: int, generator: torch.Generator) -> tuple[float, float]:
    """E[σ^(l)] and its standard error, from `trials` products of random matrices."""
    shares = []
    n = setting.n
    for start in range(0, trials, 2000):  # a part at a time, for memory
        count = min(2000, trials - start)
        theta = torch.eye(n).expand(count, n, n)
        for _ in range(setting.L - setting.l):
            K = torch.randn(count, n, n, generator=generator) * setting.sigma_A
            if residual:
                K = torch.eye(n) + setting.epsilon * K
            S = torch.rand(count, 1, n, generator=generator) < setting.p
            theta = theta @ K * S
        theta = theta * torch.randn(count, 1, n, generator=generator) * setting.sigma_V
        own = theta.diagonal(dim1=1, dim2=2)
        shares.append((own.abs() > (theta.sum(2) - own).abs()).double().mean(1))
    share = torch.cat(shares)
    return share.mean().item(), (share.std() / len(share) ** 0.5).item()


@dataclass(frozen=True, kw_only=True)
class Figure11(Settings):
    """What can be set."""

    trials: Annotated[
        int,
        "products of random matrices for a point, each with n units; the paper: 100,000",
        between(2, 10_000_000, "; one alone gives no error bar"),
    ] = 2000
    seed: Annotated[int, "seed of all random matrices", SEED] = 0


@reproduction("noise-figure11", settings=Figure11)
def figure11(settings: Figure11) -> Outcome:
    """Six panels: E[σ] against n, l, σ_A, σ_V, p and ε."""
    title = "Dominant gradient flows at initialisation: points are simulated, lines are theory"
    figure, axes = panels(2, 3, size=(9.6, 5.6), title=title)
    generator = torch.Generator().manual_seed(settings.seed)
    numbers: dict[str, list[dict[str, float]]] = {}
    for ax, (name, label, values, log), letter in zip(axes, PANELS, "abcdef", strict=True):
        points = {value: replace(Setting(), **{name: value}) for value in values}  # type: ignore[arg-type]
        rows = [{name: value, **_point(point, settings.trials, generator)} for value, point in points.items()]
        numbers[name] = rows
        column = {key: np.array([row[key] for row in rows]) for key in rows[0]}
        for kind, colour in (("plain", PLAIN), ("residual", RESIDUAL)):
            bars: dict[str, Any] = {"fmt": "o", "color": colour, "markersize": 4, "label": f"{kind}, simulated"}
            ax.errorbar(column[name], column[kind], 2 * column[f"{kind} error"], **bars)
        for key, style, colour, words in LINES:
            ax.plot(column[name], column[key], style, color=colour, linewidth=1.3, label=words)
        dress(ax, x=label, y="E[σ], share of units", title=f"({letter})", log_x=log)
        ax.set_ylim(-0.03, 1.05)
    legend(axes[4], loc="upper left")
    every = [row for rows in numbers.values() for row in rows]
    limits = {"sigma_A": (0, 0.1), "epsilon": (0, 1), "p": (0.7, 1), "n": (3, 1000)}
    small = [row for row in every if all(low <= row.get(key, low) <= high for key, (low, high) in limits.items())]

    def apart(rows: list[dict[str, float]], kind: str, formula: str) -> float:
        return max(abs(row[kind] - row[formula]) for row in rows)

    lines = (
        f"plain: simulation and the exact formula differ by at most {apart(every, 'plain', 'plain exact'):.4f} at "
        f"{len(every)} points.",
        f"residual, ε σ_A at most 0.01, p at least 0.7, n above 2: simulation and Eq. 11 differ by at most "
        f"{apart(small, 'residual', 'residual Eq. 11'):.4f} at {len(small)} points, with p′ = Σ pᵏ by "
        f"{apart(small, 'residual', 'residual corrected'):.4f}.",
        f"residual, elsewhere, where first order in ε and Eq. 9 are not enough: by up to "
        f"{apart(every, 'residual', 'residual corrected'):.3f}.",
    )
    return Outcome(lines=lines, numbers=numbers, figure=figure)


def _point(setting: Setting, trials: int, generator: torch.Generator) -> dict[str, float]:
    """Simulation and every formula at one setting."""
    n, p, hops = setting.n, setting.p, setting.L - setting.l

    def first_order(form: Form, logistic: bool = False) -> float:
        scale = {"epsilon": setting.epsilon, "sigma_A": setting.sigma_A}
        return expected_dominance_residual(n, hops=hops, p=p, form=form, logistic=logistic, **scale)

    plain, plain_error = simulate(setting, residual=False, trials=trials, generator=generator)
    residual, residual_error = simulate(setting, residual=True, trials=trials, generator=generator)
    return {
        "plain": plain,
        "plain error": plain_error,
        "residual": residual,
        "residual error": residual_error,
        "plain exact": expected_dominance_plain(n, hops=hops, p=p),
        "residual Eq. 11": first_order("derived"),
        "residual corrected": first_order("corrected"),
        "residual concluded": first_order("concluded", logistic=True),
    }
