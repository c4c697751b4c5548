"""Readers of transformer blocks: timm's ViT (DeiT-3 too) and Swin, torchvision's ViT.

Each block has two skips, around attention and around the MLP. The MLP is the branch of the BlockSpec; attention is read
beside it, and keeps its skip unless `plainify` is told how to do without (`attention=`). LayerScale is no part of a
skip-free block: it starts a residual branch near zero, and nothing else would be left.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import timm.models.swin_transformer as swin
import timm.models.vision_transformer as vit
import torch
import torchvision.models.vision_transformer as tv
from timm.layers import Attention, LayerScale, Mlp
from torch import Tensor, nn

from unskip._core.layers import layer_with
from unskip.methods.attention import AttentionSpec
from unskip.methods.spec import BlockSpec, Unsupported, describe, parts
from unskip.surgery.reading import register_reader


class SkipFreeBlock(nn.Module):
    """A transformer block without a skip: norm and attention in a row, then `mlp`, which holds its own norm.

    With `attention_skip` attention keeps its own: that is how a block stands where only its MLP was changed.
    """

    skip_free = True
    attention_skip = True
    mlp: Any

    def join(self, x: Tensor, attended: Tensor, *scales: nn.Module) -> Tensor:
        """The output of attention, or x plus that output after `scales` where attention keeps its skip."""
        if not self.attention_skip:
            return attended
        for scale in scales:
            attended = scale(attended)
        return x + attended


class SkipFreeViTBlock(SkipFreeBlock, vit.Block):
    """timm's ViT block."""

    attn: Any
    norm1: Any
    ls1: Any
    drop_path1: Any

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if not self.attention_skip:
            if is_causal is True:  # a symbolic trace (torch.fx) has no truth value
                attn_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            return self.mlp(self.attn(self.norm1(x), attn_mask))
        given = {} if is_causal is False else {"is_causal": is_causal}  # older versions of timm do not know it
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, **given)
        return self.mlp(self.join(x, attended, self.ls1, self.drop_path1))


class SkipFreeSwinBlock(SkipFreeBlock, swin.SwinTransformerBlock):
    """timm's Swin block."""

    norm1: Any
    drop_path1: Any

    def forward(self, x: Tensor) -> Tensor:
        attended = self._attn(self.norm1(x))  # (B, H, W, C)
        return self.mlp(self.join(x, attended, *([self.drop_path1] if self.attention_skip else [])))


class SkipFreeEncoderBlock(SkipFreeBlock, tv.EncoderBlock):
    """torchvision's ViT block."""

    self_attention: Any
    ln_1: Any
    dropout: Any

    def forward(self, input: Tensor) -> Tensor:
        x = self.ln_1(input)
        if not self.attention_skip:
            return self.mlp(self.self_attention(x))
        return self.mlp(self.join(input, self.self_attention(x, x, x, need_weights=False)[0], self.dropout))


class WindowedAttention(nn.Module):
    """Attention within windows (Swin). The masks of shifted windows are repeated for each image of a batch."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:  # (windows, T, T)
            mask = mask[:, None].repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        return self.attention(x, mask)


class RelativePositions(nn.Module):
    """Swin's bias of relative positions, (1, heads, T, T)."""

    index: Tensor

    def __init__(self, attention: swin.WindowAttention) -> None:
        super().__init__()
        self.tokens = attention.window_area
        self.table = attention.relative_position_bias_table
        index: Any = attention.relative_position_index
        self.register_buffer("index", index.flatten())

    def forward(self) -> Tensor:
        table: Tensor = self.table[self.index]
        return table.unflatten(0, (self.tokens, self.tokens)).permute(2, 0, 1)[None]


def write_block(skip_free: type[SkipFreeBlock], gone: str, block: nn.Module, mlp: nn.Module) -> nn.Module:
    """The block with a skip-free module as its MLP, which now holds the modules named in `gone`."""
    for name in gone.split():
        if hasattr(block, name):
            delattr(block, name)
    block.mlp = mlp
    block.__class__ = skip_free
    return block


def write_attention(name: str, gone: str, block: nn.Module, attention: nn.Module) -> None:
    """Puts attention without a skip under this name, and removes `gone`: layer scale and stochastic depth."""
    for part in gone.split():
        if hasattr(block, part):
            delattr(block, part)
    setattr(block, name, attention)
    block.attention_skip = False  # type: ignore[assignment]


def linear_parts(layer: nn.Linear, *sizes: int) -> list[nn.Linear]:
    """The layer cut into one layer for each of its outputs, of these sizes."""
    biases = [None] * len(sizes) if layer.bias is None else layer.bias.split(sizes)
    return [layer_with(w, b) for w, b in zip(layer.weight.split(sizes), biases, strict=True)]  # type: ignore[misc]


def without_scale(modules: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """The modules but for LayerScale."""
    return tuple(module for module in modules if not isinstance(module, LayerScale))


def read_timm_attention(attention: nn.Module, write: Callable[[nn.Module, nn.Module], None]) -> AttentionSpec:
    """The parts of timm's Attention or WindowAttention."""
    windowed = isinstance(attention, swin.WindowAttention)
    if not windowed and type(attention) is not Attention:
        raise Unsupported(f"no reader knows its attention class, {describe(attention)}")
    scale = getattr(attention, "norm", None)
    if getattr(attention, "gate", None) is not None or not isinstance(scale, nn.Identity | None):
        raise Unsupported("its attention has a gate, or a norm of its output, which no method of ours has")
    third = attention.qkv.out_features // 3  # type: ignore[union-attr, operator]
    q, k, v = linear_parts(attention.qkv, third, third, third)  # type: ignore[arg-type]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return AttentionSpec(
        q=q, k=k, v=v, o=attention.proj, heads=attention.num_heads, write=write,  # type: ignore[arg-type]
        q_norm=norms[0], k_norm=norms[1],
        bias=RelativePositions(attention) if isinstance(attention, swin.WindowAttention) else None,
        drop=attention.attn_drop.p, out_drop=attention.proj_drop.p,  # type: ignore[union-attr, arg-type]
    )  # fmt: skip


VIT = partial(write_block, SkipFreeViTBlock, "norm2 ls2 drop_path2")
SWIN = partial(write_block, SkipFreeSwinBlock, "norm2 drop_path2")
ENCODER = partial(write_block, SkipFreeEncoderBlock, "ln_2")


@register_reader(vit.Block, write=VIT)
def read_vit(block: nn.Module, path: str) -> BlockSpec:
    return _read_timm(block, path, write_attention)


@register_reader(swin.SwinTransformerBlock, write=SWIN)
def read_swin(block: nn.Module, path: str) -> BlockSpec:
    def write(name: str, gone: str, block: nn.Module, attention: nn.Module) -> None:
        write_attention(name, gone, block, WindowedAttention(attention))

    return _read_timm(block, path, write)


def _read_timm(block: nn.Module, path: str, write: Callable[[str, str, nn.Module, nn.Module], None]) -> BlockSpec:
    if type(block.mlp) is not Mlp:
        raise Unsupported(f"its MLP of class {type(block.mlp).__name__} is not two linear layers in a row")
    branch = (*parts(block.mlp, "fc1 act drop1 norm fc2 drop2"), *without_scale(parts(block, "ls2 drop_path2")))
    put = partial(write, "attn", "ls1 drop_path1")
    return BlockSpec(
        path=path,
        pre=parts(block, "norm2"),
        branch=branch,
        kept=("attention",),
        attention=partial(read_timm_attention, block.attn, put),  # type: ignore[arg-type]
    )


@register_reader(tv.EncoderBlock, write=ENCODER)
def read_encoder_block(block: nn.Module, path: str) -> BlockSpec:
    return BlockSpec(
        path=path,
        pre=parts(block, "ln_2"),
        branch=tuple(block.mlp),  # type: ignore[arg-type]
        kept=("attention",),
        attention=partial(read_multihead, block),
    )


def read_multihead(block: nn.Module) -> AttentionSpec:
    """The parts of the PyTorch attention in torchvision's block."""
    old: Any = block.self_attention
    size = old.embed_dim
    q, k, v = linear_parts(layer_with(old.in_proj_weight, old.in_proj_bias), size, size, size)  # type: ignore[arg-type]
    return AttentionSpec(
        q=q, k=k, v=v, o=old.out_proj, heads=old.num_heads, drop=old.dropout,
        out_drop=block.dropout.p,  # type: ignore[union-attr, arg-type]
        write=partial(write_attention, "self_attention", "dropout"),
    )  # fmt: skip
