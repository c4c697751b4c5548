"""Learning rates and optimizers against torch's own schedulers and SGD."""

import pytest
import torch
from torch import nn

from unskip.train.optim import Rates, make_optimizer
from unskip.train.recipe import OptimizerConfig


def test_cosine_is_torchs() -> None:
    rates = Rates(OptimizerConfig(lr=0.3), epochs=4, steps=10)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for step in range(40):
        assert rates[step] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_warm_up_is_linear_and_then_the_cosine_starts_at_the_peak() -> None:
    rates = Rates(OptimizerConfig(lr=0.1, warmup_epochs=2, warmup_lr=0.02, min_lr=0.01), epochs=5, steps=10)
    assert [rates[s] for s in (0, 5, 10, 20)] == pytest.approx([0.02, 0.04, 0.06, 0.1])
    assert rates[35] == pytest.approx(0.01 + 0.045)  # the middle of the cosine
    assert rates[49] == pytest.approx(0.01, abs=1e-3)


def test_steps_drop_where_torchs_do() -> None:
    rates = Rates(OptimizerConfig(lr=1.0, schedule="steps", milestones=(3, 5), gamma=0.1), epochs=8, steps=4)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[12, 20], gamma=0.1)
    for step in range(32):
        assert rates[step] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        optimizer.step()
        scheduler.step()


def test_constant() -> None:
    rates = Rates(OptimizerConfig(lr=0.7, schedule="constant"), epochs=3, steps=4)
    assert {rates[s] for s in range(12)} == {0.7}


def test_rates_do_not_depend_on_what_was_asked_before() -> None:
    one, two = (Rates(OptimizerConfig(lr=0.1, warmup_epochs=1), epochs=5, steps=10) for _ in range(2))
    forward = [one[s] for s in range(50)]
    assert forward == [two[s] for s in reversed(range(50))][::-1]


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
