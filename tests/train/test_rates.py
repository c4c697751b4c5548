"""Learning rates and optimizers against torch's and timm's own schedulers and SGD."""

from typing import Any

import pytest
import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler
from torch import nn

from unskip.train.optim import learning_rate, make_optimizer
from unskip.train.recipe import OptimizerConfig


def rates(epochs: int, steps: int, **fields: Any) -> list[float]:
    config = OptimizerConfig(**fields)
    return [learning_rate(config, step, epochs=epochs, steps=steps) for step in range(epochs * steps)]


def test_cosine_is_torchs() -> None:
    found = rates(4, 10, lr=0.3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for step in range(40):
        assert found[step] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_warm_up_is_linear_and_then_the_cosine_starts_at_the_peak() -> None:
    found = rates(5, 10, lr=0.1, warmup_epochs=2, warmup_lr=0.02, min_lr=0.01)
    assert [found[s] for s in (0, 5, 10, 20)] == pytest.approx([0.02, 0.04, 0.06, 0.1])
    assert found[35] == pytest.approx(0.01 + 0.045)  # the middle of the cosine
    assert found[49] == pytest.approx(0.01, abs=1e-3)


def test_steps_drop_where_torchs_do() -> None:
    found = rates(8, 4, lr=1.0, schedule="steps", milestones=(3, 5), gamma=0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[12, 20], gamma=0.1)
    for step in range(32):
        assert found[step] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        optimizer.step()
        scheduler.step()


def test_constant() -> None:
    assert set(rates(3, 4, lr=0.7, schedule="constant")) == {0.7}


@pytest.mark.parametrize("fields", [{}, {"schedule": "steps", "milestones": (2, 3)}, {"schedule": "constant"}])
def test_rates_are_timms(fields: dict[str, Any]) -> None:
    """With a warm-up, which torch's schedulers don't have."""
    found = rates(4, 10, lr=0.2, warmup_epochs=1.5, warmup_lr=0.01, min_lr=0.02, **fields)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.2)
    shared: dict[str, Any] = {"warmup_t": 15, "warmup_lr_init": 0.01, "t_in_epochs": False}
    if fields:
        drops = [10 * epoch + 1 for epoch in fields.get("milestones", ())] or [99]  # timm drops one update before
        theirs: Any = MultiStepLRScheduler(optimizer, decay_t=drops, decay_rate=0.1, warmup_prefix=False, **shared)
    else:
        theirs = CosineLRScheduler(optimizer, t_initial=25, lr_min=0.02, warmup_prefix=True, **shared)
    for step, rate in enumerate(found):
        theirs.step_update(step)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step


def test_sgd_is_not_nesterovs_unless_asked() -> None:
    network = nn.Linear(2, 2)
    assert make_optimizer(network, OptimizerConfig()).defaults["nesterov"] is False
    assert make_optimizer(network, OptimizerConfig(nesterov=True)).defaults["nesterov"] is True


@pytest.mark.parametrize("name", ["adamw", "lamb", "rmsprop"])
def test_timms_optimizers_by_name(name: str) -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), OptimizerConfig(optimizer=name, lr=1e-3))
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_unknown_optimizer() -> None:
    with pytest.raises(ValueError, match=r"optimizer=.sgdd. is not known to timm\. Did you mean"):
        make_optimizer(nn.Linear(2, 2), OptimizerConfig(optimizer="sgdd"))
