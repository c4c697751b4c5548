"""Every method on every kind of network: it trains a step, or it is refused with a whole sentence."""

import re
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import unskip
from unskip.methods import method_names
from unskip.models.cifar import cifar_resnet, wide_resnet
from unskip.train import Recipe, TrainingDiverged, run

SIDE = 32


def swin() -> nn.Module:
    widths = {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2), "window_size": 4}
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=SIDE, num_classes=10, **widths)


def vit() -> nn.Module:
    widths = {"embed_dim": 48, "depth": 3, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", img_size=SIDE, num_classes=10, **widths)


NETWORKS = {
    "resnet": lambda: cifar_resnet(8),
    "resnet, projections": lambda: cifar_resnet(8, shortcut="B"),
    "mobilenet": lambda: timm.create_model("mobilenetv2_035", num_classes=10),
    "wrn": lambda: wide_resnet(10, 1),
    "vit": vit,
    "swin": swin,
}
TAKE_ALL = {"dirac", "plain", "pnnh", "pnnh_paper", "residual_half"}
REASONS = {
    ("delta_tanh", "vit"): "it is an MLP of linear layers",
    ("delta_tanh", "swin"): "it is an MLP of linear layers",
    ("iso", "vit"): "it is an MLP of linear layers",
    ("iso", "swin"): "it is an MLP of linear layers",
    ("rm", "vit"): "its forward takes more than its input",
    ("looks_linear", "mobilenet"): "groups can't subtract the two halves of a CReLU",
}
LONG = {("pnnh_paper", "mobilenet"), ("pnnh_paper", "swin")}  # they fit a coder for each width
PAIRS = [
    pytest.param(method, kind, marks=[pytest.mark.full] if (method, kind) in LONG else [])
    for method in method_names()
    for kind in NETWORKS
]


def step(network: nn.Module, side: int = SIDE) -> bool:
    """One update by SGD; whether the loss, all gradients, and the loss after it are finite."""
    network.train()
    x, y = torch.randn(8, 3, side, side), torch.arange(8)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    loss = F.cross_entropy(network(x), y)
    loss.backward()
    assert all(p.grad is not None for p in network.parameters())
    optimizer.step()
    numbers = [loss, F.cross_entropy(network(x), y), *[p.grad for p in network.parameters()]]
    return all(bool(torch.isfinite(number).all()) for number in numbers)


@pytest.mark.parametrize(("method", "kind"), PAIRS)
def test_it_trains_a_step_or_is_refused_with_a_sentence(method: str, kind: str) -> None:
    refusal = ""
    try:
        network = unskip.plainify(NETWORKS[kind]().eval(), method)  # which an exact method asks for
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert method not in TAKE_ALL
        sentence = rf"plainify: method '{method}' can't make block '\S+' of \w+ skip-free: .{{20,}}\. strict=False .*\."
        assert re.fullmatch(sentence, refusal)
        assert REASONS.get((method, kind), "") in refusal
        return
    assert (method, kind) not in REASONS
    assert network.surgery.replaced
    assert not network.surgery.left
    assert step(network)


OVERFLOW = {"plain", "seq", "seq_bottle"}  # 1,004 layers with norms give gradients that no update survives


def resnet1004(**kwargs: object) -> nn.Module:
    return cifar_resnet(1004, **kwargs)


@pytest.mark.full
# rm has absorbed norms, and full_carry is for MLPs.
@pytest.mark.parametrize("method", [name for name in method_names() if name not in ("rm", "full_carry")])
def test_a_thousand_layers_train_a_step_or_stop_with_a_sentence(method: str, tmp_path: Path) -> None:
    if method not in OVERFLOW:
        network = unskip.plainify(resnet1004(), method)
        assert step(network, side=8)
        # docs/rivals.md says so: in `dirac` gradients underflow before they are through the last stage.
        first, last = (max(p.grad.abs().max() for p in network.layer3[i].parameters()) for i in (0, -1))
        assert last > 1e-10
        assert first < 1e-37 if method == "dirac" else first > 1e-10
        return
    network = f"{__name__}:resnet1004"
    recipe = Recipe.of(model=network, method=method, epochs=1, batch=32, log_steps=1, device="cpu")
    with pytest.raises(
        TrainingDiverged, match=rf"the loss is nan at update \d+ .*unskip doctor .*:resnet1004 --method {method}`"
    ):
        run(recipe, out=tmp_path / "run", silent=True)
