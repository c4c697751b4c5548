"""Types as a user sees them: a small script passes `mypy --strict` without a cast or an ignore."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import unskip

SCRIPT = """
import torch
from torch import Tensor, nn

import unskip

model: nn.Module = unskip.create_model("resnet20", num_classes=10)
plain: nn.Module = unskip.plainify(model, method="plain")
images: Tensor = torch.randn(8, 3, 32, 32)
report = unskip.diagnose(plain, images)
outcome: str = report.verdict.outcome
confidence: float = report.verdict.confidence
report.to_html("report.html")
folded: nn.Module = unskip.fold(plain.eval(), form="fast")
exported = unskip.export(folded, "net.onnx", example=images)
words: str = str(exported)
loaded: nn.Module = unskip.load("runs/x", method="pnnh")
check = unskip.verify(plain, folded, images)
ok: bool = check.ok(1e-4)
groups = unskip.param_groups(model, weight_decay=1e-4)
optimizer = torch.optim.SGD(groups, lr=0.1)
reveal_type(unskip.plainify)
"""


@pytest.mark.full
def test_a_users_script_is_clean_under_strict_types(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), str(script)]
    environment = {**os.environ, "MYPYPATH": str(Path(unskip.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "error:" not in done.stdout, done.stdout
    assert "-> torch.nn.modules.module.Module" in done.stdout, done.stdout + done.stderr  # not Any
