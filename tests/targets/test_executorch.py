"""ExecuTorch's own runtime."""

from pathlib import Path

import pytest
import torch

import unskip
from tests.targets.networks import akamaster_resnet20, cifar10, normalised, plain

pytestmark = pytest.mark.targets
pytest.importorskip("executorch.runtime")


def test_resnet20_by_rm_in_one_call(tmp_path: Path) -> None:
    from executorch.runtime import Runtime

    images = normalised(cifar10("test", 4)[0])
    network = plain(akamaster_resnet20(), images)
    done = unskip.export(network, tmp_path / "net.pte", example=images, target="executorch")
    print(f"\n{done}")
    assert done.error <= 2e-5
    method = Runtime.get().load_program(tmp_path / "net.pte").load_method("forward")
    expected = network(images).detach()
    found = torch.cat([method.execute([image[None]])[0].clone() for image in images])
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
