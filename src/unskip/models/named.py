"""The backbones of Zhang et al. 2024, each with its skip-free names."""

from functools import partial
from typing import Any

import timm

from unskip.models.cifar import HE_WIDTHS, cifar_resnet, wide_resnet
from unskip.models.registry import RIVALS, SKIP_FREE, register_backbone, register_network

CIFAR: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "pool_size": (8, 8),
    "num_classes": 10,
    "first_conv": "conv1",
    "classifier": "fc",
    "feature_cfg": {"out_indices": (0, 1, 2)},
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2470, 0.2435, 0.2616),
}
IMAGENET: dict[str, Any] = {"input_size": (3, 224, 224), "pool_size": (7, 7), "num_classes": 1000}
RESNET: dict[str, Any] = {**IMAGENET, "family": "resnet", "first_conv": "conv1", "classifier": "fc"}
CIFAR_RESNET = {**CIFAR, "family": "cifar_resnet", "options": ("widths", "stem", "head_norm", "shortcut")}
ALL = (*SKIP_FREE, *RIVALS)

# At He's widths the first half of the channels, as they are, measured better than averages of pairs (docs/results.md).
PRESETS = {"pnnh": {"pretext": "identity"}}
# The wide PNNH networks: three times He's widths, of which the coder carries half as they are (C_B = C/2), so that the
# path is 1.5 times as wide as his; what is not carried goes through the centre tap alone. 0.536 to 0.547 of his
# parameters, with these widths of their learners (docs/results.md).
WIDTHS = tuple(3 * width for width in HE_WIDTHS)
LEARNERS = dict(zip(WIDTHS, (8, 12, 19), strict=True))
WIDE_PRESETS = {"pnnh": {"pretext": "identity", "uncarried": "1x1", "hidden": LEARNERS}}

for depth in (20, 32, 44, 56, 110):
    register_backbone(
        f"resnet{depth}",
        partial(cifar_resnet, depth),
        residual=True,
        methods=ALL if depth in (20, 56, 110) else SKIP_FREE,
        paper={"residual": 1.7, "plain": 1.7, "pnnh": 0.88} if depth == 110 else None,
        presets=PRESETS,
        **CIFAR_RESNET,
    )
    wide = partial(cifar_resnet, depth, widths=WIDTHS)
    register_backbone(f"resnet{depth}_wide", wide, methods=("pnnh",), presets=WIDE_PRESETS, **CIFAR_RESNET)

WRN: dict[str, Any] = {**CIFAR, "family": "wrn"}
register_backbone("wrn16_8", partial(wide_resnet, 16, 8), residual=True, **WRN)
register_backbone("wrn28_5", partial(wide_resnet, 28, 5), methods=("dirac",), paper={"dirac": 9.1}, **WRN)
PAPER_WRN28_10 = {"residual": 36.5, "pnnh": 18.3, "dirac": 36.5}
register_backbone(
    "wrn28_10", partial(wide_resnet, 28, 10), residual=True, methods=(*SKIP_FREE, "dirac"), paper=PAPER_WRN28_10, **WRN
)
register_backbone("wrn40_4", partial(wide_resnet, 40, 4), residual=True, **WRN)

for name, methods, paper in (
    ("resnet18", ALL, {"pnnh": 6.4}),
    ("resnet34", (*SKIP_FREE, "dirac", "iso"), {"plain": 21.4, "pnnh": 11.4, "dirac": 21.6}),
    ("resnet50", (*SKIP_FREE, "dirac", "iso"), {"plain": 22.8, "pnnh": 15.4}),
    ("resnet101", SKIP_FREE, {"pnnh": 23.6}),
):
    register_backbone(name, partial(timm.create_model, name), methods=methods, paper=paper, **RESNET)

register_backbone(
    "mobilenetv2",
    partial(timm.create_model, "mobilenetv2_100"),
    family="mobilenetv2",
    paper={"pnnh": 3.1},
    first_conv="conv_stem",
    classifier="classifier",
    feature_cfg={"feature_cls": "getter"},
    **IMAGENET,
)
SWIN: dict[str, Any] = {
    **IMAGENET,
    "family": "swin",
    "first_conv": "patch_embed.proj",
    "fixed_input_size": True,
    "classifier": "head.fc",
    "feature_cfg": {"flatten_sequential": True, "out_indices": (0, 1, 2, 3)},
}
VIT: dict[str, Any] = {
    **IMAGENET,
    "family": "vit",
    "first_conv": "patch_embed.proj",
    "fixed_input_size": True,
    "classifier": "head",
    "feature_cfg": {"feature_cls": "getter", "out_indices": 3},
}
# `pnnh_` keeps the skips of attention, as Zhang et al. do; `shaped_` has none: PNNH with shaped attention.
for name, source, paper, about in (
    ("swin_tiny", "swin_tiny_patch4_window7_224", {"pnnh": 27.3}, SWIN),
    ("vit_tiny", "vit_tiny_patch16_224", {}, VIT),
    ("vit_small", "vit_small_patch16_224", {}, VIT),
):
    builder = partial(timm.create_model, source)
    register_backbone(name, builder, paper=paper, **about)
    register_network(f"shaped_{name}", builder, method="pnnh", presets={"attention": "shaped"}, **about)
