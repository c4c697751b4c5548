"""Fitting a coder on its pretext task.

Zhang et al. 2024, arXiv:2402.08645, Eq. 4 and 10, Algorithm 1 lines 1-6, Appendix C.

    f* = argmin E_x || x - f(x) ||^2,    x ~ max(0, N(0, 1)) for the paper's choice

For independent inputs of variance v no linear code of C_B channels does better than v (1 - C_B / C), the floor. Adam
at a fixed step size stalls above it. Rounds of Adam whose step, a share of the weights' own size, falls to zero and
starts again get there, even from the paper's N(0, 0.01) in about 14 of them. We start closer: at a seeded dense
encoder (non-negative, columns that sum to 1, so that the mean passes; its pseudo-inverse as decoder), which for
non-negative inputs is on the floor already, or in the linear range of the activation, whichever loses less on the task.
`spec.fit = "sgd"` does what Algorithm 1 prints instead: plain SGD from N(0, 0.01) at a fixed step size. The paper gives
neither step size nor steps. 0.01 is read as the deviation: from a variance of 0.01 a 3 x 3 coder of 32 or 64 channels
carries little more than the mean after thousands of steps.
Signed inputs through ReLU can't come near the floor, since half of each unit is cut off.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.coders.coder import FittedCoder
from unskip.coders.spec import CoderSpec, embed_kernel

Sampler = Callable[[tuple[int, ...], torch.Generator], Tensor]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


PRETEXT_TASKS: dict[str, Sampler] = {
    "rectified_normal": lambda shape, generator: _normal(shape, generator).relu_(),
    "normal": _normal,
    "uniform": lambda shape, g: torch.rand(shape, generator=g, device="cpu", dtype=torch.float32),
}
VARIANCE = {"rectified_normal": 0.5 - 1 / (2 * math.pi), "normal": 1.0, "uniform": 1 / 12}

VERSION = 2  # of this file's arithmetic; part of the cache key, so raise it whenever the result changes
POSITIONS = 1024  # samples of C channels in a step
SIDE = 8  # side of the images they form where the kernel is larger than 1
STEPS = 100  # of one round
ROUNDS = 30  # at most
STEP_SIZE = 0.01  # of Adam, as a share of the weights' root mean square; a quarter of it after a round that loses
MIN_GAIN = 2e-3  # a round that improves the error by less than this share is the last; noise of the held-out error
SGD_STEPS, SGD_SCALE = 10_000, 0.01  # of Algorithm 1: steps, and the deviation of the weights at the start
SGD_RATE = 0.032  # over the root of the channels; of the squared error, summed over channels


@dataclass(frozen=True)
class Fit:
    """A fitted coder's weights and how well they do."""

    enc: Tensor
    dec: Tensor
    mse: float  # on held-out samples
    start_mse: float  # the same, before fitting
    rounds: int


def floor(spec: CoderSpec) -> float:
    """(1 - C_B / C) Var(x): the least mean squared error of a linear code of independent inputs."""
    return (1 - spec.code / spec.channels) * VARIANCE[spec.pretext]


def fit(spec: CoderSpec, act: nn.Module, on_round: Callable[[int, float], None] = lambda *_: None) -> Fit:
    """Fits a coder on spec.pretext, deterministically from spec.seed. `on_round(i, mse)` is called after each round."""
    generator = torch.Generator("cpu").manual_seed(_seed(spec))
    sample = PRETEXT_TASKS[spec.pretext]
    held_out = sample(_shape(spec, max(2048, 400_000 // spec.channels)), torch.Generator("cpu").manual_seed(2**31))

    @torch.no_grad()
    def error(weights: tuple[Tensor, Tensor]) -> float:
        return F.mse_loss(FittedCoder(*weights, act, spec.depth)(held_out), held_out).item()

    # A fit must not depend on the context in which the network is built.
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        if spec.fit == "sgd":
            start, end = _plain_sgd(spec, act, generator)
            return Fit(*end, error(end), error(start), SGD_STEPS)
        candidates = [(error(weights), weights) for weights in _starts(spec, act, generator)]
        best_error, best = min(candidates, key=lambda candidate: candidate[0])
        start_mse = best_error
        rounds, step_size = 0, STEP_SIZE
        for rounds in range(1, ROUNDS + 1):
            weights = _round(best, spec, act, generator, step_size)
            mse = error(weights)
            gain = (best_error - mse) / best_error
            if gain > -MIN_GAIN:  # no worse: on the floor a round only moves along the valley
                best_error, best = mse, weights
            else:
                step_size /= 4  # too long a step for so many weights
            on_round(rounds, best_error)
            if -MIN_GAIN < gain < MIN_GAIN:
                break
    return Fit(best[0], best[1], best_error, start_mse, rounds)


def _round(
    start: tuple[Tensor, Tensor], spec: CoderSpec, act: nn.Module, generator: torch.Generator, step_size: float
) -> tuple[Tensor, Tensor]:
    """STEPS of Adam on fresh samples with a step size that falls to zero along a cosine."""
    enc, dec = (weight.clone().requires_grad_() for weight in start)
    groups = [{"params": [w], "lr": step_size * w.detach().square().mean().sqrt().item()} for w in (enc, dec)]
    coder = FittedCoder(enc, dec, act, spec.depth)
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        x = PRETEXT_TASKS[spec.pretext](_shape(spec, POSITIONS), generator)
        loss = F.mse_loss(coder(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return enc.detach(), dec.detach()


def _plain_sgd(
    spec: CoderSpec, act: nn.Module, generator: torch.Generator
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Algorithm 1, lines 1-6: (encoder, decoder) at the start and at the end."""
    shapes = (spec.enc_shape, spec.dec_shape)
    first, last = (SGD_SCALE * torch.randn(shape, generator=generator) for shape in shapes)
    enc, dec = first.clone().requires_grad_(), last.clone().requires_grad_()
    coder, rate = FittedCoder(enc, dec, act, spec.depth), SGD_RATE / math.sqrt(spec.channels)
    optimizer = torch.optim.SGD([enc, dec], lr=rate)
    for _ in range(SGD_STEPS):
        x = PRETEXT_TASKS[spec.pretext](_shape(spec, POSITIONS), generator)
        loss = (coder(x) - x).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (first, last), (enc.detach(), dec.detach())


def _starts(spec: CoderSpec, act: nn.Module, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    size = (spec.code, spec.channels)
    enc = torch.rand(size, generator=generator, dtype=torch.float64)
    enc /= enc.sum(0)
    dec = torch.linalg.pinv(enc)
    # ReLU lets a unit's scale move between its two weights; even shares train best. Elsewhere the plain one may win.
    share = (dec.norm(dim=0) / enc.norm(dim=1)).sqrt()
    yield _weights(enc * share[:, None], dec / share, spec)
    yield _weights(enc, dec, spec)

    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(FittedCoder(enc, dec, act, spec.depth).activate(zero), zero)
    if slope.item():
        rows = torch.linalg.qr(torch.randn(size[::-1], generator=generator, dtype=torch.float64)).Q.T
        gain = 0.1  # small enough for the activation to be nearly linear, large enough for bfloat16
        yield _weights(gain * rows, rows.T / (gain * slope.item()), spec)


def _weights(enc: Tensor, dec: Tensor, spec: CoderSpec) -> tuple[Tensor, Tensor]:
    return embed_kernel(enc.float(), spec), embed_kernel(dec.float(), spec)


def _seed(spec: CoderSpec) -> int:
    """A seed for every shape. Two tasks of one shape start at the same weights, and differ by what they learn."""
    name = repr((spec.seed, spec.enc_shape, spec.act, spec.depth))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def _shape(spec: CoderSpec, positions: int) -> tuple[int, ...]:
    if spec.linear:
        return (positions, spec.channels)
    side = 1 if spec.kernel == 1 else SIDE
    return (math.ceil(positions / side**2), spec.channels, side, side)
