"""Networks that people use, as their users write them: with the published weights they know their images."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils.fusion import fuse_conv_bn_eval

import unskip
from unskip.reproduce import reproduce
from unskip.reproduce.proofs import _cifar, _tensorflow_js, _tflite, akamaster, keras_mobilenet_v2, mlperf_resnet8
from unskip.ship import fold, prune

DATA = Path(os.environ.get("UNSKIP_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
there = pytest.mark.skipif(not (DATA / "trained").is_dir(), reason="UNSKIP_SHARED_DATA names the folder with trained/")


@there
def test_published_weights_fit_and_classify() -> None:
    """On 200 test images; the published accuracies are 87 and 92 %, and weights in a wrong place give 10 %."""
    networks = [
        (mlperf_resnet8(DATA / "trained" / "mlperf_tiny_resnet8.npz"), False),
        (akamaster(20, DATA / "trained" / "akamaster_resnet20.safetensors"), True),
    ]
    for network, normalised in networks:
        images = _cifar(DATA / "cifar10", 200, normalised=normalised)
        with torch.no_grad():
            assert (network(images.x).argmax(1) == images.y).float().mean() > 0.8
        assert images.calibrate.shape == (512, 3, 32, 32)


@there
def test_rm_of_mlperf_resnet8_has_the_fewest_channels() -> None:
    """A hidden channel for each of the branch's, which bend apart, and one for each dimension that the skip carries."""
    network = mlperf_resnet8(DATA / "trained" / "mlperf_tiny_resnet8.npz")
    plain = prune(fold(unskip.plainify(network, "rm")))
    macs = 32 * 32 * 9 * 3 * 16 + 64 * 10
    for block, side in zip(network.blocks, (32, 16, 8), strict=True):
        c_out, c_in = block.conv1.weight.shape[:2]
        skip = torch.eye(c_in) if block.stride == 1 else block.shortcut.weight.flatten(1)
        macs += side**2 * 9 * (c_in + c_out) * (c_out + int(torch.linalg.matrix_rank(skip)))
    cost = unskip.cost(network, "rm")
    assert cost.after.macs == macs
    assert not plain.pruning.removed
    assert macs / cost.before.macs == pytest.approx(1.64, abs=0.005)


@there
def test_no_bends_turned_round_spare_a_channel_of_the_skip() -> None:
    """In the first block, whose skip is I: I + W_2 diag(b) W_1 has full rank at a frequency for all 2^16 choices b."""
    block = mlperf_resnet8(DATA / "trained" / "mlperf_tiny_resnet8.npz").double().blocks[0]
    waves = [torch.exp(1j * f * torch.arange(3, dtype=torch.float64)) for f in (0.7, 2.9)]
    with torch.no_grad():
        first, second = (
            torch.einsum("oihw,h,w->oi", fuse_conv_bn_eval(conv, norm).weight + 0j, *waves)
            for conv, norm in ((block.conv1, block.bn1), (block.conv2, block.bn2))
        )
    turned = (torch.arange(2**16)[:, None] >> torch.arange(16) & 1).to(torch.complex128)
    for part in turned.split(2**13):
        rest = torch.eye(16, dtype=torch.complex128) + torch.einsum("ok,nk,ki->noi", second, part, first)
        assert torch.linalg.slogdet(rest).logabsdet.min() > -25  # rounding alone leaves some 1e-16 = e^-37


@there
def test_a_python_without_an_interpreter_is_named(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'raise SystemExit(\"No module named tensorflow\")'\n")
    script.chmod(0o755)
    file = DATA / "trained" / "mlperf_tiny_resnet8.tflite"
    with pytest.raises(ValueError, match=r"could not run mlperf_tiny_resnet8.tflite: .*No module named tensorflow"):
        _tflite(file, torch.zeros(1, 3, 32, 32), script)
    with pytest.raises(ValueError, match=r"node could not run nsfwjs' network in --node .*leave it out to skip"):
        _tensorflow_js(tmp_path, torch.zeros(1, 3, 8, 8), tmp_path)


def test_what_is_missing_is_said_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="proofs needs --data, the folder with trained/"):
        reproduce("proofs", out=tmp_path)
    with pytest.raises(ValueError, match="--rows has 'resnet9'; the networks are resnet8, resnet20"):
        reproduce("proofs", out=tmp_path, data=tmp_path, rows="resnet9")
    with pytest.raises(ValueError, match="--rows has 'mobilenetv2', which needs --nsfwjs: the folder"):
        reproduce("proofs", out=tmp_path, data=tmp_path, rows="mobilenetv2")
    with pytest.raises(ValueError, match=r"--nsfwjs .* holds no model.min.js. `npm pack nsfwjs@4.3.0` fetches"):
        keras_mobilenet_v2(tmp_path)
