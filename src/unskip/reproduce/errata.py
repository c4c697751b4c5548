"""Errata: the numbers of docs/errata.md. Each compares a printed formula and ours with a simulation."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from unskip import theory
from unskip.measures import interlayer_cushion, record_outputs
from unskip.models.cifar import cifar_resnet
from unskip.reproduce.images import load_set, sample_images
from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import SEED, Outcome, Settings, reproduction
from unskip.reproduce.seqnet_simulation import ACTIVATIONS
from unskip.surgery import plainify


@dataclass(frozen=True, kw_only=True)
class Errata(Settings):
    """What can be set."""

    seed: Annotated[int, "seed of all simulations", SEED] = 0


@dataclass(frozen=True)
class Row:
    """One comparison: what a paper prints, what we say, and what simulation says."""

    what: str
    printed: float
    ours: float
    measured: float
    error: float = 0.0  # standard error of `measured`; 0 where it is exact

    def __str__(self) -> str:
        bar = f" ± {self.error:.2g}" if self.error else ""
        return f"{self.what}: printed {self.printed:.4g}, ours {self.ours:.4g}, measured {self.measured:.4g}{bar}."


def sampled(what: str, printed: float, ours: float, samples: Tensor) -> Row:
    """A row with the mean of samples and its standard error."""
    samples = samples.double()
    return Row(what, printed, ours, samples.mean().item(), (samples.std() / math.sqrt(len(samples))).item())


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def symmetric_relu() -> Iterator[Row]:
    """Hu, Proposition 3.14: Var[ReLU(x)] of symmetric x of variance 1."""
    n = 1_000_000
    laplace = torch.distributions.Laplace(torch.tensor(0.0, dtype=torch.float64), math.sqrt(0.5)).sample((n,))
    uniform = (torch.rand(n, dtype=torch.float64) * 2 - 1) * 3**0.5
    for name, x, size in (  # size: E|x|
        ("normal", normal(n), math.sqrt(2 / math.pi)),
        ("uniform", uniform, math.sqrt(3) / 2),
        ("Laplace", laplace, math.sqrt(0.5)),
    ):
        relu = x.clamp_min(0)
        what = f"seqnet Prop. 3.14, Var[ReLU(x)], {name} x (the print is an upper bound)"
        yield sampled(what, 0.5 - size / 4, 0.5 - size**2 / 4, (relu - relu.mean()) ** 2)


def shifted_relu() -> Iterator[Row]:
    """Hu, Proposition C.2: the same with a bias b, to first order in b, for normal x."""
    n, b, size, p0 = 4_000_000, 0.05, math.sqrt(2 / math.pi), 1 / math.sqrt(2 * math.pi)
    y = (normal(n) + b).clamp_min(0)
    gap = (y > 0).double() - (y - y.mean()) ** 2  # E[σ'²] - Var[σ]
    slope = (size / 2 - p0) * b
    what = "seqnet Prop. C.2, E[σ'(y)²] - Var[σ(y)] at b = 0.05 (the print is a lower bound)"
    yield sampled(what, size / 4 - slope, size**2 / 4 - slope, gap)


def rates() -> Iterator[Row]:
    """Hu, Eq. 1: to the letter E[σ'(X)]² / Var[σ(X)]; its numbers are E[σ'(X)²] / Var[σ(X)]."""
    for name, g in ACTIVATIONS.items():
        moments = theory.activation_moments(g)
        x = normal(400_000).requires_grad_()
        y = g(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        letter, samples = moments.slope**2 / moments.variance, slope**2 / y.detach().var()
        yield sampled(f"seqnet Eq. 1, r({name}), printed: to the letter", letter, theory.growth_rate(g), samples)


def batch_norm_backward() -> Iterator[Row]:
    """Hu, Proposition 3.8: what BatchNorm lets through of gradients."""
    for batch in (4, 16):
        units = 2_000_000 // batch // 4
        x = normal(batch, units).requires_grad_()
        y = F.batch_norm(x, None, None, training=True, eps=1e-12)
        given = normal(batch, units)
        (gradient,) = torch.autograd.grad(y, x, given)
        ratio = gradient.var(0, correction=0) / given.var(0, correction=0) * x.detach().var(0, correction=0)
        ours = theory.batch_norm(1.0, batch).backward
        yield sampled(f"seqnet Prop. 3.8, σ² R_b of BatchNorm, B = {batch}", 1 - 1 / batch, ours, ratio)


def two_layers() -> Iterator[Row]:
    """Hu, Proposition 4.1, with weights N(0, 1/D) as the text above it has them: a quarter."""
    d, k, draws = 64, 2, 400
    D = k * d
    for tied in (False, True):
        W, M = normal(2, draws, D, d) / math.sqrt(D)
        x = normal(draws, 128, d).requires_grad_()
        y = F.relu(x @ W.mT) @ (W if tied else M)
        (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
        printed, ours = theory.two_layer(k, tied=tied), theory.two_layer(k, tied=tied, d=d, gain=1.0)
        where = f"{'tied' if tied else 'untied'}, k = 2"
        what = "seqnet Prop. 4.1 with N(0, 1/D)"
        yield sampled(f"{what}, R_f {where}", printed.forward, ours.forward, y.detach().var(1).mean(1))
        yield sampled(f"{what}, R_b {where}", printed.backward, ours.backward, (gradient**2).mean((1, 2)))


def l_init() -> Iterator[Row]:
    """Hu, B.2: L-Init with M = [Rᵀ, -Rᵀ] is √2 x; the printed M = Rᵀ has half the columns it needs."""
    d, k = 16, 4
    R = torch.linalg.qr(normal(k * d // 2, d)).Q
    W = math.sqrt(2) * torch.cat([R, -R])
    M = torch.cat([R.T, -R.T], 1)
    x = normal(1000, d)
    gain = (F.relu(x @ W.T) @ M.T * x).sum(1) / (x * x).sum(1)
    what = "seqnet L-Init, columns of M for d = 16, k = 4 (W has as many rows)"
    yield Row(what, R.T.shape[1], M.shape[1], W.shape[0])
    yield sampled("seqnet L-Init, gain of M ReLU(W x), which √2 is to bring to 1", 1.0, math.sqrt(2), gain)


def survival() -> Iterator[Row]:
    """Zhang et al. 2024, Theorems 3.2 and 3.3, on random two-layer blocks of width 256."""
    width = 256
    for mu, sigma in ((1.0, 1.0), (1.0, 0.1)):
        draws = []
        for _ in range(60):
            x = mu + sigma * normal(64, width)
            w1, w2 = normal(2, width, width) * math.sqrt(2 / width)
            y = F.relu(x @ w1) @ w2
            mean_squares = y.mean(0).square() - y.var(0) / len(y)  # a mean of 64 has a variance of its own
            draws.append((y.var(), y.var(0).mean(), mean_squares.mean(), (y + x > 0).double().mean()))
        everywhere, units, means, fractions = (torch.stack(values) for values in zip(*draws, strict=True))
        where = f"μ_x = {mu:g}, σ_x = {sigma:g}"
        spread, variance = theory.unit_statistics(mu, sigma)
        printed, corrected = (
            theory.survival_bound(mu, sigma, 0.0, residual=True, reading=reading)
            for reading in ("printed", "corrected")
        )
        ours = theory.surviving_fraction(mu, sigma, residual=True)
        two, three = "pnnh Theorem 3.2", "pnnh Theorem 3.3"
        what = f"{two}, variance of plain responses over units and inputs, {where}"
        yield sampled(what, 2 * sigma**2, 2 * (sigma**2 + mu**2), everywhere)
        yield sampled(f"{two}, variance of one unit over inputs, {where}", 2 * sigma**2, variance, units)
        yield sampled(f"{two}, mean square of the units' means, {where}", 0.0, spread**2, means)
        what = f"{three}, surviving share of residual blocks at δ = 0, {where} (printed: lower bound)"
        yield sampled(what, printed, ours, fractions)
        what = f"{three}, the same beside the bound with 3 σ_x², {where} (printed: that bound)"
        yield sampled(what, corrected, ours, fractions)


def survival_in_depth() -> Iterator[Row]:
    """Zhang et al. 2024, Eq. 15: the share of units on in the 20th plain layer, which is no power of one layer's."""
    fractions = []
    for _ in range(60):
        h = normal(64, 256).abs()
        for _ in range(20):
            y = h @ (normal(256, 256) * math.sqrt(2 / 256))
            h = F.relu(y)
        fractions.append((y > 0).double().mean())
    what = "pnnh Eq. 15, share of units on in layer 20 (printed: ½ to the 20th)"
    yield sampled(what, 0.5**20, 0.5, torch.stack(fractions))


def dominance() -> Iterator[Row]:
    """Yu and Tomasi 2019: Eq. 15 against Eq. 14, and the spread of the others' gradients, which decides about p'."""
    grid = np.logspace(-4, 4, 8001)
    off = max(abs(theory.probability_larger(r) - theory.probability_larger_logistic(r)) for r in grid)
    yield Row("noise Eq. 15, largest distance to (2/π) arctan r", 0.0, 0.0, off)
    n, hops, p, epsilon, sigma_A = 20, 5, 0.6, 0.1, 0.01
    ratios = []
    for _ in range(40):
        theta, on = torch.eye(n, dtype=torch.float64).expand(500, n, n), torch.ones(500, n, dtype=torch.bool)
        for _ in range(hops):
            S = torch.rand(500, n) < p
            on &= S
            theta = theta @ (torch.eye(n) + epsilon * sigma_A * normal(500, n, n)) * S[:, None, :]
        theta = theta * normal(500, 1, n)
        own = theta.diagonal(dim1=1, dim2=2)
        others = theta.sum(2) - own
        ratios.append(others[on].square().mean() / own[on].square().mean())
    derived, concluded, corrected = (
        theory.dominance_ratio(n, hops=hops, p=p, epsilon=epsilon, sigma_A=sigma_A, form=form) ** -2
        for form in ("derived", "concluded", "corrected")
    )
    yield sampled("noise Eq. 11, 1/r² at p = 0.6, L - l = 5", derived, corrected, torch.stack(ratios))
    yield sampled("noise “in conclusion”, 1/r² at the same", concluded, corrected, torch.stack(ratios))


def weight_regularisation() -> Iterator[Row]:
    """Yu and Tomasi 2019, Table 4: λ‖p‖²/2 before training (KWI: variance 2/S); the print is 1/128 of it."""
    table = paper_table("noise_stability", "4")
    for depth in (20, 32, 44):
        printed = table.value("plain_decay", phase="before", depth=depth)
        N = depth // 3
        squares = 2 * (16 * (N + 1) + 32 * N + 64 * N)  # S weights of variance 2/S for each output channel
        full = 1e-4 * squares / 2
        what = f"noise Table 4, weight regularisation, depth {depth} (ours: λ‖p‖²/2; measured: that over 128)"
        yield Row(what, printed, full, full / 128)


def conditioning() -> Iterator[Row]:
    """Oyedotun et al. 2020, Proposition 1 for a large change of X, and the rank that a non-linearity adds."""
    X = normal(5, 9).numpy()
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    W = np.outer(np.ones(3), U[:, -1])
    kappa = theory.condition_number(X)
    eta = 0.5 / kappa
    moved = np.linalg.lstsq((X - eta * s[0] * np.outer(U[:, -1], Vt[-1])).T, (W @ X).T, rcond=None)[0].T
    change = float(np.linalg.norm(moved - W, 2) / np.linalg.norm(W, 2))
    printed, ours = (theory.relative_change_bound(kappa, eta, first_order=first) for first in (True, False))
    yield Row("plainnet Prop. 1, ‖ΔW‖/‖W‖ at κ η = ½ (both bounds)", printed, ours, change)
    H = normal(8, 2) @ normal(2, 64)
    rank = float(torch.linalg.matrix_rank(torch.relu(normal(8, 8) @ H)))
    yield Row("plainnet Lemma 1, rank of ReLU(W H) for H of rank 2", 2.0, 8.0, rank)


def interlayer() -> Iterator[Row]:
    """Yu and Tomasi 2019, section 5: the interlayer cushion of the 5th of 9 blocks of a 20-layer plain network.

    With the statistics of the batch, scaling a plain block's input changes nothing, so J x is 0 and so is the cushion,
    whatever the network. With running statistics it is near 1, as of any map without preferred directions.
    """
    x = sample_images(load_set("digits", None, size=16), 32, channels=3)
    plain, residual = plainify(cifar_resnet(20), "plain"), cifar_resnet(20)
    for model, words, printed, batch_statistics, ours in (
        (plain, "plain block", 2.7e-7, True, 0.0),
        (plain, "plain block", 2.7e-7, False, 1.0),
        (residual, "residual block", 0.20, False, 1.0),
    ):
        with torch.no_grad():
            for _ in range(60):
                model.train()(x)  # brings the running statistics to the batch's
        model.train(batch_statistics)
        h = record_outputs(model, ["layer2.0"], x)["layer2.0"]
        cushion, _ = interlayer_cushion(model.get_submodule("layer2.1"), h, coupled=batch_statistics)
        where = "batch statistics" if batch_statistics else "running statistics"
        yield sampled(f"noise section 5, interlayer cushion, {words}, {where}", printed, ours, cushion)


CHECKS: tuple[Callable[[], Iterator[Row]], ...] = (
    symmetric_relu, shifted_relu, rates, batch_norm_backward, two_layers, l_init, survival, survival_in_depth,
    dominance, weight_regularisation, conditioning, interlayer,
)  # fmt: skip


@reproduction("errata", settings=Errata)
def errata(settings: Errata) -> Outcome:
    """One row for each comparison; no picture."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        rows = [row for check in CHECKS for row in check()]
    return Outcome(lines=tuple(map(str, rows)), numbers={row.what: vars(row) for row in rows})
