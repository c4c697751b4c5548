"""A skip-free GPT in its stacked form, through PyTorch's exporter to ONNX, for texts of any length."""

from pathlib import Path

import pytest
import torch

import unskip
from unskip.methods import stacked

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.mark.full
@torch.no_grad()
def test_onnx_reads_texts_of_any_length(tmp_path: Path) -> None:
    model = unskip.create_model(
        "pnnh_gpt_small_char", width=32, depth=2, heads=4, context=32, hidden={32: 80}
    ).eval()  # fmt: skip
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=32)}
    ids = torch.randint(65, (2, 16))
    program = torch.onnx.export(stacked(model), (ids,), dynamo=True, dynamic_shapes=(sizes,), verbose=False)
    assert program is not None
    program.save(str(tmp_path / "gpt.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "gpt.onnx"))
    for length in (16, 5, 32):
        ids = torch.randint(65, (3, length))
        (logits,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model(ids), rtol=1e-4, atol=1e-5)
