"""Tokens and attention: against PyTorch's own functions, and what they say of GPTs without skips at their start."""

import math

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.measures import (
    attention_entropy,
    first_updates,
    last_tokens,
    measure,
    slower,
    token_similarity,
    token_spread,
)
from unskip.measures.tokens import value_product
from unskip.models.gpt import GPT

SMALL = {"width": 32, "depth": 8, "heads": 4, "context": 16}


def test_similarity_is_the_mean_cosine_of_pairs() -> None:
    x = torch.randn(3, 6, 5)
    pairs = [F.cosine_similarity(x[:, i], x[:, j], dim=-1) for i in range(6) for j in range(6) if i != j]
    torch.testing.assert_close(token_similarity(x), torch.stack(pairs).mean().item())


def test_spread_is_the_part_beside_the_mean() -> None:
    x = torch.randn(1, 6, 5).double()
    ones = torch.ones(6, 1, dtype=torch.float64)
    best = torch.linalg.lstsq(ones, x[0]).solution  # the closest matrix of equal rows
    assert token_spread(x) == pytest.approx(((x[0] - ones @ best).norm() / x[0].norm()).item())
    assert token_spread(x[:, :1].expand(1, 6, 5)) == pytest.approx(0, abs=1e-12)


def test_entropy() -> None:
    p = torch.randn(2, 3, 5, 5).softmax(-1)
    expected = torch.distributions.Categorical(probs=p.double()).entropy().mean().item() / math.log(5)
    assert attention_entropy(p) == pytest.approx(expected)
    assert attention_entropy(torch.eye(5)) == 0
    causal = torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None]
    assert attention_entropy(causal) == pytest.approx(1)
    assert attention_entropy(-causal) == pytest.approx(1)


IMAGES = torch.randn(4, 3, 32, 32)
NETWORKS = {  # network, batch, path of its first attention
    "gpt": (lambda: GPT(num_classes=65, **SMALL), torch.randint(65, (4, 16)), "blocks.0.attn"),
    "vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, num_heads=4, depth=2),
        IMAGES,
        "blocks.0.attn",
    ),
    "swin": (
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=32, embed_dim=32, window_size=4, depths=(1, 1), num_heads=(2, 4)
        ),
        IMAGES,
        "layers.0.blocks.0.attn",
    ),
    "torchvision": (
        lambda: torchvision.models.VisionTransformer(32, 16, 2, 4, 32, 64),
        IMAGES,
        "encoder.layers.encoder_layer_0.self_attention",
    ),
}


def weights_of(name: str, attention: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V and W_O."""
    if name == "gpt":
        return tuple(getattr(attention, part).weight for part in "qkvo")
    if name == "torchvision":
        return (*attention.in_proj_weight.chunk(3), attention.out_proj.weight)
    return (*attention.qkv.weight.chunk(3), attention.proj.weight)


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_every_kind_of_attention_is_found(name: str) -> None:
    build, batch, path = NETWORKS[name]
    torch.manual_seed(0)
    model = build()
    attention, read = model.get_submodule(path), []
    for module in model.modules():  # so that attention is not uniform
        if isinstance(module, nn.Linear) and module.out_features >= module.in_features:
            module.weight.mul_(8)
    handle = attention.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model.train()(batch)
    handle.remove()
    q, k, v, o = weights_of(name, attention)
    heads = 2 if name == "swin" else 4
    q_x, k_x = ((read[0] @ w.T).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (q, k))
    logits = q_x @ k_x.mT / q_x.shape[-1] ** 0.5
    if name == "gpt":
        logits = logits.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    if name == "swin":
        logits = logits + attention._get_rel_pos_bias()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    measured = measure(model, batch, families=["tokens"])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    found = next(iter(measured.series["attention_entropy"].values))
    assert found == pytest.approx(attention_entropy(logits.softmax(-1)), abs=1e-5)
    assert 0.05 < found < 0.999
    assert len(measured.series["attention_entropy"].values) == sum(
        type(m).__name__ in ("SelfAttention", "Attention", "WindowAttention", "MultiheadAttention")
        for m in model.modules()
    )
    product = value_product(attention)
    assert product is not None
    torch.testing.assert_close(product, o @ v)
    condition = next(iter(measured.series["value_condition"].values))
    assert condition == pytest.approx(torch.linalg.cond((o @ v).double()).item(), rel=1e-3)


def test_grouped_values_are_read_several_times() -> None:
    attention = nn.Module()
    attention.v, attention.o, attention.head_dim = nn.Linear(8, 4, bias=False), nn.Linear(8, 8, bias=False), 2
    x = torch.randn(8)
    values = attention.v(x).view(2, 2).repeat_interleave(2, 0).flatten()
    torch.testing.assert_close(value_product(attention) @ x, attention.o(values))


def test_nothing_is_measured_without_attention() -> None:
    measured = measure(unskip.create_model("resnet20"), IMAGES, families=["tokens"])
    assert not any(series.values for series in measured.series.values())
    assert "token_spread" not in measured.numbers


def test_plain_attention_makes_tokens_alike_and_shaped_attention_does_not() -> None:
    ids, last = torch.randint(65, (4, 16)), {}
    for name in ("plain", "pnnh"):
        torch.manual_seed(0)
        model = unskip.create_model(f"{name}_gpt_small_char", **SMALL)
        measured = measure(model, ids, families=["tokens"])
        last[name] = [measured.series[s].by_layer()["blocks.7.attn.o"] for s in ("token_similarity", "token_spread")]
        assert measured.numbers["token_spread"] == measured.series["token_spread"].by_layer()["norm"]
        entropy = measured.series["attention_entropy"].values
        assert (min(entropy) > 0.99) if name == "plain" else (max(entropy) < 1e-6)  # A = I
    assert last["plain"][0] > 0.99 > 0.5 > last["pnnh"][0]
    assert last["plain"][1] < 0.1 < 0.8 < last["pnnh"][1]


def test_large_updates_make_tokens_alike() -> None:
    torch.manual_seed(0)
    model = unskip.create_model("pnnh_gpt_small_char", **SMALL)
    ids = torch.multinomial(1 / torch.arange(1, 66.0) ** 2, 16 * 17, replacement=True).view(16, 17)  # like a text's
    batches = list(zip(ids[:, :-1].chunk(4), ids[:, 1:].chunk(4), strict=True))
    layer = last_tokens(measure(model, ids[:, :-1], families=["tokens"]))
    assert layer == "norm"
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def adamw(network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(network.parameters(), lr=3e-2)

    large = first_updates(model, adamw, batches, layer=layer, updates=4)
    small = first_updates(model, slower(adamw, 1e-2), batches, layer=layer, updates=4)
    assert len(large) == len(small) == 5
    assert large[0] == small[0]  # before the first update
    assert min(large) < 0.05 < 0.7 < min(small)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model.norm._forward_hooks
