"""The norm before pooling that PNNH puts behind a network's last block."""

import pytest
import timm
import torch
import torchvision
from torch import nn

import unskip
from unskip.methods.pnnh import PNNHBlock


def places(model: nn.Module) -> list[str]:
    return [path for path, m in model.named_modules() if isinstance(m, PNNHBlock) and m.head_norm is not None]


def small(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet18", channels=(8, 8, 16, 16), num_classes=5, **options)


def with_statistics(model: nn.Module) -> nn.Module:
    """Norms as after training: none of them the identity."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.running_mean)
            nn.init.uniform_(m.running_var, 0.5, 2)
            nn.init.uniform_(m.weight, 0.5, 2)
            nn.init.normal_(m.bias)
    return model.eval()


@pytest.mark.parametrize(
    ("model", "place"),
    [
        (small, "layer4.1"),
        (lambda: torchvision.models.resnet18(num_classes=3), "layer4.1"),
        (lambda: timm.create_model("resnet26d", channels=(8, 8, 16, 16)), "layer4.1"),
    ],
    ids=["timm", "torchvision", "bottlenecks"],
)
def test_the_last_block_alone_has_it(model: object, place: str) -> None:
    assert places(unskip.plainify(model(), "pnnh")) == [place]  # type: ignore[operator]


@pytest.mark.parametrize("name", ["mobilenetv2_100", "vit_tiny_patch16_224"])
def test_a_norm_that_follows_the_last_block_is_enough(name: str) -> None:
    assert places(unskip.plainify(timm.create_model(name), "pnnh")) == []


def test_it_normalises_what_the_classifier_reads() -> None:
    model = unskip.plainify(small(), "pnnh").train()
    y = model.forward_features(torch.randn(16, 3, 64, 64) * 100)
    assert y.mean((0, 2, 3)).abs().max() < 1e-5
    assert y.var((0, 2, 3), unbiased=False).sub(1).abs().max() < 1e-3


@pytest.mark.parametrize("form", ["dense", "fast"])
def test_it_folds_into_the_classifier(form: str) -> None:
    model = with_statistics(unskip.plainify(small(), "pnnh")).double()
    folded = unskip.fold(model, form)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert torch.allclose(folded(x), model(x), rtol=1e-10, atol=1e-10)


def test_weights_from_before_name_the_option() -> None:
    new, old = (unskip.plainify(small(), "pnnh", head_norm=wanted) for wanted in (None, False))
    with pytest.raises(RuntimeError, match=r"layer4.1.head_norm, a norm before pooling: build .* with head_norm=False"):
        new.load_state_dict(old.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*layer4.1.head_norm.weight"):
        old.load_state_dict(new.state_dict())
    new.load_state_dict(old.state_dict(), strict=False)  # a fresh norm changes nothing in eval mode
    x = torch.randn(2, 3, 64, 64)
    assert torch.allclose(new.eval()(x), old.eval()(x), rtol=1e-4, atol=1e-5)


def test_a_network_without_convolutions_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"pnnh: head_norm=True, but the last block of VisionTransformer has no conv"):
        unskip.plainify(timm.create_model("vit_tiny_patch16_224", depth=2), "pnnh", head_norm=True)


def test_the_paper_and_the_upper_bound_have_none() -> None:
    assert places(unskip.plainify(small(), "pnnh_paper")) == []
    half = unskip.plainify(small(), "residual_half")
    assert sum(isinstance(m, nn.BatchNorm2d) for m in half.modules()) == 1 + 8 + 4  # stem, learners, projections
