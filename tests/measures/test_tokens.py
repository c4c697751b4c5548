"""How alike tokens are: against PyTorch's cosine similarity, and what it says of GPTs without skips at their start."""

import torch
from torch.nn import functional as F

import unskip
from unskip.measures import measure, token_similarity


def test_it_is_the_mean_cosine_of_pairs() -> None:
    x = torch.randn(3, 6, 5)
    pairs = [F.cosine_similarity(x[:, i], x[:, j], dim=-1) for i in range(6) for j in range(6) if i != j]
    torch.testing.assert_close(token_similarity(x), torch.stack(pairs).mean().item())


def test_plain_attention_makes_tokens_alike_and_shaped_attention_does_not() -> None:
    ids, last = torch.randint(65, (4, 16)), {}
    for name, options in (("plain", {}), ("pnnh", {"hidden": {32: 80}})):
        torch.manual_seed(0)
        model = unskip.create_model(f"{name}_gpt_small_char", width=32, depth=8, heads=4, context=16, **options)
        series = measure(model, ids, families=["tokens"]).series["tokens"]
        values = dict(zip(series.layers, series.values, strict=True))
        last[name] = values["blocks.7.attn.o"]
    assert last["plain"] > 0.99
    assert last["pnnh"] < 0.5
