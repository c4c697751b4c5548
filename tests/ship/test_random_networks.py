"""Random residual networks: rm, fold, prune and files keep the function or refuse with a sentence; nothing else.

The judge shares no code with the library: float64, two sizes, both signs, with gradients and without. What became of
the networks is printed behind the results (`pytest -m deep tests/ship/test_random_networks.py`).
"""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import unskip
from tests.ship.random_networks import PLANS, USUAL_PLANS, Plan, build, circumstances, twist
from unskip.ship import convert, prune, quantize

OPTIONS = st.fixed_dictionaries({
    "norm": st.sampled_from(["keep", "absorb"]),
    "middle": st.sampled_from(["dense", "grouped"]),
    "relu6": st.sampled_from(["split", "scale"]),
})  # fmt: skip
METHODS = ("plain", "pnnh", "seq", "dirac", "looks_linear")
COUNTS = [30, pytest.param(150, marks=pytest.mark.full), pytest.param(2000, marks=pytest.mark.deep)]
FILES = [pytest.param(20, marks=pytest.mark.full), pytest.param(200, marks=pytest.mark.deep)]


@torch.no_grad()
def relative(expected: Tensor, found: Tensor) -> float:
    assert expected.isfinite().all()
    return ((expected - found).abs().max() / expected.abs().max().clamp_min(1e-6)).item()


def distance(a: nn.Module, b: nn.Module, inputs: list[Tensor]) -> float:
    """The largest relative error, on inputs of all sizes, of both signs, in both modes of autograd."""
    errors = []
    for x in inputs:
        for signed in (x, x.abs(), -x.abs()):
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    try:
                        expected = a(signed.clone()).detach()
                    except RuntimeError:  # autograd forbids some writes through views
                        assert grad
                        continue
                    errors.append(relative(expected, b(signed.clone()).detach()))
    return max(errors)


def sentence(error: ValueError, *, starts: tuple[str, ...]) -> None:
    words = str(error).split("\n")[0]
    assert words.startswith(starts), words
    assert words.endswith((".", "below.")), words


def remove_skips(plan: Plan, options: dict[str, Any]) -> list[str]:
    network, inputs = build(plan)
    twist(network, plan)
    command = convert if plan.seed % 3 == 0 else unskip.plainify
    example = {"example": inputs[0]} if plan.seed % 2 else {}
    where = command.__name__
    with circumstances(plan):
        try:
            converted = command(network, method="rm", limit=math.inf, scale=20, **options, **example)
            assert distance(network, converted, inputs) < 1e-9
        except ValueError as error:  # also while it runs: an average pooling whose windows don't fit
            sentence(error, starts=("plainify: ", "rm: "))
            return [f"{where} refused"]
        assert not any(module is block for block in network.modules() for module in converted.modules())
        outcomes = [f"{where} agreed"]
        for after in (unskip.fold, prune):
            try:
                converted = after(converted, **example)
            except ValueError as error:
                sentence(error, starts=(f"{after.__name__}: ",))
                outcomes.append(f"{after.__name__} refused")
            else:
                assert distance(network, converted, inputs) < 1e-9
                outcomes.append(f"{after.__name__} agreed")
        if getattr(converted, "pruning", None) is not None and converted.pruning.removed:  # type: ignore[union-attr]
            outcomes.append("channels removed")
    return outcomes


def fold_trained(plan: Plan, method: str) -> list[str]:
    network, inputs = build(plan)
    try:
        plain = unskip.plainify(network, method=method)
    except ValueError as error:
        sentence(error, starts=("plainify: ",))
        return ["not made"]
    with torch.no_grad():
        for i, p in enumerate(plain.parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
    twist(plain.eval(), plan)
    example = {"example": inputs[0]} if plan.seed % 2 else {}
    outcomes = []
    with circumstances(plan):
        for command in (unskip.fold, prune):
            try:
                result = command(plain, **example)
            except ValueError as error:
                sentence(error, starts=(f"{command.__name__}: ",))
                outcomes.append(f"{command.__name__} refused")
            else:
                assert distance(plain, result, inputs) < 1e-9
                outcomes.append(f"{command.__name__} agreed")
    return outcomes


def run(file: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


def write_files(plan: Plan, folder: Path) -> list[str]:
    """As ONNX with its twist, and in 8 bits what of it can be folded."""
    network, inputs = build(plan)
    twist(network, plan)
    file, outcomes = folder / "net.onnx", []
    x = inputs[0]
    with circumstances(plan):
        single = copy.deepcopy(network).float()
        try:
            unskip.export(single, file, example=x.float(), force=True)
        except ValueError as error:
            sentence(error, starts=("export: ",))
            outcomes.append("onnx refused")
        else:
            with torch.no_grad():  # a file is what the network does in inference
                for signed in (x, -x, x.abs()):
                    expected = single(signed.float())  # the rounding of float32 is no error of the file
                    near = relative(expected, run(file, signed.float())) < 1e-3
                    assert near or relative(network(signed).float(), expected) > 1e-4
            outcomes.append("onnx agreed")
        images = 4 * torch.randn(64, *x.shape[1:], generator=torch.Generator().manual_seed(plan.seed))
        try:
            report = quantize(single, file, calibrate=images, limit=20, force=True)
        except ValueError as error:
            sentence(error, starts=("quantize: ", "export: "))
            return [*outcomes, "int8 refused"]
        with torch.no_grad():
            same = (network(images.double()).argmax(1) == run(file, images).argmax(1)).double().mean().item()
        assert abs(100 * same - report.accuracy.agreement) <= 2
        assert same >= 0.78
    return [*outcomes, "int8 agreed"]


def count(check: Callable[..., list[str]], examples: int, *strategies: st.SearchStrategy) -> Counter[str]:
    """How often each outcome came."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.tuples(*strategies))
    def each(case: tuple) -> None:
        outcomes.update(["networks", *check(*case)])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each()
    return outcomes


def tell(record_property: Callable[[str, object], None], outcomes: Counter[str]) -> None:
    record_property("outcomes", ", ".join(f"{number} {what}" for what, number in sorted(outcomes.items())))


@pytest.mark.parametrize("examples", COUNTS)
def test_rm_keeps_the_function_or_refuses(examples: int, record_property: Callable) -> None:
    outcomes = count(remove_skips, examples, PLANS, OPTIONS)
    tell(record_property, outcomes)
    assert outcomes["networks"] >= examples
    agreed, refused = (outcomes[f"plainify {end}"] + outcomes[f"convert {end}"] for end in ("agreed", "refused"))
    assert agreed > 0.1 * examples  # so the refusals are not all there is
    assert outcomes["fold agreed"] > 0.05 * examples
    assert outcomes["channels removed"] > 0
    assert refused > 0.05 * examples


@pytest.mark.parametrize("examples", COUNTS)
def test_fold_and_prune_keep_the_function_or_refuse(examples: int, record_property: Callable) -> None:
    outcomes = count(fold_trained, examples, USUAL_PLANS, st.sampled_from(METHODS))
    tell(record_property, outcomes)
    assert outcomes["networks"] >= examples
    assert outcomes["fold agreed"] > 0.05 * examples


@pytest.mark.parametrize("examples", FILES)
def test_files_keep_the_function_or_are_refused(examples: int, record_property: Callable, tmp_path: Path) -> None:
    outcomes = count(lambda plan: write_files(plan, tmp_path), examples, PLANS)
    tell(record_property, outcomes)
    assert outcomes["onnx agreed"] > 0.1 * examples
    assert outcomes["int8 agreed"] > 0
