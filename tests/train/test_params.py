"""Parameter groups."""

import pytest
import torch
from torch import nn

import unskip
from unskip.train.optim import CAPTURABLE, hidden_matrices, make_optimizer, set_rates
from unskip.train.recipe import OptimizerConfig


def test_norms_and_biases_do_not_decay() -> None:
    network = unskip.create_model("pnnh_resnet20")
    still, decaying = unskip.param_groups(network, 5e-4)
    assert still["weight_decay"] == 0
    assert decaying["weight_decay"] == 5e-4
    assert all(p.ndim == 1 for p in still["params"])
    assert {id(p) for p in decaying["params"]} == {
        id(m.weight) for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)
    }


def test_position_embeddings_do_not_decay_either() -> None:
    network = unskip.create_model("plain_vit_tiny", depth=1, img_size=32)
    still, _ = unskip.param_groups(network, 0.05)
    assert any(p is network.pos_embed for p in still["params"])


def test_negative_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decay=-1"):
        unskip.param_groups(nn.Linear(2, 2), -1)


# ---------------------------------------------------------------- Muon


def gpt() -> nn.Module:
    return unskip.create_model("pnnh_gpt_small_char", width=16, depth=2, heads=2, context=8, hidden={16: 40})


def test_muon_gets_hidden_matrices_and_adamw_the_rest() -> None:
    model = gpt()
    optimizer = make_optimizer(model, OptimizerConfig(optimizer="muon", weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {(g["use_muon"], g["weight_decay"]): {names[id(p)] for p in g["params"]} for g in optimizer.param_groups}
    hidden = {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in (
        "attn.q", "attn.k", "attn.v", "attn.o", "mlp.learner.conv1", "mlp.learner.conv2")}  # fmt: skip
    assert found[True, 0.1] == hidden
    assert found[False, 0.1] == {"head.weight"}
    assert {"embed.weight", "pos_embed", "blocks.0.attn.alpha", "norm.bias"} <= found[False, 0.0]
    assert set.union(*found.values()) == set(names.values())


def test_one_step_of_muon_is_pytorchs_and_adamws() -> None:
    torch_muon = getattr(torch.optim, "Muon", None)
    if torch_muon is None:
        pytest.skip("PyTorch has Muon since 2.9")
    config = OptimizerConfig(
        optimizer="muon", lr=0.02, momentum=0.95, nesterov=True, beta2=0.95, weight_decay=0.1, eps=1e-6,
        lr_scales={"head": 0.5},
    )  # fmt: skip
    ours, theirs = gpt(), gpt()
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, config)
    hidden = hidden_matrices(theirs)
    inner = [p for p in theirs.parameters() if id(p) in hidden]
    rest = [p for name, p in theirs.named_parameters() if id(p) not in hidden and name != "head.weight"]
    others = [
        torch_muon(inner, lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0),
        torch.optim.AdamW(theirs.head.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1),
    ]
    ids = torch.randint(65, (4, 8))
    set_rates(optimizer, config.lr)
    for _ in range(2):
        for model in (ours, theirs):
            model.zero_grad()
            model(ids).logsumexp(-1).square().mean().backward()
        optimizer.step()
        for other in others:
            other.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.skipif("muon" not in CAPTURABLE, reason="timm's Muon can be captured since 1.0.29")
def test_in_a_cuda_graph_muon_stays_muon() -> None:
    model, config = gpt(), OptimizerConfig(optimizer="muon", momentum=0.95, beta2=0.95)
    alone, captured = (make_optimizer(model, config, cuda_graph=graph).param_groups for graph in (False, True))
    assert [{**group, "capturable": True} for group in alone] == captured
    assert all(group["capturable"] for group in captured)


def test_options_of_adam_are_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match="beta2 and eps are options of muon, adam"):
        make_optimizer(gpt(), OptimizerConfig(optimizer="lion", beta2=0.9))
    group = make_optimizer(gpt(), OptimizerConfig(optimizer="adamw", beta2=0.9, eps=1e-4)).param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.9), 1e-4)
