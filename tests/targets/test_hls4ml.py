"""hls4ml's own C++, compiled and run."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import unskip
from tests.targets.networks import cifar10, mlperf_resnet8, plain
from unskip.models.cifar import cifar_resnet
from unskip.ship.targets import Hls4ml, HlsProject

pytestmark = pytest.mark.targets
hls4ml = pytest.importorskip("hls4ml")


def streams(project: Path) -> tuple[int, int]:
    """FIFOs and copies of streams, read off the C++: FIFOs are variables, the input and the output."""
    source = (project / "firmware" / "myproject.cpp").read_text()
    return len(re.findall(r"hls::stream<\w+> &?\w+", source)), len(re.findall(r"nnet::clone_stream<", source))


def test_mlperfs_resnet8_by_rm_in_one_call(tmp_path: Path) -> None:
    images, labels = cifar10("test", 16)
    network = mlperf_resnet8()
    project = unskip.export(plain(network, images[:4]), tmp_path / "resnet8", example=images, target="hls4ml")
    print(f"\n{project}")
    assert isinstance(project, HlsProject)
    assert project.error <= 1e-3  # ap_fixed<28,10>
    assert project.same == 100  # ap_fixed<16,6>
    assert (project.fifos, project.clones) == (25, 0) == streams(tmp_path / "resnet8")
    with torch.no_grad():
        assert (network(images).argmax(1) == labels).double().mean() >= 0.75  # the trained network, read rightly
    assert str(tmp_path / "resnet8") in (tmp_path / "resnet8" / "hls4ml_config.yml").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["resnet8"]


def test_the_residual_resnet8_has_more_fifos_and_copies_streams(tmp_path: Path) -> None:
    """Counted in the project alone, which is not compiled: the same converter, with the norms folded by torch.fx."""
    from torch.fx.experimental.optimization import fuse

    from unskip.ship.targets.layers import as_layers

    layers = as_layers(fuse(mlperf_resnet8()), torch.rand(1, 3, 32, 32))
    with contextlib.redirect_stdout(io.StringIO()):
        config = hls4ml.utils.config_from_pytorch_model(
            layers, (3, 32, 32), granularity="name", backend="Vitis", channels_last_conversion="internal"
        )
        model = hls4ml.converters.convert_from_pytorch_model(
            layers, output_dir=str(tmp_path), backend="Vitis", io_type="io_stream", hls_config=config
        )
        model.write()
    assert streams(tmp_path) == (36, 3)


def test_too_few_bits_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    example = torch.rand(6, 3, 8, 8)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)).eval()
    with pytest.raises(ValueError, match=r"with precision='ap_fixed<4,2>' [\d.]+ % of the example's answers change"):
        unskip.export(network, tmp_path / "net", example=example, target=Hls4ml(precision="ap_fixed<4,2>"))
    assert not list(tmp_path.iterdir())


def test_a_pnnh_network_by_its_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = torch.rand(4, 3, 16, 16)
    network = unskip.plainify(cifar_resnet(8, num_classes=10), "pnnh").eval()
    target = Hls4ml(precision="ap_fixed<28,10>", reuse_factor=1)
    project = unskip.export(unskip.fold(network), tmp_path / "net", example=example, target=target)
    assert isinstance(project, HlsProject)
    assert project.fixed_error <= 1e-2
    assert (project.fifos, project.clones) == (25, 0)
