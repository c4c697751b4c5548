"""A skip-free GPT, folded and exported: its coder in its MLPs, and ONNX that reads texts of any length."""

from pathlib import Path

import pytest
import torch
from torch import nn

import unskip
from unskip.coders import Coder
from unskip.models.gpt import GPT

SIZES = {"width": 32, "depth": 2, "heads": 4, "context": 32}


def trained_like() -> nn.Module:
    torch.manual_seed(0)
    model = unskip.create_model("pnnh_gpt_small_char", **SIZES)
    for parameter in model.parameters():  # anywhere but at the start
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def test_the_coder_folds_into_the_mlp() -> None:
    model = trained_like()
    assert any(isinstance(module, Coder) for module in model.modules())
    folded = unskip.fold(model)
    assert folded.folding.exact < 1e-12
    assert not any(isinstance(module, Coder) for module in folded.modules())
    for block in folded.blocks:
        hidden, out = (module for module in block.mlp.modules() if isinstance(module, nn.Linear))
        assert (hidden.in_features, hidden.out_features, out.out_features) == (32, 80 + 32, 32)
    for length in (1, 7, 32):
        ids = torch.randint(65, (3, length))
        torch.testing.assert_close(folded(ids), model(ids), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="keeps its skip connection, and fold is for plain networks"):
        unskip.fold(GPT(num_classes=65, **SIZES).eval())
    with pytest.raises(ValueError, match=r"or of tokens \(B, T\)"):
        unskip.fold(model, example=torch.ones(2, 3, 4, dtype=torch.long))


@pytest.mark.full
@torch.no_grad()
def test_onnx_reads_texts_of_any_length(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = trained_like()
    written = unskip.export(unskip.fold(model), tmp_path / "gpt.onnx", example=torch.randint(65, (2, 32)))
    assert written.metadata["input"] == "batch x length of at most 32, int64"
    session = onnxruntime.InferenceSession(str(tmp_path / "gpt.onnx"))
    (entry,) = session.get_inputs()
    assert entry.shape == ["batch", "length"]
    for batch, length in ((3, 16), (1, 5), (2, 32), (1, 1)):
        ids = torch.randint(65, (batch, length))
        (logits,) = session.run(None, {entry.name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(ids), rtol=1e-4, atol=1e-5)
