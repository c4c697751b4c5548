"""Readers of transformer blocks: the MLP of timm's ViT and Swin. As in the paper, attention keeps its own skip."""

from typing import Any

import timm.models.swin_transformer as swin
import timm.models.vision_transformer as vit
from timm.layers import Mlp
from torch import Tensor, nn

from unskip.methods.spec import BlockSpec, Unsupported, parts
from unskip.surgery.reading import register_reader


class SkipFreeMlpViTBlock(vit.Block):
    """timm's ViT block, its MLP without a skip: `mlp` holds the norm and everything after it."""

    skip_free = True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), *args, **kwargs)))
        return self.mlp(x)


class SkipFreeMlpSwinBlock(swin.SwinTransformerBlock):
    """timm's Swin block, its MLP without a skip: `mlp` holds the norm and everything after it."""

    skip_free = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self._attn(self.norm1(x)))  # (B, H, W, C)
        return self.mlp(x)


SKIP_FREE: dict[type[nn.Module], type[nn.Module]] = {
    vit.Block: SkipFreeMlpViTBlock,
    swin.SwinTransformerBlock: SkipFreeMlpSwinBlock,
}


def write_mlp(block: nn.Module, skip_free: nn.Module) -> nn.Module:
    """The same block with the skip-free module as its MLP; norm, layer scale and stochastic depth are inside it now."""
    for name in ("norm2", "ls2", "drop_path2"):
        if hasattr(block, name):
            delattr(block, name)
    block.mlp = skip_free
    block.__class__ = SKIP_FREE[type(block)]
    return block


@register_reader(*SKIP_FREE, write=write_mlp)
def read_timm_mlp(block: nn.Module, path: str) -> BlockSpec:
    if type(block.mlp) is not Mlp:
        raise Unsupported(f"its MLP of class {type(block.mlp).__name__} is not two linear layers in a row")
    branch = (*parts(block.mlp, "fc1 act drop1 norm fc2 drop2"), *parts(block, "ls2 drop_path2"))
    return BlockSpec(path=path, pre=parts(block, "norm2"), branch=branch, kept=("attention",))
