"""He's CIFAR networks and the wide ones, against the figures their papers print."""

import pytest
import torch
from torch import nn

import unskip
from unskip.models.cifar import cifar_resnet, wide_resnet


@pytest.mark.parametrize(
    ("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)], ids=lambda v: str(v)
)
def test_he_parameters(depth: int, millions: float) -> None:
    """He et al. 2016, Table 6."""
    parameters = sum(p.numel() for p in cifar_resnet(depth).parameters())
    assert parameters / 1e6 == pytest.approx(millions, abs=0.03 if depth == 110 else 0.005)


@pytest.mark.parametrize(("depth", "width", "millions"), [(40, 4, 8.9), (16, 8, 11.0), (28, 10, 36.5)])
def test_wide_parameters(depth: int, width: int, millions: float) -> None:
    """Zagoruyko & Komodakis 2016, Table 4 and 5."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in wide_resnet(depth, width).parameters())
    assert parameters / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("depth", [20, 56])
def test_depth_is_the_number_of_layers(depth: int) -> None:
    weights = [m for m in cifar_resnet(depth).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(weights) == depth


@torch.no_grad()
def test_option_a_and_b() -> None:
    a, b = cifar_resnet(8, shortcut="A"), cifar_resnet(8, shortcut="B")
    x = torch.randn(2, 16, 8, 8)
    shortcut = a.layer2[0].shortcut(x)
    assert torch.equal(shortcut[:, :16], x[:, :, ::2, ::2])
    assert not shortcut[:, 16:].any()
    assert sum(p.numel() for p in b.parameters()) > sum(p.numel() for p in a.parameters())
    assert unskip.create_model("resnet20", shortcut="B")(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: cifar_resnet(21), r"depth=21 must be 6n \+ 2"),
        (lambda: wide_resnet(30, 2), r"depth=30 must be 6n \+ 4"),
        (lambda: cifar_resnet(8, shortcut="C"), "shortcut='C'"),
        (lambda: cifar_resnet(8, num_classes=-1), "num_classes=-1 must be a whole number of at least 0"),
        (lambda: cifar_resnet(8, in_chans=0), "in_chans=0 must be a whole number of at least 1"),
        (lambda: cifar_resnet(8, stem=0), "stem=0 must be a whole number of at least 1"),
        (
            lambda: cifar_resnet(8, drop_path_rate=1.0),
            r"drop_path_rate=1.0 must be a probability, at least 0 and below",
        ),
        (
            lambda: unskip.create_model("pnnh_resnet111"),
            "no network named 'pnnh_resnet111'. Did you mean 'pnnh_resnet11?0",
        ),
        (lambda: unskip.create_model("pnnh_resnet20", ratoi=0.3), r"has no argument 'ratoi'. Did you mean 'ratio'\?"),
        (lambda: unskip.create_model("plain_resnet18", ratio=0.3), "'plain_resnet18' has no argument 'ratio'"),
        (lambda: unskip.create_model("pnnh_resnet20", zz=1), r"Known: (?!.*head_norm.*head_norm).*head_norm"),
        (lambda: unskip.create_model(110), "name=110 must be text"),
        (lambda: unskip.create_model("pnnh_resnet20", pretext="nothing"), "pretext='nothing' is not known"),
    ],
)
def test_wrong_arguments(build: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()


@torch.no_grad()
def test_wide_blocks_are_pre_activation() -> None:
    block = wide_resnet(16, 1).layer1[1].eval()
    x = torch.randn(2, 16, 4, 4)
    branch = block.conv2(block.bn2(block.conv1(block.bn1(x).relu())).relu())
    torch.testing.assert_close(block(x), x + branch)


def test_timms_regularisers_and_checkpointing() -> None:
    network = unskip.create_model("pnnh_resnet20", drop_path_rate=0.2, drop_rate=0.1)
    assert network.layer3[2].drop_path.drop_prob == pytest.approx(0.2)
    residual = unskip.create_model("wrn16_8", drop_path_rate=0.2).eval()
    assert residual.layer3[1].drop_path.drop_prob == pytest.approx(0.2)
    torch.manual_seed(0)
    plain = unskip.create_model("pnnh_resnet20").train()
    x = torch.randn(4, 3, 16, 16)
    plain(x).sum().backward()
    expected = plain.conv1.weight.grad.clone()
    plain.zero_grad()
    plain.set_grad_checkpointing()
    plain(x).sum().backward()
    torch.testing.assert_close(plain.conv1.weight.grad, expected, rtol=1e-3, atol=1e-4)
