"""Whole jobs as a user pastes them into a shell: each line is a process of its own."""

import importlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests.processes import paste
from tests.ship.test_fold import trained

MY_NET = """
import torch
from torch import nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    def __init__(self, planes, out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(planes, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layers = nn.Sequential(BasicBlock(16, 16), BasicBlock(16, 32, 2))
        self.linear = nn.Linear(32 * 4 * 4, num_classes)

    def forward(self, x):
        out = self.layers(F.relu(self.bn1(self.conv1(x))))
        out = F.avg_pool2d(out, 4)
        return self.linear(out.view(out.size(0), -1))
"""


@pytest.mark.full
def test_a_hand_written_cifar_network_becomes_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is as wide as that of the weights, and it reads 32 px, which nothing but its layers say."""
    (tmp_path / "my_net.py").write_text(MY_NET)
    monkeypatch.syspath_prepend(tmp_path)
    network = trained(importlib.import_module("my_net").Net(num_classes=4))
    torch.save(network.state_dict(), tmp_path / "my.pth")
    shown = paste(
        "unskip plainify my_net:Net --weights my.pth --method rm -o plain.safetensors "
        "&& unskip export plain.safetensors -o net.onnx",
        tmp_path,
    )
    assert shown.startswith("Taken for inputs of 3x32x32, which is a guess (--input-size).\none image of 3 x 32 x 32 ")
    assert "my_net:Net, rm, folded (dense): " in shown
    images = torch.randn(3, 3, 32, 32)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        wanted = network.eval()(images).numpy()
    assert np.abs(session.run(None, {"input": images.numpy()})[0] - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert not [node for node in onnx.load(tmp_path / "net.onnx").graph.node if node.op_type == "Add"]
