"""QONNX's own executor, and the transformations that its users begin with."""

from pathlib import Path

import pytest

import unskip
from tests.targets.networks import akamaster_resnet20, cifar10, normalised, plain

pytestmark = pytest.mark.targets
pytest.importorskip("qonnx")


def test_resnet20_by_rm_is_run_by_qonnx_and_can_be_cleaned_and_brought_to_channels_last(tmp_path: Path) -> None:
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.transformation.channels_last import ConvertToChannelsLastAndClean
    from qonnx.util.cleanup import cleanup_model

    images = normalised(cifar10("test", 4)[0])
    network = plain(akamaster_resnet20(), images)
    done = unskip.export(network, tmp_path / "net.onnx", example=images, target="qonnx")
    print(f"\n{done}")
    assert "and qonnx 1." in done.ran_by
    assert done.error <= 2e-5
    model = cleanup_model(ModelWrapper(str(tmp_path / "net.onnx")))
    last = model.transform(ConvertToChannelsLastAndClean(make_input_channels_last=True))
    assert last.get_tensor_shape(last.graph.input[0].name) == [1, 32, 32, 3]
    assert "Identity" not in {node.op_type for node in last.graph.node}
