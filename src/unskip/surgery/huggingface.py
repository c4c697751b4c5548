"""Readers of Hugging Face transformers' blocks: GPT-2, and those of Llama's kind, Mistral and Qwen2 too.

`reading.reader_of` imports this file when it meets a block of that package. A skip-free network of it has no cache of
keys and values: `config.use_cache` is off, so that `generate` reads the whole text for each token.
"""

from functools import partial
from typing import Any

from timm.layers import SwiGLU
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from unskip._core.layers import layer_with
from unskip.methods.attention import AttentionSpec
from unskip.methods.spec import BlockSpec, Unsupported, parts
from unskip.surgery.readers.transformer import SkipFreeBlock, linear_parts, write_attention, write_block
from unskip.surgery.reading import register_reader

ACTIVATIONS = {
    "NewGELUActivation": partial(nn.GELU, "tanh"),
    "GELUTanh": partial(nn.GELU, "tanh"),
    "GELUActivation": nn.GELU,
    "SiLUActivation": nn.SiLU,
}


def refuse_cache(past: Any) -> None:
    """Raises a ValueError if the cache holds keys and values of earlier tokens."""
    if past is not None and past.get_seq_length():
        raise ValueError(
            "unskip: a skip-free block has no cache of keys and values; call the model with use_cache=False."
        )


class SkipFreeGPT2Block(SkipFreeBlock, GPT2Block):
    attn: Any
    ln_1: Any

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        *_: Any,
        **kwargs: Any,
    ) -> Tensor:
        x = hidden_states
        if self.attention_skip:
            attended = self.attn(
                self.ln_1(x), past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
            )[0]
            return self.mlp(x + attended)
        refuse_cache(past_key_values)
        return self.mlp(self.attn(self.ln_1(x), attention_mask))


class SkipFreeLlamaLayer(SkipFreeBlock, LlamaDecoderLayer):
    self_attn: Any
    input_layernorm: Any

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *, position_embeddings: Any = None, **kwargs: Any
    ) -> Tensor:
        x = hidden_states
        read = self.input_layernorm(x)
        if self.attention_skip:
            settings = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, **kwargs}
            return self.mlp(x + self.self_attn(hidden_states=read, **settings)[0])
        refuse_cache(kwargs.get("past_key_values"))
        cos, sin = position_embeddings
        return self.mlp(self.self_attn(read, attention_mask, lambda q, k: apply_rotary_pos_emb(q, k, cos, sin)))


def linear(layer: nn.Module) -> nn.Linear:
    """transformers' Conv1D, y = x W + b, as a linear layer; a linear layer as it is."""
    if isinstance(layer, nn.Linear):
        return layer
    new = layer_with(layer.weight.T, layer.bias)  # type: ignore[arg-type]
    assert isinstance(new, nn.Linear)
    return new


def activation(module: nn.Module) -> nn.Module:
    """transformers' activation as PyTorch's."""
    make: Any = ACTIVATIONS.get(type(module).__name__)
    return module if make is None else make()


@register_reader(GPT2Block, write=partial(write_block, SkipFreeGPT2Block, "ln_2"))
def read_gpt2(block: nn.Module, path: str) -> BlockSpec:
    if hasattr(block, "crossattention"):
        raise Unsupported("it has cross-attention, with a skip of its own")
    mlp: Any = block.mlp
    branch = (linear(mlp.c_fc), activation(mlp.act), linear(mlp.c_proj), mlp.dropout)
    return BlockSpec(
        path=path,
        pre=parts(block, "ln_2"),
        branch=branch,
        kept=("attention",),
        attention=partial(read_gpt2_attention, block),
    )


def read_gpt2_attention(block: nn.Module) -> AttentionSpec:
    old: Any = block.attn
    q, k, v = linear_parts(linear(old.c_attn), *[old.embed_dim] * 3)
    return AttentionSpec(
        q=q, k=k, v=v, o=linear(old.c_proj), heads=old.num_heads, causal=True, drop=old.attn_dropout.p,
        out_drop=old.resid_dropout.p, write=partial(write_decoder, "attn", old.config),
    )  # fmt: skip


@register_reader(
    LlamaDecoderLayer,
    MistralDecoderLayer,
    Qwen2DecoderLayer,
    write=partial(write_block, SkipFreeLlamaLayer, "post_attention_layernorm"),
)
def read_llama(block: nn.Module, path: str) -> BlockSpec:
    mlp: Any = block.mlp
    gated = SwiGLU(mlp.gate_proj.in_features, 1)
    gated.fc1_g, gated.fc1_x, gated.fc2 = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    gated.act = activation(mlp.act_fn)
    return BlockSpec(
        path=path,
        pre=parts(block, "post_attention_layernorm"),
        branch=(gated,),
        kept=("attention",),
        attention=partial(read_llama_attention, block),
    )


def read_llama_attention(block: nn.Module) -> AttentionSpec:
    old: Any = block.self_attn
    return AttentionSpec(
        q=old.q_proj, k=old.k_proj, v=old.v_proj, o=old.o_proj, heads=old.q_proj.out_features // old.head_dim,
        causal=True, drop=old.attention_dropout, write=partial(write_decoder, "self_attn", old.config),
    )  # fmt: skip


def write_decoder(name: str, config: Any, block: nn.Module, attention: nn.Module) -> None:
    """Puts attention without a skip into the block, and turns off the cache of its network."""
    config.use_cache = False  # one object for all of a copied network
    write_attention(name, "", block, attention)
