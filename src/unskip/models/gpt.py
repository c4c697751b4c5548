"""A small GPT (Radford et al. 2019): a decoder that predicts the next character or byte of a text.

Pre-LN blocks, learnt positions, GELU, no tying of embedding and head. Weights start as GPT-2's do, N(0, 0.02²), and
those that write to the residual stream are divided by √(2 depth).
"""

import math
from functools import partial
from typing import Any

import torch
from timm.layers import Mlp
from timm.models import checkpoint_seq
from torch import Tensor, nn

from unskip.methods.attention import AttentionSpec, SelfAttention
from unskip.methods.spec import BlockSpec, factory, parts
from unskip.models.registry import register_backbone
from unskip.models.staged import check_count
from unskip.surgery import register_reader
from unskip.surgery.readers.transformer import SkipFreeBlock, write_attention, write_block

HEAD = 64  # channels of a head unless heads are given


class GPTBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    mlp: Any

    def __init__(self, width: int, heads: int, mlp_ratio: float, drop: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        q, k, v, o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.attn = SelfAttention(
            AttentionSpec(
                q=q, k=k, v=v, o=o, heads=heads, causal=True, drop=drop, out_drop=drop, write=_write_attention
            )
        )
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, round(mlp_ratio * width), drop=drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SkipFreeGPTBlock(SkipFreeBlock, GPTBlock):
    """mlp(attention(norm(x))); `mlp` holds its own norm."""

    mlp: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.join(x, self.attn(self.norm1(x))))


_write_attention = partial(write_attention, "attn", "")


@register_reader(GPTBlock, write=partial(write_block, SkipFreeGPTBlock, "norm2"))
def read_gpt_block(block: nn.Module, path: str) -> BlockSpec:
    attention: Any = block.attn

    def read() -> AttentionSpec:
        layers = {name: getattr(attention, name) for name in "qkvo"}
        return AttentionSpec(
            **layers, heads=attention.heads, causal=True, drop=attention.drop, out_drop=attention.out_drop.p,
            write=_write_attention,
        )  # fmt: skip

    branch = parts(block.mlp, "fc1 act drop1 fc2 drop2")  # type: ignore[arg-type]
    return BlockSpec(path=path, pre=parts(block, "norm2"), branch=branch, kept=("attention",), attention=read)


class GPT(nn.Module):
    """Token numbers (B, T) to logits of the next token, (B, T, vocabulary)."""

    grad_checkpointing = False

    def __init__(
        self,
        *,
        num_classes: int = 256,  # size of the vocabulary
        in_chans: int = 1,  # of images, which it does not read
        context: int = 256,  # the longest text, T
        width: int = 384,
        depth: int = 24,
        heads: int | None = None,  # as many as give each 64 channels, and one at least
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        for field, value in (("context", context), ("width", width), ("depth", depth), ("heads", heads)):
            if value is not None:
                check_count("gpt", field, value)
        heads = heads or max(1, width // HEAD)
        if width % heads:
            raise ValueError(f"gpt: width={width} can't be shared by heads={heads}; choose a multiple, or say heads.")
        self.num_classes, self.context, self.num_features = num_classes, context, width
        self.embed = nn.Embedding(num_classes, width)
        self.pos_embed = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*[GPTBlock(width, heads, mlp_ratio, drop_rate) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.reset_classifier(num_classes)
        nn.init.normal_(self.pos_embed, std=0.02)
        for path, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                last = path.endswith((".attn.o", ".mlp.fc2"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * depth) if last else 0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "embed.weight"}

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head: nn.Module = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes, bias=False, **factory(self.embed))
            nn.init.normal_(self.head.weight, std=0.02)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def forward_features(self, ids: Tensor) -> Tensor:
        if isinstance(ids, Tensor) and ids.shape[1] > self.context:  # a symbolic trace (torch.fx) has no sizes
            raise ValueError(
                f"GPT: a text of {ids.shape[1]} tokens came, and the network was built for context={self.context}; "
                "give a part of it, or build the network with a longer context."
            )
        x = self.embed(ids) + self.pos_embed[: ids.shape[1]]
        x = checkpoint_seq(self.blocks, x) if self.grad_checkpointing and self.training else self.blocks(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.forward_features(ids))


# Learners of 2.5 C hidden units: three quarters of the residual network's weights.
PRESETS: dict[str, dict[str, Any]] = {
    "pnnh": {"attention": "shaped", "hidden": 2.5, "scale": 0.1},
    "plain": {"attention": "plain"},
    "full_carry": {"attention": "shaped", "scale": 0.1},
}

for _kind, _tokens in (("char", 65), ("byte", 256)):
    register_backbone(
        f"gpt_small_{_kind}",
        GPT,
        residual=True,
        methods=tuple(PRESETS),
        presets=PRESETS,
        family="gpt",
        input_size=(256,),
        num_classes=_tokens,
        first_conv="embed",
        classifier="head",
        options=("context", "width", "depth", "heads", "mlp_ratio"),
        feature_maps=False,
        reads="tokens",
    )
