"""Where a paper's print and the truth part, measured: the numbers of docs/errata.md."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unskip.measures import interlayer_cushion, record_outputs
from unskip.models.cifar import cifar_resnet
from unskip.reproduce.images import load_set, sample_images
from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import Outcome, reproduction
from unskip.reproduce.seqnet_simulation import ACTIVATIONS
from unskip.surgery import plainify
from unskip.theory import (
    activation_moments,
    batch_norm,
    condition_number,
    dominance_ratio,
    growth_rate,
    probability_larger,
    probability_larger_logistic,
    relative_change_bound,
    survival_bound,
    surviving_fraction,
    two_layer,
    unit_statistics,
)


@dataclass(frozen=True, kw_only=True)
class Errata:
    """What can be set."""

    seed: Annotated[int, "seed of all simulations"] = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: what a paper prints, what we say, and what simulation says."""

    what: str
    printed: float
    ours: float
    measured: float
    error: float  # standard error of `measured`; 0 where it is exact

    def __str__(self) -> str:
        bar = f" ± {self.error:.2g}" if self.error else ""
        return f"{self.what}: printed {self.printed:.4g}, ours {self.ours:.4g}, measured {self.measured:.4g}{bar}."


def _row(what: str, printed: float, ours: float, samples: Tensor) -> Row:
    samples = samples.double()
    error = (samples.std() / math.sqrt(len(samples))).item()
    return Row(what=what, printed=printed, ours=ours, measured=samples.mean().item(), error=error)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def symmetric_relu() -> list[Row]:
    """Hu, Proposition 3.14: Var[ReLU(x)] of symmetric x of variance 1."""
    n = 1_000_000
    laplace = torch.distributions.Laplace(torch.tensor(0.0, dtype=torch.float64), math.sqrt(0.5)).sample((n,))
    inputs = {
        "normal": _normal(n),
        "uniform": (torch.rand(n, dtype=torch.float64) * 2 - 1) * 3**0.5,
        "Laplace": laplace,
    }
    size = {"normal": math.sqrt(2 / math.pi), "uniform": math.sqrt(3) / 2, "Laplace": math.sqrt(0.5)}  # E|x|
    rows = []
    for name, x in inputs.items():
        relu = x.clamp_min(0)
        what = f"seqnet Prop. 3.14, Var[ReLU(x)], {name} x (the print is an upper bound)"
        rows.append(_row(what, 0.5 - size[name] / 4, 0.5 - size[name] ** 2 / 4, (relu - relu.mean()) ** 2))
    return rows


def shifted_relu() -> list[Row]:
    """Hu, Proposition C.2: the same with a bias b, to first order in b, for normal x."""
    n, b, size, p0 = 4_000_000, 0.05, math.sqrt(2 / math.pi), 1 / math.sqrt(2 * math.pi)
    y = (_normal(n) + b).clamp_min(0)
    gap = (y > 0).double() - (y - y.mean()) ** 2  # E[σ'²] - Var[σ]
    slope = (size / 2 - p0) * b
    return [
        _row(
            "seqnet Prop. C.2, E[σ'(y)²] - Var[σ(y)] at b = 0.05 (the print is a lower bound)",
            size / 4 - slope, size**2 / 4 - slope, gap,
        )
    ]  # fmt: skip


def rates() -> list[Row]:
    """Hu, Eq. 1: to the letter E[σ'(X)]² / Var[σ(X)]; its numbers are E[σ'(X)²] / Var[σ(X)]."""
    rows = []
    for name, g in ACTIVATIONS.items():
        moments = activation_moments(g)
        x = _normal(400_000).requires_grad_()
        y = g(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        samples = slope**2 / y.detach().var()
        letter = moments.slope**2 / moments.variance
        rows.append(_row(f"seqnet Eq. 1, r({name}), printed: to the letter", letter, growth_rate(g), samples))
    return rows


def batch_norm_backward() -> list[Row]:
    """Hu, Proposition 3.8: what BatchNorm lets through of gradients."""
    rows = []
    for batch in (4, 16):
        units = 2_000_000 // batch // 4
        x = _normal(batch, units).requires_grad_()
        y = F.batch_norm(x, None, None, training=True, eps=1e-12)
        given = _normal(batch, units)
        (gradient,) = torch.autograd.grad(y, x, given)
        ratio = gradient.var(0, correction=0) / given.var(0, correction=0) * x.detach().var(0, correction=0)
        rows.append(
            _row(
                f"seqnet Prop. 3.8, σ² R_b of BatchNorm, B = {batch}",
                1 - 1 / batch,
                batch_norm(1.0, batch).backward,
                ratio,
            )
        )
    return rows


def two_layers() -> list[Row]:
    """Hu, Proposition 4.1, with weights N(0, 1/D) as the text above it has them: a quarter."""
    d, k, draws = 64, 2, 400
    D = k * d
    rows = []
    for tied in (False, True):
        W, M = _normal(2, draws, D, d) / math.sqrt(D)
        x = _normal(draws, 128, d).requires_grad_()
        y = F.relu(x @ W.mT) @ (W if tied else M)
        (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
        printed, ours = two_layer(k, tied=tied), two_layer(k, tied=tied, d=d, gain=1.0)
        name = "tied" if tied else "untied"
        rows += [
            _row(
                f"seqnet Prop. 4.1 with N(0, 1/D), R_f {name}, k = 2",
                printed.forward,
                ours.forward,
                y.detach().var(1).mean(1),
            ),
            _row(
                f"seqnet Prop. 4.1 with N(0, 1/D), R_b {name}, k = 2",
                printed.backward,
                ours.backward,
                (gradient**2).mean((1, 2)),
            ),
        ]
    return rows


def l_init() -> list[Row]:
    """Hu, B.2: L-Init with M = [Rᵀ, -Rᵀ] is √2 x; the printed M = Rᵀ has half the columns it needs."""
    d, k = 16, 4
    R = torch.linalg.qr(_normal(k * d // 2, d)).Q
    W = math.sqrt(2) * torch.cat([R, -R])
    M = torch.cat([R.T, -R.T], 1)
    x = _normal(1000, d)
    gain = (F.relu(x @ W.T) @ M.T * x).sum(1) / (x * x).sum(1)
    what = "seqnet L-Init, columns of M for d = 16, k = 4 (W has as many rows)"
    return [
        Row(what=what, printed=R.T.shape[1], ours=M.shape[1], measured=W.shape[0], error=0.0),
        _row("seqnet L-Init, gain of M ReLU(W x), which √2 is to bring to 1", 1.0, math.sqrt(2), gain),
    ]


def survival() -> list[Row]:
    """Zhang et al. 2024, Theorems 3.2 and 3.3, on random two-layer blocks of width 256."""
    rows, width = [], 256
    for mu, sigma in ((1.0, 1.0), (1.0, 0.1)):
        units, means, shares, plain = [], [], [], []
        for _ in range(60):
            x = mu + sigma * _normal(64, width)
            w1, w2 = _normal(2, width, width) * math.sqrt(2 / width)
            y = F.relu(x @ w1) @ w2
            units.append(y.var(0).mean())
            means.append((y.mean(0).square() - y.var(0) / len(y)).mean())  # a mean of 64 has a variance of its own
            plain.append(y.var())
            shares.append((y + x > 0).double().mean())
        where = f"μ_x = {mu:g}, σ_x = {sigma:g}"
        spread, variance = unit_statistics(mu, sigma)
        rows += [
            _row(f"pnnh Theorem 3.2, variance of plain responses over units and inputs, {where}",
                 2 * sigma**2, 2 * (sigma**2 + mu**2), torch.stack(plain)),
            _row(f"pnnh Theorem 3.2, variance of one unit over inputs, {where}",
                 2 * sigma**2, variance, torch.stack(units)),
            _row(f"pnnh Theorem 3.2, mean square of the units' means, {where}", 0.0, spread**2, torch.stack(means)),
            _row(f"pnnh Theorem 3.3, surviving share of residual blocks at δ = 0, {where} (printed: lower bound)",
                 survival_bound(mu, sigma, 0.0, residual=True), surviving_fraction(mu, sigma, residual=True),
                 torch.stack(shares)),
            _row(f"pnnh Theorem 3.3, the same beside the bound with 3 σ_x², {where} (printed: that bound)",
                 survival_bound(mu, sigma, 0.0, residual=True, reading="corrected"),
                 surviving_fraction(mu, sigma, residual=True), torch.stack(shares)),
        ]  # fmt: skip
    return rows


def survival_in_depth() -> list[Row]:
    """Zhang et al. 2024, Eq. 15: the share of units on in the 20th plain layer, which is no power of one layer's."""
    shares = []
    for _ in range(60):
        h = _normal(64, 256).abs()
        for _ in range(20):
            y = h @ (_normal(256, 256) * math.sqrt(2 / 256))
            h = F.relu(y)
        shares.append((y > 0).double().mean())
    return [
        _row("pnnh Eq. 15, share of units on in layer 20 (printed: ½ to the 20th)", 0.5**20, 0.5, torch.stack(shares))
    ]


def dominance() -> list[Row]:
    """Yu and Tomasi 2019: Eq. 15 against Eq. 14, and the spread of the others' gradients, which settles p'."""
    grid = np.logspace(-4, 4, 8001)
    off = max(abs(probability_larger(r) - probability_larger_logistic(r)) for r in grid)
    n, hops, p, epsilon, sigma_A = 20, 5, 0.6, 0.1, 0.01
    ratios = []
    for _ in range(40):
        theta, on = torch.eye(n, dtype=torch.float64).expand(500, n, n), torch.ones(500, n, dtype=torch.bool)
        for _ in range(hops):
            S = torch.rand(500, n) < p
            on &= S
            theta = theta @ (torch.eye(n) + epsilon * sigma_A * _normal(500, n, n)) * S[:, None, :]
        theta = theta * _normal(500, 1, n)
        own = theta.diagonal(dim1=1, dim2=2)
        others = theta.sum(2) - own
        ratios.append(own[on].square().mean() / others[on].square().mean())
    forms = {form: dominance_ratio(n, hops=hops, p=p, epsilon=epsilon, sigma_A=sigma_A, form=form) ** -2
             for form in ("derived", "concluded", "corrected")}  # fmt: skip
    inverse = 1 / torch.stack(ratios)
    return [
        Row(what="noise Eq. 15, largest distance to (2/π) arctan r", printed=0.0, ours=0.0, measured=off, error=0.0),
        _row("noise Eq. 11, 1/r² at p = 0.6, L - l = 5", forms["derived"], forms["corrected"], inverse),
        _row("noise “in conclusion”, 1/r² at the same", forms["concluded"], forms["corrected"], inverse),
    ]


def weight_regularisation() -> list[Row]:
    """Yu and Tomasi 2019, Table 4: λ‖p‖²/2 before training (KWI: variance 2/S); the print is 1/128 of it."""
    rows, table = [], paper_table("noise_stability", "4")
    for depth in (20, 32, 44):
        printed = table.value("plain_decay", phase="before", depth=depth)
        N = depth // 3
        squares = 2 * (16 * (N + 1) + 32 * N + 64 * N)  # S weights of variance 2/S for each output channel
        what = f"noise Table 4, weight regularisation, depth {depth} (ours: λ‖p‖²/2; measured: that over 128)"
        full = 1e-4 * squares / 2
        rows.append(Row(what=what, printed=printed, ours=full, measured=full / 128, error=0.0))
    return rows


def conditioning() -> list[Row]:
    """Oyedotun et al. 2020, Proposition 1 for a large change of X, and the rank that a non-linearity adds."""
    X = _normal(5, 9).numpy()
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    W = np.outer(np.ones(3), U[:, -1])
    kappa = condition_number(X)
    eta = 0.5 / kappa
    moved = np.linalg.lstsq((X - eta * s[0] * np.outer(U[:, -1], Vt[-1])).T, (W @ X).T, rcond=None)[0].T
    change = float(np.linalg.norm(moved - W, 2) / np.linalg.norm(W, 2))
    printed, ours = (relative_change_bound(kappa, eta, first_order=first) for first in (True, False))
    H = _normal(8, 1) @ _normal(1, 64)
    rank = float(torch.linalg.matrix_rank(torch.tanh(_normal(8, 8) @ H)))
    return [
        Row(
            what="plainnet Prop. 1, ‖ΔW‖/‖W‖ at κ η = ½ (both bounds)",
            printed=printed,
            ours=ours,
            measured=change,
            error=0.0,
        ),
        Row(
            what="plainnet Lemma 1, rank of tanh(W H) for H of rank 1", printed=1.0, ours=8.0, measured=rank, error=0.0
        ),
    ]


def interlayer() -> list[Row]:
    """Yu and Tomasi 2019, section 5: the interlayer cushion of the 5th of 9 blocks of a 20-layer plain network.

    With the statistics of the batch, scaling a plain block's input changes nothing, so J x is 0 and so is the cushion,
    whatever the network. With running statistics it is near 1, as of any map without preferred directions.
    """
    x = sample_images(load_set("digits", None, size=16), 32, channels=3)
    rows = []
    for method, words, printed in (("plain", "plain block", 2.7e-7), ("", "residual block", 0.20)):
        modes = ((True, 0.0), (False, 1.0)) if method else ((False, 1.0),)  # statistics of the batch?, our value
        network = plainify(cifar_resnet(20), method) if method else cifar_resnet(20)
        with torch.no_grad():
            for _ in range(60):
                network.train()(x)  # brings the running statistics to the batch's
        for training, ours in modes:
            network.train(training)
            h = record_outputs(network, ["layer2.0"], x)["layer2.0"]
            cushion, _ = interlayer_cushion(network.get_submodule("layer2.1"), h, coupled=training)
            where = "batch statistics" if training else "running statistics"
            rows.append(_row(f"noise section 5, interlayer cushion, {words}, {where}", printed, ours, cushion))
    return rows


CHECKS: tuple[Callable[[], list[Row]], ...] = (
    symmetric_relu, shifted_relu, rates, batch_norm_backward, two_layers, l_init, survival, survival_in_depth,
    dominance, weight_regularisation, conditioning, interlayer,
)  # fmt: skip


@reproduction("errata", config=Errata)
def errata(config: Errata) -> Outcome:
    """One row a comparison; no picture."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        rows = [row for check in CHECKS for row in check()]
    return Outcome(lines=tuple(map(str, rows)), numbers={row.what: vars(row) for row in rows})
