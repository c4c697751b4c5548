"""Penalties and constraints against values computed by hand, and against torch's own weight decay."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.small import write_npz
from unskip.models import create_model, dominant_paths, to_plain
from unskip.models.simplified import simplified_net
from unskip.train import MaxNorm, Orthogonal, Recipe, ShiftedDecay, run
from unskip.train.optim import make_optimizer, scaled_groups
from unskip.train.penalties import from_config, identity_shift, orthogonality, start_shift, unit_weights
from unskip.train.recipe import OptimizerConfig


def linear(*rows: list[float]) -> nn.Linear:
    layer = nn.Linear(len(rows[0]), len(rows), bias=False)
    layer.weight.data = torch.tensor(rows)
    return layer


def test_max_norm_by_hand() -> None:
    layer = linear([3.0, 4.0], [0.3, 0.4], [0.0, 0.0])
    MaxNorm(2.5)(layer)
    expected = torch.tensor([[1.5, 2.0], [0.3, 0.4], [0.0, 0.0]])  # norms 5, 0.5, 0: only the first is cut, to 2.5
    torch.testing.assert_close(layer.weight.data, expected)


def test_max_norm_of_a_convolution_is_per_unit() -> None:
    conv = nn.Conv2d(3, 5, 3)
    torch.nn.init.normal_(conv.weight, std=2.0)
    before = conv.weight.detach().clone()
    MaxNorm(3.0)(conv)
    expected = torch.renorm(before.flatten(1), p=2, dim=0, maxnorm=3.0).view_as(before)  # torch's own
    torch.testing.assert_close(conv.weight.data, expected)


def test_max_norm_is_for_hidden_units() -> None:
    """Oyedotun et al. 2020, VI.C.2: "imposed on the weights' vector of every hidden unit"."""
    network = create_model("plainnet_mlp", depth=3)
    for p in network.parameters():
        p.data.mul_(10)
    head = network.get_classifier().weight.detach().clone()
    MaxNorm(3.0)(network)
    hidden = [weight for weight in unit_weights(network) if weight is not network.get_classifier().weight]
    assert len(hidden) == 3
    for weight in hidden:
        torch.testing.assert_close(weight.norm(dim=1), torch.full((300,), 3.0))
    assert torch.equal(network.get_classifier().weight, head)


def test_a_wrapped_network_is_penalised_and_constrained_as_the_one_inside() -> None:
    network = create_model("simplified_plain20")
    wrapped = torch.compile(nn.DataParallel(network))
    assert identity_shift(wrapped).keys() == identity_shift(network).keys()
    decay = ShiftedDecay(1.0, identity_shift(network))
    assert torch.equal(decay(wrapped), decay(network))
    network.fc.weight.data.mul_(100)
    head = network.fc.weight.detach().clone()
    MaxNorm(1e-3)(wrapped)
    assert torch.equal(network.fc.weight, head)


def test_orthogonality_by_hand() -> None:
    # W = [[1, 1], [0, 1]]: Sigma = [[1, 1], [1, 2]], trace 3, n = 2: 2/3 Sigma - I = [[-1/3, 2/3], [2/3, 1/3]]
    assert orthogonality(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).item() == pytest.approx((1 + 4 + 4 + 1) / 9)
    # D < d: W = [[2, 0, 0], [2, 2, 0]], Sigma = W W^T = [[4, 4], [4, 8]], trace 12: Sigma / 6 - I = [[-1/3, 2/3], ...]
    assert orthogonality(torch.tensor([[2.0, 0, 0], [2.0, 2.0, 0]])).item() == pytest.approx(10 / 9)


def test_orthogonality_is_zero_for_orthogonal_weights_at_any_scale() -> None:
    for shape in ((6, 4), (4, 6), (5, 5)):
        W = 7.5 * torch.nn.init.orthogonal_(torch.empty(shape))
        assert orthogonality(W).item() == pytest.approx(0, abs=1e-9)
    network = nn.Sequential(linear([1.0, 1.0], [0.0, 1.0]), linear([1.0, 0.0], [0.0, 1.0]))
    assert Orthogonal(0.9)(network).item() == pytest.approx(0.9 * 10 / 9)


def test_shifted_decay_by_hand() -> None:
    network = nn.Sequential(linear([1.0, 2.0]))
    penalty = ShiftedDecay(0.1, {"0.weight": torch.tensor([[1.0, 0.0]])})(network)
    assert penalty.item() == pytest.approx(0.1 / 2 * 4)
    penalty.backward()
    torch.testing.assert_close(network[0].weight.grad, torch.tensor([[0.0, 0.1 * 2]]))


def test_a_shift_of_zero_is_sgds_own_weight_decay() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).double()

    ours, theirs = net(), net()
    x = torch.randn(8, 3, 3, 3, dtype=torch.float64)
    zero = {name: torch.zeros_like(p) for name, p in ours.named_parameters()}
    a = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    b = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.03)
    for _ in range(5):
        for optimizer, network, penalty in ((a, ours, ShiftedDecay(0.03, zero)), (b, theirs, None)):
            optimizer.zero_grad()
            loss = network(x).square().mean()
            (loss if penalty is None else loss + penalty(network)).backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


def test_identity_shift_is_rho() -> None:
    """Eq. (1): 1 at (c, c, centre) with c < min(C, D) in the blocks, 0 in the stem and elsewhere."""
    stem, widen, block = (nn.Conv2d(*io, 3, padding=1, bias=False) for io in ((3, 3), (3, 5), (5, 5)))
    network = nn.Sequential(stem, widen, block, nn.Flatten(), nn.Linear(5, 2))
    shift = identity_shift(network)
    assert set(shift) == {"0.weight", "1.weight", "2.weight", "4.weight"}
    assert shift["0.weight"].sum() == 0
    assert shift["4.weight"].sum() == 0
    assert shift["1.weight"].sum() == 3
    x = torch.randn(2, 5, 6, 6)
    torch.testing.assert_close(nn.functional.conv2d(x, shift["2.weight"], padding=1), x)  # it is the identity


def test_a_residual_and_a_plain_network_decay_alike_under_the_identity_shift() -> None:
    """Yu and Tomasi 2019, 4.1: ||T^-1(p)||^2 in the plain network is ||r||^2 in the residual one."""
    conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), conv)
    r = conv.weight.detach().clone()
    shift = identity_shift(network)
    conv.weight.data += shift["1.weight"]  # T
    shift.pop("0.weight")
    assert ShiftedDecay(2.0, shift)(network).item() == pytest.approx(r.square().sum().item(), rel=1e-6)


def test_from_config() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    assert from_config(network, OptimizerConfig()) == ([], [])
    penalties, constraints = from_config(network, OptimizerConfig(max_norm=3, orthogonal=0.5, decay_from="start"))
    assert penalties[0] == Orthogonal(0.5)
    assert constraints == [MaxNorm(3.0)]
    assert penalties[1](network).item() == 0  # it starts where it decays to
    assert set(start_shift(network)) == {"0.weight", "3.weight"}


def test_shifted_weights_do_not_decay_twice() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    groups = scaled_groups(network, OptimizerConfig(decay_from="identity", decay_all=True, weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert [decays[id(w)] for w in unit_weights(network)] == [0, 0]
    assert decays[id(network[1].weight)] == 0.1


def test_per_group_learning_rates() -> None:
    network = nn.Module()
    network.layer2, network.layer3, network.fc = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    recipe = Recipe.of(lr=0.1, lr_scales={"fc": 1.0, "layer3.weight": 0.25, "layer2": 0.0, "*": 0.5}, weight_decay=0.0)
    optimizer = make_optimizer(network, recipe.optimizer)
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert scale[id(network.fc.bias)] == 1.0
    assert scale[id(network.layer3.weight)] == 0.25
    assert scale[id(network.layer3.bias)] == 0.5
    assert id(network.layer2.weight) not in scale  # 0 freezes
    with pytest.raises(ValueError, match="'layer4', which matches no parameter"):
        scaled_groups(network, OptimizerConfig(lr_scales={"layer4": 0.5}))
    with pytest.raises(ValueError, match=r"nothing of the network is left to train: lr_scales=\{'\*': 0.0\}"):
        scaled_groups(network, OptimizerConfig(lr_scales={"*": 0.0}))


def test_penalties_compose_to_their_sum() -> None:
    from unskip.train.penalties import total

    network = nn.Sequential(linear([1.0, 1.0], [0.0, 1.0]))
    two = total([Orthogonal(0.9), ShiftedDecay(2.0, {"0.weight": torch.zeros(2, 2)})], network)
    assert two is not None
    assert two.item() == pytest.approx(1.0 + 3.0)
    assert total([], network) is None
    assert math.isclose(Orthogonal(0.0)(network).item(), 0.0)


def test_a_run_of_a_plain_network_under_decay_from_identity_is_the_residual_networks(tmp_path: Path) -> None:
    """Yu and Tomasi 2019, 4.1, through a recipe: biases decay in the optimizer, weights in the penalty."""
    data = write_npz(tmp_path / "bright.npz")
    residual = simplified_net(5, residual=True, num_classes=4).double()
    plain = to_plain(residual)
    parted = to_plain(residual)
    zero = Recipe.of(dataset="npz", precision="fp64", epochs=3, batch=12, lr=0.05, weight_decay=0.01, decay_all=True)
    for name, net, recipe in (
        ("residual", residual, zero), ("plain", plain, zero.replace(decay_from="identity")), ("parted", parted, zero),
    ):  # fmt: skip
        run(recipe.replace(device="cpu"), model=net, data_dir=data, out=tmp_path / name, silent=True)

    def apart(net: nn.Module) -> float:
        weights = zip(to_plain(residual).parameters(), net.parameters(), strict=True)
        return max((p - q).abs().max().item() for p, q in weights)

    assert apart(plain) < 1e-12
    assert apart(parted) > 1e-4


def test_identity_shift_of_dominant_paths() -> None:
    """A kernel without an identity decays from 0, also where the general rule would see one."""
    net = dominant_paths(simplified_net(5, residual=False), lower="dense")
    shift = identity_shift(net)
    assert shift["layer2.0.conv.weight"].sum() == 16
    assert shift["layer2.0.lower.weight"].sum() == 0
    assert shift["conv1.weight"].sum() == 0
    assert dominant_paths(simplified_net(5, residual=False)).layer2[0].rho().sum() == 32
