"""Parameter groups."""

import pytest
from torch import nn

import unskip


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
