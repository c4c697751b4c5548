"""What the commands of shipping prepare for the functions that they call."""

from pathlib import Path

import pytest

from tests.data.test_sets import write_folder
from unskip.io.shipping import Int8, ModelSource, export_to_file


def test_a_folder_of_images_calibrates(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    source = ModelSource(model_spec="plain_resnet20", input_size=(3, 16, 16))
    int8 = Int8(data=str(write_folder(tmp_path)), inputs=5, limit=100.0)
    _, written = export_to_file(source, tmp_path / "small.onnx", form="no", int8=int8)
    assert written.calibrated == 5
    assert written.accuracy.inputs == 12  # the folder has no test images, so val is tested on
    assert written.accuracy.before is not None
    assert written.metadata["mean"] == "0.485, 0.456, 0.406"
