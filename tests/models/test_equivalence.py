"""T and its inverse on weights and on optimizers, in float64, on real images."""

import copy
from collections.abc import Callable

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.models import dominant_paths, to_plain, to_residual
from unskip.models.simplified import simplified_blocks, simplified_net
from unskip.train import ShiftedDecay, identity_shift

DECAY = 1e-4


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images).view(-1, 1, 8, 8)
    return (x - x.mean()) / x.std(), torch.tensor(labels)


def resnet(depth: int = 8, init: str = "hmwi") -> nn.Module:
    return simplified_net(depth, residual=True, init=init, in_chans=1).double()


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    steps: range,
    penalty: Callable[[nn.Module], Tensor],
    batch: int = 8,
) -> list[float]:
    """Updates with these numbers; which images are in the batch follows from the number."""
    losses = []
    for step in steps:
        chosen = torch.randint(len(data[0]), (batch,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(net(data[0][chosen]), data[1][chosen])
        optimizer.zero_grad()
        (loss + penalty(net)).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def shifted(net: nn.Module) -> ShiftedDecay:
    return ShiftedDecay(DECAY, identity_shift(net))


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    assert [name for name, _ in a.named_parameters()] == [name for name, _ in b.named_parameters()]
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("depth", [20, 32, 44])
@torch.no_grad()
def test_a_resnet_and_its_image_are_the_same_function(depth: int, digits: tuple[Tensor, Tensor]) -> None:
    """Section 3, with weights of a size that make every part of the kernels matter."""
    r = unskip.create_model(f"simplified_resnet{depth}", in_chans=1).double()
    for p in r.parameters():
        p.add_(torch.randn_like(p), alpha=0.03)
    p = to_plain(r)
    assert p.skip_free
    assert not r.skip_free, "the given network is untouched"
    expected, actual = r(digits[0][:32]), p(digits[0][:32])
    assert expected.std() > 0.1
    assert (actual - expected).abs().max() < 1e-12
    assert (to_residual(p)(digits[0][:32]) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_there_and_back_is_one_rounding(dtype: torch.dtype) -> None:
    """r + 1 is rounded once, by half a unit in the last place of r + 1; what is no ID entry stays as it is."""
    r = unskip.create_model("simplified_resnet20").to(dtype)
    with torch.no_grad():
        for p in r.parameters():
            p.mul_(1 + torch.rand_like(p))  # fills all bits of float64 too
    back = to_residual(to_plain(r))
    for block, returned in zip(simplified_blocks(r), simplified_blocks(back), strict=True):
        there = block.rho() == 1
        assert there.sum() == min(block.conv.weight.shape[:2])
        error = (returned.conv.weight - block.conv.weight).abs()
        assert not error[~there].any()
        assert error.any()
        assert (error[there] <= torch.finfo(dtype).eps / 2 * (block.conv.weight[there] + 1).abs()).all()
    for name in ("conv1.weight", "conv1.bias", "fc.weight", "layer2.0.conv.bias"):
        assert torch.equal(back.get_parameter(name), r.get_parameter(name))


def test_equivalent_networks_train_alike_only_under_the_shifted_decay(digits: tuple[Tensor, Tensor]) -> None:
    """Section 4.1: 50 updates at 0.01, momentum 0.9, the same batches of digits; 20 layers."""
    r = unskip.create_model("simplified_resnet20", in_chans=1).double()
    optimizer_r = torch.optim.SGD(r.parameters(), lr=0.01, momentum=0.9)
    p, optimizer_p = to_plain(r, optimizer_r)
    q, optimizer_q = to_plain(r, optimizer_r)

    losses = train(r, optimizer_r, digits, range(50), shifted(r))
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert not any(shift.any() for shift in identity_shift(r).values()), "a residual network decays from 0"

    losses_p = train(p, optimizer_p, digits, range(50), shifted(p))
    assert losses_p == pytest.approx(losses, abs=1e-10)
    assert largest_difference(to_plain(r), p) < 1e-10

    zero = ShiftedDecay(DECAY, {name: torch.zeros_like(w) for name, w in identity_shift(q).items()})
    train(q, optimizer_q, digits, range(50), zero)
    assert largest_difference(to_plain(r), q) > 1e-5


def make_sgd(params: object, **kwargs: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9, **kwargs)


OPTIMIZERS = {
    "sgd": make_sgd,
    "nesterov": lambda params: make_sgd(params, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("sgd", "adam") else [pytest.mark.full]) for name in OPTIMIZERS]
)
def test_a_run_moves_across_and_back(name: str, digits: tuple[Tensor, Tensor]) -> None:
    """A plain network, trained on in residual form and then as a plain one again, ends where it would have ended."""
    make = OPTIMIZERS[name]
    plain = to_plain(resnet())
    optimizer = make(plain.parameters())
    train(plain, optimizer, digits, range(4), shifted(plain))
    residual, moved = to_residual(plain, optimizer)
    assert not residual.skip_free
    for p, q in zip(plain.parameters(), residual.parameters(), strict=True):
        assert p is not q
        for key, value in optimizer.state[p].items():
            assert torch.equal(torch.as_tensor(moved.state[q][key]), torch.as_tensor(value)), key

    train(residual, moved, digits, range(4, 8), shifted(residual))
    back, optimizer_back = to_plain(residual, moved)
    train(back, optimizer_back, digits, range(8, 12), shifted(back))

    fresh = make(plain.parameters())  # without the state the run would have gone elsewhere
    without = copy.deepcopy((plain, fresh))
    train(plain, optimizer, digits, range(4, 12), shifted(plain))
    assert largest_difference(plain, back) < 1e-10
    train(*without, digits, range(4, 12), shifted(without[0]))
    assert largest_difference(plain, without[0]) > 1e-5


def test_biases_and_the_classifier_may_decay_in_the_optimizer(digits: tuple[Tensor, Tensor]) -> None:
    """T leaves them alone, so their decay is the same in both forms."""
    r = resnet()
    kernels = {f"{path}.conv.weight" for path, m in r.named_modules() if m in set(simplified_blocks(r))}
    groups = [
        {"params": [p for name, p in r.named_parameters() if name in kernels], "weight_decay": 0.0},
        {"params": [p for name, p in r.named_parameters() if name not in kernels], "weight_decay": 0.1},
    ]
    optimizer_r = make_sgd(groups)
    p, optimizer_p = to_plain(r, optimizer_r)
    for net, optimizer in ((r, optimizer_r), (p, optimizer_p)):
        train(net, optimizer, digits, range(5), lambda _: torch.zeros(()))
    assert largest_difference(to_plain(r), p) < 1e-12


@pytest.mark.parametrize("lower", ["diagonal", "dense"])
def test_dominant_paths_have_both_forms_too(lower: str, digits: tuple[Tensor, Tensor]) -> None:
    whole = resnet()
    r = dominant_paths(whole, lower=lower)
    assert largest_difference(dominant_paths(to_plain(whole), lower=lower), to_plain(r)) < 1e-15
    optimizer_r = make_sgd(r.parameters())
    p, optimizer_p = to_plain(r, optimizer_r)
    assert (p(digits[0][:16]) - r(digits[0][:16])).abs().max() < 1e-12
    train(r, optimizer_r, digits, range(5), shifted(r))
    train(p, optimizer_p, digits, range(5), shifted(p))
    assert largest_difference(to_plain(r), p) < 1e-12


def decayed(net: nn.Module, cls: type = torch.optim.SGD) -> torch.optim.Optimizer:
    return cls(net.parameters(), lr=0.1, weight_decay=0.01)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: to_plain(nn.Linear(2, 2)), "to_plain: model=Linear has no block of a simplified network"),
        (lambda r: to_residual(unskip.create_model("resnet20")), "model=CifarResNet has no block"),
        (lambda r: to_residual(r), "to_residual: every block of SimplifiedNet is residual already"),
        (lambda r: to_plain(to_plain(r)), "to_plain: every block of SimplifiedNet is plain already"),
        (lambda r: to_plain(nn.Sequential(r, to_plain(r))), "some blocks of Sequential have a skip and some have none"),
        (
            lambda r: to_plain(r, decayed(r)),
            r"param_groups\[0\] decays weights of blocks towards 0 \(weight_decay=0.01\)",
        ),
        (lambda r: to_plain(r, decayed(r, torch.optim.AdamW)), "decays weights of blocks towards 0"),
        (lambda r: to_plain(r, torch.optim.ASGD(r.parameters())), "optimizer=ASGD is none of those"),
        (lambda r: to_plain(r, make_sgd(resnet().parameters())), "holds parameters that are not the model's"),
    ],
)
def test_what_is_not_exact_is_refused(call: Callable, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(resnet())
