"""Fitting reaches the floor, really optimises, and depends on the task and the seed and on nothing else."""

import sys
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.coders import CoderBank, CoderSpec, fit, floor
from unskip.coders.fit import PRETEXT_TASKS, _seed, _starts
from unskip.methods import PNNHBlock
from unskip.models import ENTRIES

RELU = nn.ReLU()


def spec(channels: int = 32, **changes: object) -> CoderSpec:
    base = {"channels": channels, "code": channels // 2, "pretext": "rectified_normal", "act": "ReLU()"}
    return CoderSpec(**{**base, **changes})


def error(enc: Tensor, dec: Tensor, x: Tensor) -> float:
    """Measured here with PyTorch's own layers, on samples that the fit has never seen."""
    pad = enc.shape[-1] // 2
    return F.mse_loss(F.conv2d(F.conv2d(x, enc, padding=pad).relu(), dec, padding=pad), x).item()


def fresh(channels: int, positions: int = 20_000, task: str = "rectified_normal") -> Tensor:
    side = 8
    shape = (max(2, positions // side**2), channels, side, side)
    return PRETEXT_TASKS[task](shape, torch.Generator().manual_seed(123))


def widths_of_named_models() -> tuple[set[int], set[int]]:
    """All widths, and those of blocks with two 3 x 3 convolutions, of every `pnnh_` name."""
    every, vanilla = set(), set()
    for entry in ENTRIES.values():
        if entry.method == "pnnh":
            with torch.device("meta"):
                network = entry.build()
            for block in network.modules():
                if isinstance(block, PNNHBlock) and block.coder is not None:
                    conv = block.learner[-1] if not isinstance(block.learner[-1], nn.Dropout) else block.learner[-2]
                    width = conv.weight.shape[0]
                    every.add(width)
                    if conv.weight.ndim == 4 and conv.weight.shape[-1] == 3:
                        vanilla.add(width)
    return every, vanilla


ALL, VANILLA = widths_of_named_models()
QUICK = 128  # wider ones are fitted with `make test-all`


def cases() -> list:
    pairs = [(width, 1) for width in sorted(ALL)] + [(width, 3) for width in sorted(VANILLA)]
    return [pytest.param(w, k, marks=[pytest.mark.full] if w > QUICK else []) for w, k in pairs]


def test_the_widths_are_those_of_the_backbones() -> None:
    assert {16, 32, 64, 128, 160, 256, 320, 512, 640} <= VANILLA
    assert {24, 96, 192, 384, 768, 1024, 2048} <= ALL


@pytest.mark.parametrize(("width", "kernel"), cases())
def test_reaches_the_floor_at_every_width_that_a_name_uses(width: int, kernel: int) -> None:
    fitted = fit(spec(width, kernel=kernel), RELU)
    assert floor(spec(width)) == pytest.approx(0.1704, abs=5e-5)
    assert fitted.mse <= 0.174
    assert error(fitted.enc, fitted.dec, fresh(width, max(4_000, 400_000 // width))) <= 0.174


def test_is_deterministic_and_seeded_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = fit(spec(), RELU), fit(spec(), RELU), fit(spec(seed=1), RELU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.enc, two.enc)
    assert torch.equal(one.dec, two.dec)
    assert not torch.allclose(one.enc, other.enc)


def test_is_not_the_group_average() -> None:
    """A group average has two entries in a row; a dense coder has them all, and mixes channels in its projection."""
    fitted = fit(spec(), RELU)
    projection = (fitted.dec.flatten(1) @ fitted.enc.flatten(1)).abs()
    assert (fitted.enc.abs() > 1e-3).float().mean() > 0.9
    assert (projection > 1e-3).float().mean() > 0.8


def test_another_task_gives_another_coder_that_is_better_at_it() -> None:
    """All tasks of one shape start at the same weights (ReLU has one start), so what differs has been learnt."""
    fits = {task: fit(spec(pretext=task), RELU) for task in PRETEXT_TASKS}
    for task, fitted in fits.items():
        for other in fits.values():
            if other is not fitted:
                assert (fitted.enc - other.enc).abs().max() > 1e-3 * fitted.enc.abs().max()
        own = error(fitted.enc, fitted.dec, fresh(32, task=task))
        rest = [error(o.enc, o.dec, fresh(32, task=task)) for o in fits.values()]
        assert own <= min(rest) * 1.005
    on_normal = fresh(32, task="normal")
    assert error(fits["normal"].enc, fits["normal"].dec, on_normal) < 0.93 * error(
        fits["rectified_normal"].enc, fits["rectified_normal"].dec, on_normal
    )


@pytest.mark.parametrize(("width", "kernel"), [(32, 1), (32, 3), pytest.param(512, 3, marks=pytest.mark.full)])
def test_the_default_task_moves_away_from_its_start(width: int, kernel: int) -> None:
    wanted = spec(width, kernel=kernel)
    start = next(iter(_starts(wanted, RELU, torch.Generator().manual_seed(_seed(wanted)))))
    fitted = fit(wanted, RELU)
    assert (fitted.enc - start[0]).abs().max() > 1e-3 * start[0].abs().max()
    if kernel == 3:
        assert fitted.enc[:, :, 0, 0].abs().max() > 0, "all nine taps are in use"


@pytest.mark.parametrize(
    "context", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_context_does_not_matter(context: object) -> None:
    expected = fit(spec(), RELU)
    with context():
        assert torch.equal(fit(spec(), RELU).enc, expected.enc)
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(fit(spec(), RELU).enc, expected.enc)
    finally:
        torch.set_default_dtype(torch.float32)


def test_really_optimises() -> None:
    """Signed inputs through ReLU: the start is far from the best, so the rounds must bring something, and do."""
    fitted = fit(spec(pretext="normal"), RELU)
    assert fitted.rounds > 3
    assert fitted.mse < 0.92 * fitted.start_mse


def test_reaches_the_floor_from_the_papers_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """From N(0, 0.01), Algorithm 1, where nothing is known yet: it is the optimiser that gets there, not our start."""

    def paper(spec: CoderSpec, act: nn.Module, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        return [tuple(0.01 * torch.randn(shape, generator=generator) for shape in (spec.enc_shape, spec.dec_shape))]

    monkeypatch.setattr(sys.modules["unskip.coders.fit"], "_starts", paper)
    fitted = fit(spec(64), RELU)
    assert fitted.start_mse > 0.49
    assert fitted.rounds > 5
    assert error(fitted.enc, fitted.dec, fresh(64)) <= 0.174


def test_gelu_on_signed_inputs_comes_close_to_the_floor() -> None:
    gelu = CoderSpec(channels=96, code=48, pretext="normal", act=repr(nn.GELU()), linear=True)
    fitted = fit(gelu, nn.GELU())
    x = torch.randn(4_000, 96, generator=torch.Generator().manual_seed(9))
    mse = F.mse_loss(F.linear(F.gelu(F.linear(x, fitted.enc)), fitted.dec), x).item()
    assert mse < 1.03 * floor(gelu)


@pytest.mark.parametrize(
    ("widths", "limit"),
    [((16, 32, 64), 20), pytest.param((64, 128, 256, 512), 180, marks=pytest.mark.full)],
    ids=["resnet110", "resnet34"],
)
def test_all_coders_of_a_network_are_ready_in_time(widths: tuple[int, ...], limit: float, no_cache: object) -> None:
    start = time.perf_counter()
    bank = CoderBank()
    for width in widths:
        bank.take(spec(width, kernel=3), RELU)
    assert time.perf_counter() - start < limit


def test_algorithm_1_is_plain_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against its lines by hand, in float64: W -= rate * gradient of the squared error, from N(0, 0.01)."""
    monkeypatch.setattr(sys.modules["unskip.coders.fit"], "SGD_STEPS", 4)
    wanted = spec(16, kernel=3, fit="sgd")
    found = fit(wanted, RELU)
    generator = torch.Generator().manual_seed(_seed(wanted))
    enc, dec = (0.01 * torch.randn(shape, generator=generator) for shape in (wanted.enc_shape, wanted.dec_shape))
    enc, dec = (w.double().requires_grad_() for w in (enc, dec))
    for _ in range(4):
        x = torch.randn(16, 16, 8, 8, generator=generator).relu().double()
        y = F.conv2d(F.conv2d(x, enc, padding=1).relu(), dec, padding=1)
        grads = torch.autograd.grad(((y - x) ** 2).sum() / (16 * 64), (enc, dec))
        with torch.no_grad():
            for w, grad in zip((enc, dec), grads, strict=True):
                w -= 0.032 / 4 * grad
    torch.testing.assert_close(found.enc.double(), enc.detach(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.dec.double(), dec.detach(), rtol=1e-4, atol=1e-7)
    assert found.mse < found.start_mse
