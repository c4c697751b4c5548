"""Random residual networks: rm, fold, equalisation, prune and files keep the function or refuse with a sentence.

The judge shares no code with the library: float64, two sizes, both signs, with gradients and without. What became of
the networks is printed behind the results (`pytest -m deep tests/ship/test_random_networks.py`), all parts of a
deep run added up. A network that fails is named at the end of its part.
"""

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import unskip
from tests.ship.random_networks import Plan, build, circumstances, draw, kinds, twist
from unskip.ship import convert, prune, quantize
from unskip.ship.equalize import equalize

OPTIONS = {"norm": ["keep", "absorb"], "middle": ["dense", "grouped"], "relu6": ["split", "scale"]}
# Kinds of which many must agree: to refuse them all would be no proof of anything.
AGREEING = (
    "ordinary", "pre-activation", "functional calls", "writes in place", "writes through views", "shared modules",
    "odd pools", "other norms", "other activations", "memory formats", "subclasses that change nothing",
    "blocks that no reader knows", "skips in the parent's forward", "linear layers on the last axis", "gates",
    "one-sided padding", "series and vectors", "scales",
)  # fmt: skip
METHODS = ("plain", "pnnh", "seq", "dirac", "looks_linear")
QUANTIZE = {"bits": [7, 7, 8], "equalize": ["auto", True, False]}


def parts(few: int, some: int, many: int, size: int) -> list[object]:
    """Numbers of networks: a few in each run, some with `full`, many with `deep`, in parts of one size."""
    deep = [range(start, start + size) for start in range(0, many, size)]
    marked = [(range(some), pytest.mark.full), *((numbers, pytest.mark.deep) for numbers in deep)]
    quick = [pytest.param(range(few), id=f"0-{few - 1}")] if few else []
    return quick + [pytest.param(n, marks=mark, id=f"{mark.name}-{n.start}-{n.stop - 1}") for n, mark in marked]


NETWORKS = parts(32, 150, 2000, 250)
FILES = parts(0, 20, 200, 20)


@torch.no_grad()
def relative(expected: Tensor, found: Tensor) -> float:
    assert expected.isfinite().all()
    return ((expected - found).abs().max() / expected.abs().max().clamp_min(1e-6)).item()


Answer = tuple[Tensor, bool, Tensor]  # an input, whether with gradients, and the output


def answer(model: nn.Module, x: Tensor, grad: bool) -> Tensor:
    with torch.set_grad_enabled(grad):
        return model(x.clone()).detach()


def answers(model: nn.Module, inputs: list[Tensor]) -> list[Answer]:
    """On inputs of all sizes, of both signs, in both modes of autograd."""
    found = []
    for x in inputs:
        for signed in (x, x.abs(), -x.abs()):
            for grad in (False, True):
                try:
                    found.append((signed, grad, answer(model, signed, grad)))
                except RuntimeError:  # autograd forbids some writes through views
                    assert grad
    return found


def distance(wanted: list[Answer], model: nn.Module) -> float:
    """The largest relative error."""
    return max(relative(expected, answer(model, x, grad)) for x, grad, expected in wanted)


def sentence(error: ValueError, *, starts: tuple[str, ...]) -> None:
    words = str(error).split("\n")[0]
    assert words.startswith(starts), words
    assert words.endswith((".", "below.")), words


def drawn(options: dict[str, list], plan: Plan) -> dict[str, object]:
    return {name: random.Random(f"{name}{plan.seed}").choice(values) for name, values in options.items()}


def remove_skips(plan: Plan) -> list[str]:
    options = drawn(OPTIONS, plan)
    network, inputs = build(plan)
    twist(network, plan)
    command = convert if plan.seed % 3 == 0 else unskip.plainify
    example = {"example": inputs[0]} if plan.seed % 2 else {}
    where = command.__name__
    with circumstances(plan):
        wanted = answers(network, inputs)
        try:
            converted = command(network, method="rm", limit=math.inf, scale=20, **options, **example)
            assert distance(wanted, converted) < 1e-9
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
                assert distance(wanted, converted) < 1e-9
                outcomes.append(f"{after.__name__} agreed")
        if getattr(converted, "pruning", None) is not None and converted.pruning.removed:  # type: ignore[union-attr]
            outcomes.append("channels removed")
    return outcomes


def fold_trained(plan: Plan) -> list[str]:
    method = METHODS[plan.seed % len(METHODS)]
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
        wanted = answers(plain, inputs)
        for command in (unskip.fold, prune):
            try:
                result = command(plain, **example)
            except ValueError as error:
                sentence(error, starts=(f"{command.__name__}: ",))
                outcomes.append(f"{command.__name__} refused")
            else:
                assert distance(wanted, result) < 1e-9
                outcomes.append(f"{command.__name__} agreed")
                if command is unskip.fold:
                    outcomes.append(equalized(result, wanted, inputs[0]))
    return outcomes


def equalized(folded: nn.Module, wanted: list[Answer], x: Tensor) -> str:
    try:
        result = equalize(folded, x)
    except ValueError as error:
        sentence(error, starts=("equalize: ",))
        return "equalize refused"
    assert distance(wanted, result) < 1e-9
    changed = any(not torch.equal(a, b) for a, b in zip(folded.parameters(), result.parameters(), strict=True))
    return "equalize agreed" if changed else "equalize found nothing"


def run(file: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


def write_files(plan: Plan, folder: Path) -> list[str]:
    """As ONNX with its twist, and in 8 bits what of it can be folded."""
    (network, inputs), (single, _) = build(plan), build(plan)
    for each in (network, single.float()):
        twist(each, plan)
    file, outcomes = folder / "net.onnx", []
    x = inputs[0]
    with circumstances(plan):
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
            report = quantize(single, file, calibrate=images, limit=20, force=True, **drawn(QUANTIZE, plan))
        except ValueError as error:
            sentence(error, starts=("quantize: ", "equalize: ", "export: "))
            return [*outcomes, "int8 refused"]
        with torch.no_grad():
            same = (network(images.double()).argmax(1) == run(file, images).argmax(1)).double().mean().item()
        assert abs(100 * same - report.accuracy.agreement) <= 2
        assert same >= 0.78
    return [*outcomes, "int8 agreed"]


Tell = Callable[[str, object], None]


def count(check: Callable[[Plan], list[str]], numbers: range, tell: Tell, *, usual: bool = False) -> Counter[str]:
    """How often each outcome came, of all networks and ('hooks: fold refused') of each kind; an error at the end."""
    outcomes: Counter[str] = Counter()
    wrong: list[Exception] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            plan = draw(number, usual=usual)
            try:
                found = check(plan)
            except Exception as error:
                error.add_note(f"in network draw({number}, usual={usual}): {plan}")
                wrong.append(error)
                found = ["WRONG"]
            outcomes.update(["networks", *found])
            outcomes.update(f"{kind}: {what}" for kind in kinds(plan) for what in found)
    for name, times in sorted(outcomes.items()):
        tell("outcomes", (name, times))
    if wrong:
        raise ExceptionGroup(f"{len(wrong)} of {len(numbers)} networks", wrong)
    return outcomes


@pytest.mark.parametrize("numbers", NETWORKS)
def test_rm_keeps_the_function_or_refuses(numbers: range, record_property: Tell) -> None:
    outcomes = count(remove_skips, numbers, record_property)

    def converted(kind: str, end: str) -> int:
        return outcomes[f"{kind}plainify {end}"] + outcomes[f"{kind}convert {end}"]

    assert converted("", "agreed") > 0.4 * len(numbers)
    assert converted("ordinary: ", "agreed") > 2 * converted("ordinary: ", "refused")
    assert converted("", "refused") > 0.05 * len(numbers)
    for kind in AGREEING:
        assert converted(f"{kind}: ", "agreed") >= len(numbers) // 150, kind
    assert outcomes["fold agreed"] > 0.1 * len(numbers)
    assert outcomes["channels removed"] > 0


@pytest.mark.parametrize("numbers", NETWORKS)
def test_fold_and_prune_keep_the_function_or_refuse(numbers: range, record_property: Tell) -> None:
    outcomes = count(fold_trained, numbers, record_property, usual=True)
    assert outcomes["fold agreed"] > 0.2 * len(numbers)
    assert outcomes["prune agreed"] > 0.4 * len(numbers)


@pytest.mark.parametrize("numbers", FILES)
def test_files_keep_the_function_or_are_refused(numbers: range, record_property: Tell, tmp_path: Path) -> None:
    outcomes = count(lambda plan: write_files(plan, tmp_path), numbers, record_property)
    assert outcomes["onnx agreed"] > 0.4 * len(numbers)
    assert outcomes["int8 agreed"] > 0.4 * len(numbers)
