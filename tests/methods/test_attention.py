"""Attention without skips: the formulas in float64, the starts, and what a skip-free block is."""

import copy
import inspect
import math
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import Tensor, fx, nn

import unskip
from unskip.io.network_file import save
from unskip.methods import stacked
from unskip.methods.attention import ATTENTIONS, AttentionSpec, SelfAttention
from unskip.methods.attention.espa import GAMMA_L, causal_attention, gamma_of, symmetric_attention
from unskip.methods.gated import GatedCarryBlock
from unskip.models.gpt import GPT
from unskip.surgery.readers.transformer import SkipFreeBlock

C, H, T = 12, 3, 7


def make(name: str, *, causal: bool, layer: int = 1, depth: int = 3) -> SelfAttention:
    torch.manual_seed(0)
    q, k, v, o = (nn.Linear(C, C).double() for _ in range(4))
    spec = AttentionSpec(
        q=q, k=k, v=v, o=o, heads=H, causal=causal, layer=layer, depth=depth, write=lambda block, attention: None
    )
    return ATTENTIONS[name].build(spec)


def matrix(name: str, attention: SelfAttention, x: Tensor, seen: Tensor) -> Tensor:
    """A of the formulas, (B, H, T, T), where `seen` says which tokens each one sees."""
    q, k = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (attention.q, attention.k))
    logits = q @ k.transpose(-1, -2) / math.sqrt(C // H)
    softmax = logits.masked_fill(~seen, -math.inf).softmax(-1)
    uniform = seen.double() / seen.sum(-1, keepdim=True)
    gains = {name: p[:, None, None] for name, p in attention.named_parameters() if p.ndim == 1 and len(p) == H}
    if name == "shaped":
        return gains["alpha"] * torch.eye(T) + gains["beta"] * softmax - gains["gamma"] * uniform
    if name == "value_skipinit":
        return gains["alpha"] * torch.eye(T) + gains["beta"] * softmax
    if name == "espa":
        before, after = (cholesky_or_root(gamma_of(n, 3), attention.causal) for n in (1, 2))
        target = after @ torch.linalg.inv(before)
        D = target.sum(1, keepdim=True)
        return D * (logits + (target / D).clamp_min(0).log()).softmax(-1)
    return softmax


def cholesky_or_root(gamma: float, causal: bool) -> Tensor:
    place = torch.arange(T, dtype=torch.float64)
    kernel = torch.exp(-gamma * (place[:, None] - place).abs())
    if causal:
        return torch.linalg.cholesky(kernel)
    values, vectors = torch.linalg.eigh(kernel)
    return (vectors * values.sqrt()) @ vectors.T


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ATTENTIONS)
@torch.no_grad()
def test_the_formula(name: str, causal: bool) -> None:
    attention = make(name, causal=causal)
    for parameter in attention.parameters():  # anywhere but at the start
        parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, T, C, dtype=torch.float64)
    seen = torch.ones(T, T, dtype=torch.bool).tril() if causal else torch.ones(T, T, dtype=torch.bool)
    v = attention.v(x).unflatten(-1, (H, -1)).transpose(1, 2)
    expected = attention.o((matrix(name, attention, x, seen) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=1e-10, atol=1e-10)
    if name != "espa":  # whose kernel covers the whole text
        padded = seen.clone().expand(2, 1, T, T).clone()
        padded[1, :, :, 0] = False
        padded[1, :, 0, 0] = True
        expected = attention.o((matrix(name, attention, x, padded) @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(attention(x, padded), expected)
        added = torch.zeros(2, 1, T, T, dtype=torch.float64).masked_fill(~padded, -math.inf)
        torch.testing.assert_close(attention(x, added), expected)


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_shaped_and_value_skipinit_start_as_rotations_of_each_token(causal: bool) -> None:
    x = torch.randn(2, T, C, dtype=torch.float64)
    for name in ("shaped", "value_skipinit"):
        attention = make(name, causal=causal)
        rotation = attention.o.weight @ attention.v.weight
        torch.testing.assert_close(rotation @ rotation.T, torch.eye(C, dtype=torch.float64))
        torch.testing.assert_close(attention(x), x @ rotation.T)
        assert attention.v.weight.requires_grad
        assert attention.o.weight.requires_grad  # else the identity of A would be a skip


def test_espa_turns_uncorrelated_tokens_into_its_kernel() -> None:
    place = torch.arange(T, dtype=torch.float64)
    target = torch.exp(-GAMMA_L * (place[:, None] - place).abs())
    for step in (
        lambda a, b: causal_attention(place, a, b),
        lambda a, b: torch.from_numpy(symmetric_attention(T, a, b)),
    ):
        product = torch.eye(T, dtype=torch.float64)
        for layer in range(6):
            A = step(gamma_of(layer, 6), gamma_of(layer + 1, 6))
            assert (A >= 0).all()
            product = A @ product
        torch.testing.assert_close(product @ product.T, target, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_cut_starts_well_conditioned() -> None:
    attention = make("cut", causal=False)
    values = torch.linalg.svdvals(attention.o.weight @ attention.v.weight)
    torch.testing.assert_close(values, torch.full_like(values, 9.0))  # c² = 9
    size = C // H
    product = attention.q.weight[:size].T @ attention.k.weight[:size]
    assert torch.linalg.matrix_rank(product) == size
    mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
    attention.start_mlp(mlp)
    for layer in (mlp[0], mlp[2]):
        values = torch.linalg.svdvals(layer.weight)
        torch.testing.assert_close(values, torch.full_like(values, 2.0))  # √(4C / C)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_starts_orthogonal_too(dtype: torch.dtype) -> None:
    """PyTorch has no QR decomposition of such matrices."""
    for name in ATTENTIONS:
        model = unskip.plainify(BUILD["vit"]().to(dtype), "pnnh", attention=name)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert torch.isfinite(model(torch.randn(1, 3, 32, 32, dtype=dtype))).all()
    weight = unskip.plainify(BUILD["vit"]().to(dtype), "pnnh", attention="shaped").blocks[0].attn.v.weight.float()
    torch.testing.assert_close(weight @ weight.T, torch.eye(32), rtol=0.02, atol=0.02)


@torch.no_grad()
def test_shaped_starts_as_the_identity_behind_trained_norms_of_queries() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, num_heads=4, depth=1, qk_norm=True)
    for norm in (model.blocks[0].attn.q_norm, model.blocks[0].attn.k_norm):
        nn.init.normal_(norm.bias)
    attention = unskip.plainify(model, "plain", attention="shaped").blocks[0].attn
    x = torch.randn(TOKENS)
    torch.testing.assert_close(attention(x), attention.o(attention.v(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "gpt"])
@torch.no_grad()
def test_networks_can_be_traced_and_copied(name: str) -> None:
    x = torch.randn(2, 3, 32, 32) if name == "vit" else torch.randint(11, (2, 8))
    for attention in ATTENTIONS:
        model = unskip.plainify(BUILD[name](), "pnnh", attention=attention).eval()
        for other in (copy.deepcopy(model), fx.symbolic_trace(model)):
            torch.testing.assert_close(other(x), model(x))


@torch.no_grad()
def test_vit_blocks_can_be_causal() -> None:
    model, x = BUILD["vit"]().eval(), torch.randn(TOKENS)
    attention = model.blocks[0].attn
    if "is_causal" not in inspect.signature(attention.forward).parameters:
        pytest.skip("this version of timm has no causal ViT blocks")
    causal = unskip.plainify(model, "plain", attention="plain").eval().blocks[0]
    expected = attention(model.blocks[0].norm1(x), is_causal=True)
    torch.testing.assert_close(causal(x, is_causal=True), causal.mlp(expected))
    kept = unskip.plainify(model, "plain").eval().blocks[0]
    torch.testing.assert_close(kept(x, is_causal=True), kept.mlp(x + expected))


# ---------------------------------------------------------------- what a skip-free block is

TOKENS = torch.Size([1, 5, 32])
BUILD = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, num_heads=4, depth=2),
    "deit3": lambda: timm.create_model("deit3_small_patch16_224", img_size=32, embed_dim=32, num_heads=4, depth=2),
    "swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, embed_dim=32, window_size=4, depths=(1, 2), num_heads=(2, 4)
    ),
    "torchvision": lambda: torchvision.models.VisionTransformer(32, 16, 2, 4, 32, 64),
    "gpt": lambda: GPT(num_classes=11, context=8, width=32, depth=2, heads=4),
}
LAYERS = ("linear", "addmm", "mm.default", "matmul", "conv")


def has_path_around_layers(block: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the block's output is reached from its input without passing a matrix of weights."""
    x = torch.randn(shape, dtype=next(block.parameters()).dtype)
    program = torch.export.export(block.eval(), (x,))
    (start,) = (n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs)
    weights = set(program.graph_signature.inputs_to_parameters) | set(program.graph_signature.inputs_to_buffers)

    def is_layer(node: fx.Node) -> bool:
        reads_weight = any(read.name in weights or read.op == "get_attr" for read in node.all_input_nodes)
        return any(word in str(node.target) for word in LAYERS) and reads_weight

    reached, queue = {start}, [start]
    while queue:
        for reader in queue.pop().users:
            if reader not in reached and not is_layer(reader):
                reached.add(reader)
                queue.append(reader)
    return any(node.op == "output" for node in reached)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, SkipFreeBlock)]


def shape_of(name: str, block: nn.Module) -> tuple[int, ...]:
    if name == "swin":
        return (1, *block.input_resolution, block.norm1.normalized_shape[0])
    return TOKENS


@pytest.mark.parametrize("name", BUILD)
def test_no_addition_joins_input_and_output(name: str) -> None:
    model = BUILD[name]()
    for method, options in (("plain", {}), ("pnnh", {"block": "plain"})):
        for attention in ATTENTIONS if (name, method) == ("gpt", "plain") else ("shaped", "espa"):
            plain = unskip.plainify(model, method, attention=attention, **options)
            assert plain.surgery.kept == {}
            assert plain.surgery.attention == attention
            assert len(plain.surgery.replaced) == len(blocks_of(plain)) >= 2
            for block in blocks_of(plain):
                assert not has_path_around_layers(block, shape_of(name, block)), attention
    kept = unskip.plainify(model, "plain")
    assert kept.surgery.kept == {"attention": len(blocks_of(kept))}
    for path, block in zip(kept.surgery.replaced, blocks_of(kept), strict=True):  # the test sees a skip
        assert has_path_around_layers(model.get_submodule(path), shape_of(name, block))


def test_a_full_carry_is_a_skip() -> None:
    upper = unskip.plainify(BUILD["gpt"](), "full_carry", attention="shaped")
    assert upper.surgery.kept == {"block": 2}
    assert all(not has_path_around_layers(block.attn, TOKENS) for block in blocks_of(upper))
    assert all(has_path_around_layers(block.mlp, TOKENS) for block in blocks_of(upper))


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.SiLU])
@torch.no_grad()
def test_half_of_the_channels_are_carried_exactly_and_fold(act: type[nn.Module]) -> None:
    model = BUILD["gpt"]()
    for block in model.blocks:
        block.mlp.act = act()
    model = model.double()
    plain = unskip.plainify(model, "pnnh", attention="shaped", scale=0.0).eval()
    ids = torch.randint(11, (2, 8))
    mlp = plain.blocks[0].mlp
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    read = mlp.pre(x)
    torch.testing.assert_close(mlp.coder(read), torch.cat([read[..., :16], torch.zeros_like(read[..., 16:])], -1))
    # With scale 0 nothing but the linear start is left of the learner, and it passes on the other half.
    torch.testing.assert_close(mlp(x), read)
    half = unskip.plainify(model, "residual_half", attention="shaped", scale=0.0).eval().blocks[0].mlp
    torch.testing.assert_close(half(x), x)  # the shortcut carries all of it already
    trained = unskip.plainify(model, "pnnh", attention="shaped").eval()
    form = stacked(trained)
    assert not any("coder" in name for name, _ in form.named_modules())
    layers = [[m for m in block.mlp if isinstance(m, nn.Linear)] for block in form.blocks]
    assert all([(m.in_features, m.out_features) for m in found] == [(32, 128), (128, 32)] for found in layers)
    torch.testing.assert_close(form(ids), trained(ids))


@torch.no_grad()
def test_a_gated_mlp_carries_through_open_gates() -> None:
    from timm.layers import SwiGLU

    from unskip.coders import CoderBank
    from unskip.methods import PNNH, BlockSpec

    spec = BlockSpec(path="mlp", pre=(nn.LayerNorm(16),), branch=(SwiGLU(16, 48).double(),))
    block = PNNH(scale=0.0).build(spec, CoderBank()).double().eval()
    assert isinstance(block, GatedCarryBlock)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(block(x), block.pre(x))
    block = PNNH().build(spec, CoderBank()).double().eval()
    ordinary = block.to_ordinary()
    assert isinstance(ordinary[-1], SwiGLU)
    assert ordinary[-1].fc1_x.out_features == 48
    torch.testing.assert_close(ordinary.double()(x), block(x))


def test_what_is_refused() -> None:
    model = BUILD["vit"]()
    with pytest.raises(ValueError, match=r"attention='shape' is not known\. Did you mean 'shaped'\?"):
        unskip.plainify(model, attention="shape")
    with pytest.raises(ValueError, match=r"method 'rm' keeps the function, and attention='shaped' changes it"):
        unskip.plainify(model.eval(), "rm", attention="shaped")
    gated = BUILD["vit"]()
    gated.blocks[0].attn.norm = nn.LayerNorm(32)
    with pytest.raises(ValueError, match="has a gate, or a norm of its output"):
        unskip.plainify(gated, attention="shaped")
    unskip.plainify(gated, attention="keep")


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit", "gpt"])
def test_readers_keep_what_attention_computes(name: str) -> None:
    model = BUILD[name]().eval()
    plain = unskip.plainify(model, "plain", attention="plain").eval()
    x = torch.randn(TOKENS)
    for path, block in zip(plain.surgery.replaced, blocks_of(plain), strict=True):
        torch.testing.assert_close(block.attn(x), model.get_submodule(path).attn(x))


@torch.no_grad()
def test_readers_keep_what_attention_of_shifted_windows_computes() -> None:
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, embed_dim=32, window_size=4, depths=(2,), num_heads=(2,)
    ).eval()
    plain = unskip.plainify(model, "plain", attention="plain").eval()
    x = torch.randn(2, 8, 8, 32)
    for path, block in zip(plain.surgery.replaced, blocks_of(plain), strict=True):
        torch.testing.assert_close(block._attn(x), model.get_submodule(path)._attn(x))
    assert any(plain.layers[0].blocks[1].shift_size)


def test_network_files_hold_folded_attention(tmp_path: Path) -> None:
    folded = unskip.fold(unskip.plainify(BUILD["swin"](), "pnnh", attention="shaped").eval())
    save(tmp_path / "swin.safetensors", folded, input_size=(3, 32, 32))
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(unskip.load(tmp_path / "swin.safetensors")(x), folded(x))


def test_huggingface() -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(64, (2, 12))
    sizes = {"vocab_size": 64, "num_attention_heads": 4, "hidden_size": 32}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, intermediate_size=88, num_hidden_layers=2, num_key_value_heads=2)
    ).eval()
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    ).eval()
    for model in (llama, gpt2):
        kept = unskip.plainify(model, "plain").eval()
        assert kept.surgery.kept == {"attention": 2}
        for method in ("plain", "pnnh"):
            plain = unskip.plainify(model, method, attention="shaped").eval()
            assert plain.surgery.kept == {}
            logits = plain(ids).logits
            changed = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % 64], 1)
            difference = (plain(changed).logits - logits).abs().amax((0, 2))
            assert difference[:-1].max() < 1e-5 < difference[-1]  # it is causal
            padding = torch.ones_like(ids)
            padding[0, :3] = 0
            assert torch.isfinite(plain(ids, attention_mask=padding).logits).all()
            assert plain.generate(ids[:1], max_new_tokens=2, do_sample=False).shape == (1, 14)
            cache = transformers.DynamicCache()
            cache.update(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), 0)
            with pytest.raises(ValueError, match="use_cache=False"):
                plain(ids, past_key_values=cache)
    torch.testing.assert_close(
        unskip.plainify(llama, "plain", attention="plain").eval().model.layers[0].self_attn.q.weight,
        llama.model.layers[0].self_attn.q_proj.weight,
    )


@pytest.mark.parametrize(
    "name", ["pnnh_gpt_small_char", "plain_gpt_small_byte", "shaped_vit_tiny", "shaped_vit_small", "shaped_swin_tiny"]
)
def test_named_networks_keep_no_skip(name: str) -> None:
    model = unskip.create_model(name, device="meta")
    assert model.surgery.kept == {}
    assert not any(block.attention_skip for block in blocks_of(model))
    assert len(blocks_of(model)) == len(model.surgery.replaced) >= 12
