"""The backbones of Zhang et al. 2024, each with its skip-free names. The name of the function is the public id."""

from collections.abc import Callable
from typing import Any

import timm
from torch import nn

from unskip.models.cifar import HE, cifar_resnet, wide_resnet
from unskip.models.registry import RIVALS, SKIP_FREE, Build, backbone

ALL = (*SKIP_FREE, *RIVALS)

default_cfgs: dict[str, dict[str, Any]] = {}

CIFAR: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "num_classes": 10,
    "first_conv": "conv1",
    "classifier": "fc",
    "feature_cfg": {"out_indices": (0, 1, 2)},
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2470, 0.2435, 0.2616),
}
IMAGENET: dict[str, Any] = {"input_size": (3, 224, 224), "num_classes": 1000}
RESNET: dict[str, Any] = {**IMAGENET, "family": "resnet", "first_conv": "conv1", "classifier": "fc"}


OPTIONS = ("widths", "stem", "head_norm", "shortcut")  # of the CIFAR networks, beside timm's
# At He's widths the first half of the channels, as they are, measured better than averages of pairs (docs/results.md).
PRESETS: dict[str, dict[str, Any]] = {"pnnh": {"pretext": "identity"}}
# The wide PNNH networks: three times He's widths, of which the coder carries half as they are (C_B = C/2), so that the
# path is 1.5 times as wide as his; what is not carried goes through the centre tap alone. 0.536 to 0.547 of his
# parameters, with these widths of their learners (docs/results.md).
WIDTHS = tuple(3 * width for width in HE)
WIDE: dict[str, Any] = {
    "pretext": "identity", "uncarried": "1x1", "hidden": dict(zip(WIDTHS, (8, 12, 19), strict=True)),
}  # fmt: skip


def cifar(methods: tuple[str, ...] = SKIP_FREE, paper: dict[str, float] | None = None) -> Callable[[Build], Build]:
    """Decorator: He's network of a depth, its skip-free names, and PNNH at He's and at three times his widths."""

    def register(fn: Build) -> Build:
        name = fn.__name__
        about: dict[str, Any] = {"family": "cifar_resnet", "options": OPTIONS, **CIFAR}
        backbone(residual=True, methods=methods, paper=paper, presets=PRESETS, **about)(fn)

        def wide(**kwargs: Any) -> nn.Module:
            return fn(**{"widths": WIDTHS, **kwargs})

        backbone(methods=("pnnh",), name=f"{name}_wide", presets={"pnnh": WIDE}, **about)(wide)
        return fn

    return register


@cifar(methods=ALL)
def resnet20(**kwargs: Any) -> nn.Module:
    return cifar_resnet(20, **kwargs)


@cifar()
def resnet32(**kwargs: Any) -> nn.Module:
    return cifar_resnet(32, **kwargs)


@cifar()
def resnet44(**kwargs: Any) -> nn.Module:
    return cifar_resnet(44, **kwargs)


@cifar(methods=ALL)
def resnet56(**kwargs: Any) -> nn.Module:
    return cifar_resnet(56, **kwargs)


@cifar(methods=ALL, paper={"residual": 1.7, "plain": 1.7, "pnnh": 0.88})
def resnet110(**kwargs: Any) -> nn.Module:
    return cifar_resnet(110, **kwargs)


@backbone(family="wrn", residual=True, **CIFAR)
def wrn16_8(**kwargs: Any) -> nn.Module:
    return wide_resnet(16, 8, **kwargs)


@backbone(family="wrn", methods=("dirac",), paper={"dirac": 9.1}, **CIFAR)
def wrn28_5(**kwargs: Any) -> nn.Module:
    return wide_resnet(28, 5, **kwargs)


@backbone(
    family="wrn",
    residual=True,
    methods=(*SKIP_FREE, "dirac"),
    paper={"residual": 36.5, "pnnh": 18.3, "dirac": 36.5},
    **CIFAR,
)
def wrn28_10(**kwargs: Any) -> nn.Module:
    return wide_resnet(28, 10, **kwargs)


@backbone(family="wrn", residual=True, **CIFAR)
def wrn40_4(**kwargs: Any) -> nn.Module:
    return wide_resnet(40, 4, **kwargs)


@backbone(methods=ALL, paper={"pnnh": 6.4}, **RESNET)
def resnet18(**kwargs: Any) -> nn.Module:
    return timm.create_model("resnet18", **kwargs)


@backbone(methods=(*SKIP_FREE, "dirac", "iso"), paper={"plain": 21.4, "pnnh": 11.4, "dirac": 21.6}, **RESNET)
def resnet34(**kwargs: Any) -> nn.Module:
    return timm.create_model("resnet34", **kwargs)


@backbone(methods=(*SKIP_FREE, "dirac", "iso"), paper={"plain": 22.8, "pnnh": 15.4}, **RESNET)
def resnet50(**kwargs: Any) -> nn.Module:
    return timm.create_model("resnet50", **kwargs)


@backbone(paper={"pnnh": 23.6}, **RESNET)
def resnet101(**kwargs: Any) -> nn.Module:
    return timm.create_model("resnet101", **kwargs)


@backbone(
    family="mobilenetv2",
    paper={"pnnh": 3.1},
    first_conv="conv_stem",
    classifier="classifier",
    feature_cfg={"feature_cls": "getter"},
    **IMAGENET,
)
def mobilenetv2(**kwargs: Any) -> nn.Module:
    return timm.create_model("mobilenetv2_100", **kwargs)


@backbone(
    family="swin",
    paper={"pnnh": 27.3},
    first_conv="patch_embed.proj",
    classifier="head.fc",
    feature_cfg={"flatten_sequential": True, "out_indices": (0, 1, 2, 3)},
    **IMAGENET,
)
def swin_tiny(**kwargs: Any) -> nn.Module:
    return timm.create_model("swin_tiny_patch4_window7_224", **kwargs)


@backbone(
    family="vit",
    first_conv="patch_embed.proj",
    classifier="head",
    feature_cfg={"feature_cls": "getter", "out_indices": 3},
    **IMAGENET,
)
def vit_tiny(**kwargs: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **kwargs)
