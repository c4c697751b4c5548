"""The verdict: on real networks, good and bad, and with measures that are missing or not finite."""

import dataclasses
import math
import re

import pytest
import torch
from sklearn.datasets import load_digits
from timm.models import VisionTransformer
from torch import Tensor, nn

import unskip
from unskip.doctor import Verdict, judge
from unskip.doctor.examine import InputSpec, examine
from unskip.doctor.remedies import tried_on
from unskip.doctor.verdict import (
    DIFFERENCE,
    FAMILIES,
    MAX_CONFIDENCE,
    MAX_CONFIDENCE_LARGE,
    NOISE_TO_SIGNAL,
    RELATIVE_GRADIENT,
    SATURATION,
    STEP,
    Limit,
    singularity,
)
from unskip.measures import Measured, Series, measure
from unskip.methods import method_names
from unskip.models.cifar import cifar_resnet

BATCH = 64


def digits() -> tuple[Tensor, Tensor]:
    bunch = load_digits()
    images = torch.tensor(bunch.images[:BATCH], dtype=torch.float32)[:, None]
    return (images - images.mean()) / images.std(), torch.tensor(bunch.target[:BATCH])


def mlp(depth: int, act: type[nn.Module], deviation: float, norm: type[nn.Module] | None = None) -> nn.Module:
    """Weights N(0, deviation²/64), no bias at the start."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(depth):
        linear = nn.Linear(64, 64)
        nn.init.normal_(linear.weight, 0, deviation / 8)
        nn.init.zeros_(linear.bias)
        layers += [linear, *([norm(64)] if norm else []), act()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def verdict_on(model: nn.Module) -> Verdict:
    return judge(measure(model, *digits(), families=FAMILIES))


def blank(**changes: object) -> Measured:
    return dataclasses.replace(Measured(series={}, numbers={}, layers=(), notes=()), **changes)  # type: ignore[arg-type]


def check_negative(verdict: Verdict) -> None:
    """Every negative verdict names mechanism, layer and remedies."""
    assert re.match(r"[A-Z].*\.$", verdict.summary, re.DOTALL)
    assert verdict.mechanism is not None
    assert verdict.mechanism in verdict.summary
    assert verdict.layer is not None
    assert repr(verdict.layer) in verdict.summary
    values = re.search(r"; (\S+) there, (\S+) (?:at|in) [a-z ]+, limit (\S+)\)\.", verdict.summary)
    assert values is not None, verdict.summary
    there, end, limit = (float(value.rstrip("%")) for value in values.groups())
    if verdict.mechanism in ("dissipating", "saturation"):
        assert min(there, end) >= limit > 0
    else:
        assert max(there, end) <= limit
    assert verdict.remedies
    assert len(set(verdict.remedies)) == len(verdict.remedies)
    for remedy in verdict.remedies:
        assert re.match(r"[A-Z].*\.$", remedy)
        for method in re.findall(r"method='(\w+)'", remedy):
            assert method in method_names()
    assert 0.5 <= verdict.confidence <= MAX_CONFIDENCE


FAILING = {
    "tanh, weights too small": (lambda: mlp(40, nn.Tanh, 0.7), "vanishing gradient", "larger"),
    "sigmoid": (lambda: mlp(12, nn.Sigmoid, 1.0), "vanishing gradient", "Add a BatchNorm"),
    "tanh, weights too large": (lambda: mlp(40, nn.Tanh, 4.0), "saturation", "smaller"),
    "relu, weights too large": (lambda: mlp(40, nn.ReLU, 2.4), "exploding gradient", "skip"),
    "relu, 100 layers": (lambda: mlp(100, nn.ReLU, math.sqrt(2)), "singularity", "BatchNorm"),
    "relu and batchnorm, 60 layers": (lambda: mlp(60, nn.ReLU, math.sqrt(2), nn.BatchNorm1d), "dissipating", "skip"),
}


@pytest.mark.parametrize("case", FAILING)
def test_networks_that_fail(case: str) -> None:
    build, mechanism, remedy = FAILING[case]
    torch.manual_seed(3)
    model = build()
    verdict = verdict_on(model)
    assert verdict.outcome == "fails"
    assert verdict.mechanism == mechanism
    check_negative(verdict)
    assert verdict.layer in dict(model.named_modules())
    assert any(remedy in one for one in verdict.remedies)


def test_a_plain_network_of_110_layers_loses_its_input() -> None:
    torch.manual_seed(3)
    model = unskip.plainify(cifar_resnet(110, in_chans=1), "plain")
    verdict = verdict_on(model)
    assert (verdict.outcome, verdict.mechanism) == ("fails", "dissipating")
    check_negative(verdict)
    assert "method='pnnh'" in verdict.remedies[0]
    assert verdict.layer is not None
    assert verdict.layer.startswith(("layer1", "layer2", "layer3"))


def test_the_sentence_names_the_first_layer_beyond_the_limit_with_its_value() -> None:
    torch.manual_seed(3)
    measured = measure(mlp(60, nn.ReLU, math.sqrt(2), nn.BatchNorm1d), *digits(), families=FAMILIES)
    verdict = judge(measured)
    ratios = measured.series["noise_to_signal"].by_layer()
    names = list(ratios)
    assert verdict.layer is not None
    at = names.index(verdict.layer)
    assert ratios[names[at - 1]] <= NOISE_TO_SIGNAL.at < min(ratios[name] for name in names[at:-1])
    assert f"{ratios[verdict.layer]:.2g} there, {ratios[names[-2]]:.2g} at the last hidden layer" in verdict.summary
    (layer,) = [layer for layer in measured.layers if layer.name == verdict.layer]
    assert f"({layer.depth} of 61)" in verdict.summary  # as many linear layers as the network has
    assert verdict.measures[0] == "noise_to_signal"


def test_a_method_that_refuses_the_network_is_no_remedy() -> None:
    for name in ("mobilenetv2_100", "plain_mobilenetv2"):  # of the second its residual form counts
        rebuilds = tried_on(unskip.create_model(name))
        assert (rebuilds("pnnh"), rebuilds("seq")) == (True, False)
    torch.manual_seed(3)
    measured = measure(unskip.plainify(cifar_resnet(56, in_chans=1), "plain"), *digits(), families=FAMILIES)
    proposed = [judge(measured, rebuilds=known.__contains__).remedies for known in ([], ["seq"])]
    assert ["plainify" in " ".join(cures) for cures in proposed] == [False, True]
    assert "'pnnh'" not in " ".join(proposed[1])


@pytest.mark.full
@pytest.mark.parametrize("name", ["mobilenetv2_100", "efficientnet_b0"])
def test_networks_of_depthwise_convolutions_train_on_enlarged_digits(name: str) -> None:
    """Noise at frequencies that the digits do not have made these look lost."""
    assert examine(name, InputSpec())[0].verdict.outcome == "trains"


@pytest.mark.parametrize("method", [None, "pnnh"])
def test_residual_and_pnnh_networks_train(method: str | None) -> None:
    torch.manual_seed(3)
    model: nn.Module = cifar_resnet(56, in_chans=1)
    verdict = verdict_on(model if method is None else unskip.plainify(model, method))
    assert verdict.outcome == "trains"
    assert verdict.summary.endswith(".")
    assert verdict.mechanism is None
    assert verdict.layer is None
    assert verdict.remedies == ()
    assert 0.5 <= verdict.confidence <= MAX_CONFIDENCE


def test_a_shallow_network_trains_although_its_deep_version_fails() -> None:
    torch.manual_seed(3)
    assert verdict_on(mlp(6, nn.ReLU, math.sqrt(2), nn.BatchNorm1d)).outcome == "trains"


def test_confidence_is_lower_on_large_images() -> None:
    torch.manual_seed(3)
    measured = measure(unskip.plainify(cifar_resnet(110, in_chans=1), "plain"), *digits(), families=FAMILIES)
    assert measured.shape == digits()[0].shape
    small, big = judge(measured), judge(dataclasses.replace(measured, shape=(64, 1, 96, 96)))
    assert small.outcome == big.outcome == "fails"
    assert small.confidence == MAX_CONFIDENCE
    assert big.confidence == MAX_CONFIDENCE_LARGE
    assert "smaller images" in big.summary
    assert "smaller images" not in small.summary
    check_negative(big)


def test_confidence_is_lower_for_trained_networks() -> None:
    torch.manual_seed(3)
    measured = measure(cifar_resnet(20, in_chans=1), *digits(), families=FAMILIES)
    fresh, trained = judge(measured), judge(measured, trained=True)
    assert fresh.outcome == trained.outcome == "trains"
    assert fresh.confidence > 0.5 == trained.confidence
    assert trained.summary.startswith(fresh.summary)
    assert "limits are for untrained networks" in trained.summary
    assert judge(blank(numbers={"loss": math.nan}), trained=True).outcome == "fails"
    assert "untrained" not in judge(blank(numbers={"loss": math.nan}), trained=True).summary  # needs no limit


def test_numbers_that_are_not_finite() -> None:
    model = mlp(4, nn.ReLU, 1.0)
    with torch.no_grad():
        model[5].weight.fill_(math.inf)
    verdict = verdict_on(model)
    assert verdict.outcome == "fails"
    assert verdict.layer == "5"
    assert "NaN" in verdict.summary
    assert judge(blank(numbers={"loss": math.nan})).outcome == "fails"


def test_nothing_measured_is_doubtful() -> None:
    verdict = judge(blank())
    assert verdict.outcome == "doubtful"
    assert verdict.confidence == 0.5
    assert verdict.summary.endswith(".")
    assert verdict.remedies


def test_a_single_input_is_doubtful() -> None:
    """After a norm over the positions of one image, their mean is 0, and so is its gradient."""
    verdict = judge(measure(unskip.create_model("pnnh_resnet20"), torch.randn(1, 3, 32, 32)))
    assert verdict.outcome == "doubtful"
    assert "A single input" in verdict.summary


def test_with_missing_measures_no_network_is_healthy_but_some_fail() -> None:
    x, y = digits()
    torch.manual_seed(3)
    healthy = measure(cifar_resnet(20, in_chans=1), x, y, families=FAMILIES)
    assert judge(healthy).outcome == "trains"
    no_gradient = dataclasses.replace(
        healthy, series={name: series for name, series in healthy.series.items() if "gradient" not in name}
    )
    assert judge(no_gradient).outcome == "doubtful"
    assert "gradient" in judge(no_gradient).summary
    assert judge(measure(mlp(40, nn.Tanh, 0.7), x, y, families=["gradient"])).outcome == "fails"
    assert judge(measure(cifar_resnet(20, in_chans=1), x, y, families=["gradient"])).outcome == "doubtful"


def test_a_head_that_starts_at_zero_is_doubtful() -> None:
    model = mlp(4, nn.ReLU, 1.4)
    nn.init.zeros_(model[-1].weight)
    verdict = verdict_on(model)
    assert verdict.outcome == "doubtful"
    assert "starts at zero" in verdict.remedies[0]
    nn.init.normal_(model[-1].weight, 0, 0.1)
    assert verdict_on(model).outcome == "trains"


def test_a_transformer_gets_adamw_as_a_remedy() -> None:
    options = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10}
    verdict = verdict_on(VisionTransformer(**options, embed_dim=48, depth=6, num_heads=4))
    assert (verdict.outcome, verdict.mechanism) == ("fails", "vanishing gradient")
    check_negative(verdict)
    assert verdict.summary.startswith("This network will most likely not train with SGD: ")
    assert "AdamW" in verdict.remedies[0]
    deep = verdict_on(mlp(40, nn.ReLU, 0.7))  # here all inputs look alike too, and no optimiser would help
    assert deep.mechanism == "vanishing gradient"
    assert deep.summary.startswith("This network will most likely not train: ")


def test_global_pooling_does_not_count_as_singularity() -> None:
    torch.manual_seed(3)
    convolutions = [
        layer for _ in range(2) for layer in (nn.LazyConv2d(32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    ]
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    x, y = digits()
    x = nn.functional.interpolate(x, size=24)
    model(x)
    measured = measure(model, x, y, families=FAMILIES)
    differ = measured.series["difference"].by_layer()
    found = singularity(measured)
    assert found is not None
    assert found.value == differ["5"] > 3 * differ["6"]  # the last ReLU, and the pooling


def test_branches_that_start_at_zero_do_not_count_as_a_vanishing_gradient() -> None:
    model = cifar_resnet(20, in_chans=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bn2.weight"):
            nn.init.zeros_(parameter)
    assert verdict_on(model).outcome == "trains"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_judge_accepts_any_numbers(bad: float) -> None:
    torch.manual_seed(3)
    measured = measure(mlp(5, nn.ReLU, 1.4, nn.BatchNorm1d), *digits())
    all_bad = {
        name: dataclasses.replace(series, values=(bad,) * len(series.values))
        for name, series in measured.series.items()
    }
    worse = [dataclasses.replace(measured, series=all_bad, numbers=dict.fromkeys(measured.numbers, bad))]
    worse += [dataclasses.replace(measured, series=measured.series | {name: all_bad[name]}) for name in all_bad]
    worse += [dataclasses.replace(measured, numbers=measured.numbers | {name: bad}) for name in measured.numbers]
    for one in worse:
        verdict = judge(one)
        assert verdict.outcome in ("trains", "doubtful", "fails")
        assert verdict.summary.endswith(".")
        assert 0.5 <= verdict.confidence <= MAX_CONFIDENCE


@pytest.mark.parametrize("last", [0.0, 1e200], ids=["no gradient at the last layer", "a square beyond float64"])
def test_exploding_gradients_of_any_size(last: float) -> None:
    series = Series(
        name="gradient_norm", title="", label="", layers=("a", "b", "c"), values=(1.0, 1e9, last), healthy="", source=""
    )
    verdict = judge(blank(series={"gradient_norm": series}, numbers={"loss": 1.0}))
    assert (verdict.mechanism, verdict.layer) == ("exploding gradient", "c" if last else "b")


def test_a_network_of_one_layer_and_a_batch_of_two() -> None:
    verdict = judge(measure(nn.Linear(5, 3), torch.randn(2, 5)))
    assert verdict.outcome in ("trains", "doubtful", "fails")
    assert judge(measure(nn.Linear(5, 3).requires_grad_(False), torch.randn(20, 5))).outcome == "doubtful"


@pytest.mark.parametrize("limit", [NOISE_TO_SIGNAL, DIFFERENCE, STEP, RELATIVE_GRADIENT, SATURATION], ids=str)
def test_severity_is_0_at_the_limit_and_1_where_the_slack_ends(limit: Limit) -> None:
    assert limit.severity(limit.at) == 0
    assert limit.severity(limit.at * limit.slack) == pytest.approx(1)
    assert limit.severity(limit.at / limit.slack) == pytest.approx(-1)


def test_near_the_limit_a_verdict_is_doubtful_and_names_the_reason() -> None:
    torch.manual_seed(3)
    measured = measure(cifar_resnet(20, in_chans=1), *digits(), families=FAMILIES)
    verdict = judge(dataclasses.replace(measured, numbers=measured.numbers | {"input_dissipation": NOISE_TO_SIGNAL.at}))
    assert (verdict.outcome, verdict.mechanism) == ("doubtful", "dissipating")
    assert verdict.confidence == pytest.approx(0.5)


def test_a_hostile_layer_name_is_quoted() -> None:
    name = "a'<b>"
    series = Series(name="relative_gradient", title="", label="", layers=(name,), values=(1e-9,), healthy="", source="")
    verdict = judge(blank(series={"relative_gradient": series}))
    assert verdict.layer == name
    assert repr(name) in verdict.summary


def test_weights_that_are_not_finite_are_named() -> None:
    model = mlp(4, nn.ReLU, 1.0)
    with torch.no_grad():
        model[5].weight[0, 0] = math.nan
    verdict = judge(measure(model, *digits()))
    assert verdict.remedies == ("The weights of layer '5' are not finite: initialise or load them again.",)


def test_a_network_whose_backward_pass_fails_does_not_train() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(32, 10))
    verdict = verdict_on(model)
    assert verdict.outcome == "fails"
    assert "backward pass fails" in verdict.summary
    assert "inplace=False" in verdict.remedies[0]
    model[3].inplace = False
    assert verdict_on(model).outcome != "fails"


def test_a_network_of_zeros_needs_larger_weights() -> None:
    model = mlp(4, nn.ReLU, 0.0)
    verdict = verdict_on(model)
    assert verdict.outcome == "fails"
    assert "Initialise the weights larger" in " ".join(verdict.remedies)
