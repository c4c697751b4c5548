"""Dominant gradient flow against full Jacobians and the simulation of Yu and Tomasi 2019, D.4.1."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip._core.modules import preserved
from unskip.measures import Probe, measure
from unskip.measures.dominance import bands, dominant, fractions, squared_error
from unskip.theory import expected_dominance_residual


def test_by_hand() -> None:
    own = torch.tensor([[2.0, 0.0], [1.0, -1.0], [0.0, 0.0]])
    rest = torch.tensor([[-1.0, 0.0], [2.0, 4.0], [0.0, 0.0]])
    assert dominant(own, rest).tolist() == [False, False, False]  # means of ratios: 1, 3/8, 0
    assert dominant(own * 2.1, rest).tolist() == [True, False, False]


def test_bands() -> None:
    assert bands([32, 16, 16, 64]) == [range(16), range(16, 32), range(32, 64)]
    many = bands(range(1, 100))
    assert len(many) <= 4
    assert (many[0].start, many[-1].stop) == (0, 99)


def test_a_sample_of_all_has_no_error() -> None:
    assert squared_error([0.0, 1.0, 0.5], 3) == 0
    assert squared_error([0.0, 1.0], 200) == pytest.approx(0.25 * 0.99)


def test_every_channel_against_jacobians() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    ).double()  # fmt: skip
    x, y = torch.randn(3, 2, 5, 5, dtype=torch.float64), torch.tensor([0, 2, 1])
    with preserved(model):
        probe = Probe(model, x, y)
        probe.collect([])
        classifier = next(layer for layer in probe.layers if layer.kind == "linear")
        found = fractions(probe, classifier, samples=3, channels=None)
    assert [layer.name for layer in found] == ["1", "3"]
    (first, _), errors = zip(*found.values(), strict=True)
    assert errors == (0, 0)

    def tail(a: Tensor) -> Tensor:  # from the first activation to a^(L)
        return F.relu(model[2](a)).mean((2, 3))

    a = F.relu(model[0](x)).detach()
    last = tail(a).detach().requires_grad_()
    (signal,) = torch.autograd.grad(F.cross_entropy(model[6](last), y), last)
    jacobian = torch.autograd.functional.jacobian(lambda s: tail(s).sum(0), a)  # (6, 3, 4, 5, 5)
    theta = torch.einsum("jbihw,bj->bijhw", jacobian, signal)
    share = []
    for i in range(4):
        own, everything = theta[:, i, i].flatten(1), theta[:, i].sum(1).flatten(1)
        share.append(dominant(own, everything - own).double())
    assert first == pytest.approx(torch.stack(share).mean().item())


def test_a_linear_residual_network_is_as_theory_expects() -> None:
    """The trivial case of D.4.1 with p = 1: K = I + εA, no activation in the way."""
    n, depth, epsilon = 20, 6, 0.1
    values = []
    for seed in range(12):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for _ in range(depth):
            linear = nn.Linear(n, n, bias=False)
            linear.weight.data = torch.eye(n) + epsilon * torch.randn(n, n)
            layers += [linear, nn.LeakyReLU(1.0)]
        model = nn.Sequential(*layers, nn.Linear(n, 10, bias=False)).double()
        example = torch.randn(8, n, dtype=torch.float64)
        with preserved(model):
            probe = Probe(model, example)
            probe.collect([])
            found = list(fractions(probe, probe.layers[-1], samples=8, channels=None).values())
        assert len(found) == depth
        values.append(found[0].value)
    expected = expected_dominance_residual(n, hops=depth - 1, p=1.0, epsilon=epsilon, sigma_A=1.0)
    assert torch.tensor(values).mean().item() == pytest.approx(expected, abs=0.06)


def test_residual_networks_have_more_of_it_near_the_end() -> None:
    x = torch.randn(8, 3, 32, 32)
    residual = measure(unskip.create_model("resnet20"), x, families=["dominance"]).series["dominance"]
    plain = measure(unskip.create_model("plain_resnet20"), x, families=["dominance"]).series["dominance"]
    assert residual.values[-3] > 2 * plain.values[-3]
    assert all(0 <= value <= 1 for value in residual.values)


def test_no_classifier_no_dominance() -> None:
    measured = measure(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 8, 8), families=["dominance"])
    assert measured.series["dominance"].values == ()
    assert any("no linear layer" in note for note in measured.notes)
