"""Networks from a description: what is built, and what a description from a file may not ask for."""

import sys
from pathlib import Path

import pytest
import torch
import torchvision

from unskip.models import create_model
from unskip.models.build import LOADING, NetworkConfig, build_network


def test_a_registered_name_torchvisions_and_a_method() -> None:
    x = torch.randn(2, 3, 32, 32)
    for model, theirs in {
        "resnet20": lambda: create_model("resnet20", num_classes=7, in_chans=3),
        "test_resnet": lambda: create_model("test_resnet", num_classes=7, in_chans=3),  # timm's
        "torchvision:resnet18": lambda: torchvision.models.resnet18(num_classes=7),
    }.items():
        torch.manual_seed(0)
        ours = build_network(NetworkConfig(model=model), num_classes=7, in_chans=3).eval()
        torch.manual_seed(0)
        assert torch.equal(ours(x), theirs().eval()(x))
    plain = NetworkConfig(model="resnet20", method="pnnh", options={"ratio": 0.25})
    assert str(plain) == "resnet20, pnnh"
    ours = build_network(plain, num_classes=10, in_chans=1)
    theirs = create_model("pnnh_resnet20", num_classes=10, in_chans=1, ratio=0.25)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("method", ["", "pnnh"])
def test_code_is_imported_only_where_that_is_allowed(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nfrom unskip.models import create_model\n"
        "Path(__file__).with_name('imported').touch()\n"
        "def build(**sizes):\n    return create_model('resnet20', **sizes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = NetworkConfig(model="mine:build", method=method)
    with pytest.raises(ValueError, match="model='mine:build' names code, which is not run from a file"):
        build_network(config, num_classes=10, in_chans=1)
    assert "mine" not in sys.modules
    assert not (tmp_path / "imported").exists()
    network = build_network(config, num_classes=10, in_chans=1, allow_import=True)
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert (tmp_path / "imported").exists()
    del sys.modules["mine"]


@pytest.mark.parametrize("option", sorted(LOADING))
def test_options_that_read_other_files_are_refused(option: str) -> None:
    config = NetworkConfig(model="test_resnet", options={option: "evil.pth"})
    with pytest.raises(ValueError, match=rf"options\['{option}'\] would read another file"):
        build_network(config, num_classes=10, in_chans=3)


@pytest.mark.parametrize(
    ("model", "in_chans", "message"),
    [
        ("resnet21", 3, "no network named 'resnet21'. Did you mean"),
        ("torchvision:resnet19", 3, "torchvision has no network 'resnet19'. Did you mean"),
        ("torchvision:resnet18", 1, "reads images of 3 channels, and these have 1"),
        ("torch.hub:load", 3, "names code"),
        ("hf-hub:timm/resnet18", 3, "names code"),
        (":", 3, "names code"),
    ],
)
def test_refused(model: str, in_chans: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_network(NetworkConfig(model=model), num_classes=10, in_chans=in_chans)


@pytest.mark.parametrize("model", ["nowhere:build", "math:nothing", ":", "math:"])
def test_what_can_not_be_imported_is_a_sentence(model: str) -> None:
    with pytest.raises(ValueError, match=f"model='{model}' can't be imported: .* package.module:function"):
        build_network(NetworkConfig(model=model), num_classes=10, in_chans=3, allow_import=True)
