"""verify finds the layer where two networks part, names the usual reason, and leaves both as they were."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import unskip
from unskip.models.cifar import cifar_resnet
from unskip.surgery.verify import difference


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return unskip.plainify(cifar_resnet(8), "plain").eval()


IMAGES = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(1))


def test_a_copy_agrees_to_the_bit_at_every_layer() -> None:
    network = plain()
    check = unskip.verify(network, copy.deepcopy(network), IMAGES)
    assert check.ok(0)
    assert check.first_mismatch(0) is None
    assert check.reasons() == ()
    paths = [layer.path for layer in check.layers]
    assert len(paths) == len(set(paths)) == len(list(network.modules())) - 1
    assert set(check.output) == {(s, p) for s in ("example", "random") for p in ("float32", "float64")}
    assert 0 < check.rounding < 1e-5
    assert str(check).startswith("The networks agree: the relative error of the output is at most 0.0e+00 in float64")


@torch.no_grad()
def test_a_changed_weight_is_found_with_its_size() -> None:
    network, other = plain(), plain()
    other.layer2[0][0].weight *= 1.5  # the first convolution of the second stage
    check = unskip.verify(network, other, IMAGES)
    assert not check.ok()
    assert check.first_mismatch() == "layer2.0.0"
    at = next(layer for layer in check.layers if layer.path == "layer2.0.0")
    assert at.float64.relative == pytest.approx(0.5)
    expected = (network.double()(IMAGES.double()) - other.double()(IMAGES.double())).abs().max().item()
    assert check.output["example", "float64"].maximum == pytest.approx(expected, rel=1e-9)
    assert "They part at 'layer2.0.0'." in str(check)
    assert check.ok(1e6)


def test_a_rewritten_layer_is_not_where_they_part() -> None:
    """A convolution that has absorbed its norm differs; behind the norm's place they agree again."""
    network = plain()
    nn.init.uniform_(network.bn1.running_var, 0.1, 0.5)
    fused = copy.deepcopy(network)
    fused.conv1, fused.bn1 = fuse_conv_bn_eval(fused.conv1, fused.bn1), nn.Identity()
    check = unskip.verify(network, fused, IMAGES)
    assert check.ok()
    assert check.first_mismatch() is None
    assert next(layer for layer in check.layers if layer.path == "conv1").float64.relative > 0.1
    assert "what follows them agrees (1, 'conv1' first)." in str(check)
    assert "\nconv1 " not in str(check)  # a row of it would look like a failure


def test_networks_that_are_not_finite_agree_about_nothing() -> None:
    network = nn.Linear(3, 2)
    network.bias.data.fill_(float("nan"))
    check = unskip.verify(network, copy.deepcopy(network), torch.randn(2, 3))
    assert not check.finite
    assert "The output of a is not finite" in str(check)


def test_training_mode_is_the_first_reason() -> None:
    network, other = plain(), plain()
    other.layer1.train()
    check = unskip.verify(network, other, IMAGES)
    assert not check.ok()
    assert check.reasons()[0].startswith("b is in training mode (layer1, layer1.0, layer1.0.0, ...), where norms")
    assert check.reasons()[0] in str(check)
    assert check.first_mismatch() == "layer1.0.1"


class Positive(nn.Module):
    """|x| for the identity: the same function of what is not negative."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def test_a_function_of_positive_inputs_parts_on_random_ones() -> None:
    check = unskip.verify(nn.Sequential(nn.Identity()), nn.Sequential(Positive()), IMAGES.abs())
    assert check.output["example", "float64"].maximum == 0
    assert any("agree on the example and differ on random inputs" in reason for reason in check.reasons())


@torch.no_grad()
def test_rounding_is_told_from_a_difference() -> None:
    """(x + 1e4) - 1e4 is x in float64 to 1e-12, in float32 to 1e-3."""

    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1e4) - 1e4

    check = unskip.verify(Shift(), nn.Identity(), IMAGES)
    assert not check.ok()
    assert check.worst("float64") < 1e-11
    assert any("In float64 they agree" in reason for reason in check.reasons())
    assert check.rounding > 1e-5


def test_a_coarser_dtype_is_named() -> None:
    network = plain()
    check = unskip.verify(network, copy.deepcopy(network).bfloat16(), IMAGES)
    assert 1e-3 < check.worst("float64") < 1
    assert any("a stores its weights as torch.float32, b as torch.bfloat16" in reason for reason in check.reasons())


def test_both_networks_and_the_generators_stay_as_they_were() -> None:
    a, b = plain().train(), nn.Sequential(plain(1), nn.Dropout(0.5)).bfloat16()
    b[1].train()
    for network in (a, b):
        next(network.parameters()).grad = torch.ones_like(next(network.parameters()))
    states = [copy.deepcopy(network.state_dict()) for network in (a, b)]
    modes = [[module.training for module in network.modules()] for network in (a, b)]
    example = IMAGES.clone()
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    unskip.verify(a, b, example)
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert np.array_equal(generators[2], np.random.get_state()[1])
    assert torch.equal(example, IMAGES)
    for network, state, mode in zip((a, b), states, modes, strict=True):
        assert [module.training for module in network.modules()] == mode
        assert not any(module._forward_hooks for module in network.modules())
        assert next(network.parameters()).grad is not None
        for key, value in network.state_dict().items():
            assert value.dtype == state[key].dtype
            assert torch.equal(value, state[key]), key


def test_difference_counts_what_is_not_finite() -> None:
    inf, nan = float("inf"), float("nan")
    assert difference(torch.tensor([1.0, inf, nan]), torch.tensor([1.0, inf, nan])).maximum == 0
    assert difference(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])).relative == inf
    assert difference(torch.tensor([0.0]), torch.tensor([1e-30])).relative == inf
    error = difference(torch.tensor([2.0, -4.0]), torch.tensor([2.5, -4.0]))
    assert (error.maximum, error.relative) == (0.5, 0.125)


def test_shared_modules_have_one_line_for_each_run() -> None:
    relu = nn.ReLU(inplace=True)
    network = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
    check = unskip.verify(network, copy.deepcopy(network), torch.randn(3, 4))
    assert [layer.path for layer in check.layers] == ["0", "1", "2", "1 (2)"]


class Silent(nn.Module):
    """Refuses its input as timm's networks refuse an image of another size, and says less."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError


@pytest.mark.parametrize(
    ("a", "b", "example", "message"),
    [
        ("resnet20", nn.Identity(), IMAGES, "verify: a='resnet20' is not an nn.Module"),
        (nn.Identity(), None, IMAGES, "verify: b=None is not an nn.Module"),
        (
            nn.Identity(),
            nn.Identity(),
            torch.arange(3),
            "verify: example=torch.int64 .* must be a batch of floating-point inputs",
        ),
        (nn.Identity(), nn.Identity(), [1.0], r"verify: example=\[1.0\] must be a batch"),
        (nn.Identity(), nn.Flatten(), IMAGES, r"a gives \(2, 3, 9, 8\) and b gives \(2, 216\)"),
        (nn.Identity(), nn.Linear(5, 2), IMAGES, r"verify: b \(Linear\) can't run in float64 on .*\(2, 3, 9, 8\)"),
        (nn.Identity(), Silent(), IMAGES, r"verify: b \(Silent\) can't run in float64 on .*: AssertionError\."),
        (nn.Identity(), nn.LSTM(8, 2), IMAGES[0], r"verify: b \(LSTM\) does not return one tensor"),
        (nn.Linear(2, 2, device="meta"), nn.Identity(), IMAGES, "verify: a network on the meta device"),
    ],
)
def test_bad_input_gets_a_sentence(a: object, b: object, example: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unskip.verify(a, b, example)


def test_a_bad_tolerance_gets_a_sentence() -> None:
    check = unskip.verify(nn.Identity(), nn.Identity(), IMAGES)
    with pytest.raises(ValueError, match="tolerance=-1 must be a number of at least 0"):
        check.ok(-1)
