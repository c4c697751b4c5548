"""Random residual networks: rm and fold keep the function or refuse with a sentence; never anything else."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import unskip
from tests.ship.random_networks import PLANS, USUAL_PLANS, Plan, build
from unskip.ship import prune

OPTIONS = st.fixed_dictionaries({
    "norm": st.sampled_from(["keep", "absorb"]),
    "middle": st.sampled_from(["dense", "grouped"]),
    "relu6": st.sampled_from(["split", "scale"]),
})  # fmt: skip
METHODS = ("plain", "pnnh", "seq", "dirac", "looks_linear")


def distance(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        y_a, y_b = a(x.clone()), b(x.clone())
    assert y_a.isfinite().all()
    return ((y_a - y_b).abs().max() / y_a.abs().max().clamp_min(1e-6)).item()


def sentence(error: ValueError, *, starts: tuple[str, ...]) -> None:
    words = str(error)
    assert words.startswith(starts), words
    assert words.endswith("."), words


def remove_skips(plan: Plan, options: dict[str, Any]) -> str:
    network, x = build(plan)
    try:
        converted = unskip.plainify(network, method="rm", limit=math.inf, scale=20, **options)
        assert distance(network, converted, x) < 1e-9
    except ValueError as error:  # also while it runs: an average pooling whose windows don't fit
        sentence(error, starts=("plainify: ", "rm: "))
        return "refused"
    assert not any(module is block for block in network.modules() for module in converted.modules())
    in_float32 = distance(copy.deepcopy(network).float(), copy.deepcopy(converted).float(), x.float())
    assert in_float32 < 1e-4
    try:
        folded = unskip.fold(converted, example=x)
    except ValueError as error:
        sentence(error, starts=("fold: ",))
        return "kept, not folded"
    assert distance(network, folded, x) < 1e-9
    pruned = prune(folded, example=x)
    assert distance(network, pruned, x) < 1e-9
    return "kept, folded and pruned" if pruned.pruning.removed else "kept and folded"  # type: ignore[union-attr]


def fold_trained(plan: Plan, method: str) -> str:
    network, x = build(plan)
    try:
        plain = unskip.plainify(network, method=method)
    except ValueError as error:
        sentence(error, starts=("plainify: ",))
        return "not made"
    with torch.no_grad():
        for i, p in enumerate(plain.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
    try:
        folded = unskip.fold(plain.eval(), example=x)
    except ValueError as error:
        sentence(error, starts=("fold: ",))
        return "refused"
    assert distance(plain, folded, x) < 1e-9
    return "folded"


def count(check: Callable[..., str], examples: int, *strategies: st.SearchStrategy) -> Counter[str]:
    """How often each outcome came."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.tuples(*strategies))
    def each(case: tuple) -> None:
        outcomes[check(*case)] += 1

    each()
    return outcomes


@pytest.mark.filterwarnings("ignore:plainify")
@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_rm_keeps_the_function_or_refuses(examples: int) -> None:
    outcomes = count(remove_skips, examples, PLANS, OPTIONS)
    print(outcomes)
    assert outcomes.total() >= examples
    assert outcomes["kept and folded"] > 0.1 * examples  # so the refusals are not all there is
    assert outcomes["kept, folded and pruned"] > 0
    assert outcomes["refused"] > 0.05 * examples


@pytest.mark.filterwarnings("ignore:plainify")
@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_fold_keeps_the_function_or_refuses(examples: int) -> None:
    outcomes = count(fold_trained, examples, USUAL_PLANS, st.sampled_from(METHODS))
    print(outcomes)
    assert outcomes.total() >= examples
    assert outcomes["folded"] > 0.1 * examples
