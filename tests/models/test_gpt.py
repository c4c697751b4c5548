"""The small GPT and its skip-free names: they behave like any PyTorch network that reads token numbers."""

import copy
import pickle
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import unskip
from unskip.io.network_file import Header, save
from unskip.models import ENTRIES, about

NAMES = [name for name, entry in ENTRIES.items() if entry.reads == "tokens"]
SMALL = {"width": 32, "depth": 3, "heads": 4, "context": 16}


def create(name: str, **options: object) -> nn.Module:
    return timm.create_model(name, **SMALL, **options)


@pytest.mark.parametrize("name", NAMES)
def test_behaves_like_any_pytorch_network(name: str) -> None:
    model, ids = create(name), torch.randint(65, (2, 16))
    model(ids).square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        logits = model(ids)
        assert logits.shape == (2, 16, ENTRIES[name].num_classes)
        changed = model(torch.cat([ids[:, :9], (ids[:, 9:] + 1) % 65], 1))
        torch.testing.assert_close(changed[:, :9], logits[:, :9])  # nothing comes from later tokens
        assert (changed[:, 9:] - logits[:, 9:]).abs().amax((0, 2)).min() > 0
        assert model(ids[:, :5]).shape == (2, 5, ENTRIES[name].num_classes)
        with pytest.raises(ValueError, match=r"a text of 17 tokens came, and the network was built for context=16"):
            model(torch.randint(65, (1, 17)))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.fx.symbolic_trace(model)):
            assert torch.equal(other(ids), logits)
        fresh = create(name).eval()
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh(ids), logits)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.isfinite(model(ids)).all()
        torch.testing.assert_close(copy.deepcopy(model).double()(ids).float(), logits, rtol=1e-3, atol=1e-4)
        model.reset_classifier(7)
        assert model(ids).shape == (2, 16, 7)
        assert 0.01 < model.head.weight.std() < 0.03
        model.double().reset_classifier(5)
        assert model(ids).dtype == torch.float64
        model.reset_classifier(0)
        assert model(ids).shape == (2, 16, 32)
    with pytest.raises(ValueError, match="has no feature maps of images"):
        create(name, features_only=True)


@pytest.mark.parametrize("name", ["pnnh_gpt_small_char", "full_carry_gpt_small_char"])
def test_network_files_hold_it(name: str, tmp_path: Path) -> None:
    model, ids = create(name).eval(), torch.randint(65, (2, 16))
    save(tmp_path / "gpt.safetensors", model, Header(network={"model": name, "options": SMALL}, input_size=(16,)))
    assert torch.equal(unskip.load(tmp_path / "gpt.safetensors")(ids), model(ids))


def test_what_the_names_stand_for() -> None:
    residual, half, upper = (about(f"{method}gpt_small_char") for method in ("", "pnnh_", "full_carry_"))
    assert (residual.skips, half.skips, about("plain_gpt_small_char").skips) == ("all", "none", "none")
    assert upper.skips == "block skips kept: 24"  # an upper bound, which is residual while it trains
    assert half.trained < 0.8 * residual.trained
    assert create("pnnh_gpt_small_char").blocks[0].mlp.learner.conv1.out_features == 80  # 2.5 times the width
    assert unskip.create_model("pnnh_gpt_small_byte", depth=1).surgery.attention == "shaped"


@torch.no_grad()
def test_a_skip_free_gpt_starts_with_tokens_that_differ() -> None:
    """The plain one does not: behind 24 layers all tokens are alike (rank collapse)."""
    ids = torch.randint(65, (2, 16))
    for name, least, most in (("pnnh_gpt_small_char", 0.0, 0.3), ("plain_gpt_small_char", 0.99, 1.0)):
        torch.manual_seed(0)
        model = create(name)
        deep = type(model.blocks)(*[block for _ in range(8) for block in copy.deepcopy(model).blocks])
        x = nn.functional.normalize(deep(model.embed(ids) + model.pos_embed), dim=-1)
        assert least <= float((x @ x.transpose(1, 2)).mean()) <= most + 1e-6
