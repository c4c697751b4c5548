"""Whole jobs as a user pastes them into a shell: each line is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torchvision

import unskip
from tests.data.test_sets import write_folder
from tests.ship.test_fold import trained

SOURCE = Path(unskip.__file__).parents[1]


def paste(line: str, folder: Path) -> str:
    """What a line of commands prints; the line must end with code 0."""
    (folder / "bin").mkdir(exist_ok=True)
    command = folder / "bin" / "unskip"
    command.write_text(f"#!{sys.executable}\nfrom unskip.cli import main\nmain()\n")
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_a_trained_torchvision_network_becomes_int8_onnx(tmp_path: Path) -> None:
    network = trained(torchvision.models.resnet18(num_classes=4))
    torch.save(network.state_dict(), tmp_path / "my_resnet18.pth")
    write_folder(tmp_path / "FOLDER", ("",), 10)
    shown = paste(
        "unskip plainify torchvision:resnet18 --weights my_resnet18.pth --num-classes 4 --method rm "
        "-o plain.safetensors && unskip export plain.safetensors --int8 --calibrate FOLDER -o net.onnx --limit 100",
        tmp_path,
    )
    assert "\nThe networks agree: " in shown
    assert "torchvision resnet18, rm, folded (dense): " in shown  # no norm is left, nor a step between layers
    assert "Accuracy on 4 inputs: " in shown
    images = torch.randn(3, 3, 224, 224)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    found = session.run(None, {"input": images.numpy()})[0]
    with torch.no_grad():
        wanted = network(images).numpy()
    assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.9
    assert not [node for node in onnx.load(tmp_path / "net.onnx").graph.node if node.op_type == "Add"]
