"""Where training starts: trained weights of a name, of a run or of a file, and a recipe for a folder of images."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import unskip
from tests.data.test_sets import write_folder
from tests.train.small import REGISTERED
from unskip.models.build import NetworkConfig, build_network, start_from
from unskip.train import Recipe, load_recipe, run
from unskip.train.recipe import parse_command


def states_agree(model: nn.Module, other: dict[str, torch.Tensor], but: tuple[str, ...]) -> bool:
    return all(torch.equal(value, other[key]) for key, value in model.state_dict().items() if key not in but)


def test_pretrained_weights_are_those_of_the_name() -> None:
    config = NetworkConfig(model="pnnh_resnet20_wide", pretrained=True)
    network = build_network(config, num_classes=4, in_chans=3, allow_import=True)
    theirs = unskip.create_model("pnnh_resnet20_wide", pretrained=True).state_dict()
    assert states_agree(network, theirs, but=("fc.weight", "fc.bias"))
    assert network.fc.weight.shape[0] == 4
    with pytest.raises(ValueError, match="pretrained=true and init_from='x' both say which weights"):
        NetworkConfig(pretrained=True, init_from="x")
    for wrong in (NetworkConfig(pretrained=True), NetworkConfig(init_from="x")):
        with pytest.raises(ValueError, match="would read another file, which a file may not ask for"):
            build_network(wrong, num_classes=4, in_chans=3)


def test_a_head_of_another_width_starts_anew_and_nothing_else_does() -> None:
    source, network = (unskip.create_model("plain_resnet20", num_classes=n) for n in (10, 3))
    head = network.fc.weight.clone()
    note = start_from(network, source.state_dict(), "a.pth")
    assert note == "the head (fc.weight, fc.bias) starts anew, for 3 classes where a.pth has 10"
    assert states_agree(network, source.state_dict(), but=("fc.weight", "fc.bias"))
    assert torch.equal(network.fc.weight, head)
    same = unskip.create_model("plain_resnet20")
    assert start_from(same, source.state_dict(), "a.pth") == ""
    assert states_agree(same, source.state_dict(), but=())
    with pytest.raises(ValueError, match=r"the weights of a.pth are of another network: \d+ differ, "):
        start_from(unskip.create_model("plain_resnet32"), source.state_dict(), "a.pth")


@pytest.mark.parametrize("odd", ["complex", "sparse", "quantised"])
def test_weights_that_would_lose_something_are_a_sentence(odd: str, tmp_path: Path) -> None:
    change = {
        "complex": lambda w: w + 1j,
        "sparse": lambda w: w.to_sparse(),
        "quantised": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
    }[odd]
    network = unskip.create_model("plain_resnet20")
    state = {key: change(w) if key == "fc.weight" else w for key, w in network.state_dict().items()}
    with pytest.raises(ValueError, match=r"the weights of a.pth are of another network: 1 differ, 'fc.weight' first"):
        start_from(network, state, "a.pth")
    if odd == "sparse":  # which `weights_only` does not read
        return
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"'fc.weight' is complex, sparse or quantised"):
        unskip.load("plain_resnet20", weights=tmp_path / "a.pth")


def test_a_run_starts_from_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From its folder and from its weights alone; the learning rate is too small to move them."""
    first = run(REGISTERED.replace(epochs=1), out=tmp_path / "first", silent=True)
    for number, spec in enumerate((first.out, f"{first.out}/weights.safetensors")):
        still = REGISTERED.replace(epochs=1, lr=1e-30, weight_decay=0.0, ema=0.0, init_from=spec)
        again = run(still, out=tmp_path / str(number), silent=True)
        weights, theirs = (dict(unskip.load(result.out).named_parameters()) for result in (again, first))
        assert all(torch.equal(weights[key], theirs[key]) for key in theirs)
    with pytest.raises(ValueError, match="there is no file or run 'gone' to take weights from"):
        run(still.replace(init_from="gone"), out=tmp_path / "none", silent=True)


def test_a_folder_of_images_has_a_recipe(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", ("",), 10)
    assert parse_command([], str(folder)) == ("images-pnnh-20-wide", load_recipe("images-pnnh-20-wide"))
    own = parse_command(["--model", "plain_resnet20", "--image-size", "16"], str(folder))[1]
    assert (own.network.pretrained, own.data.dataset) == (False, "imagefolder")
    assert parse_command(["digits-pnnh-56"], str(folder))[1] == load_recipe("digits-pnnh-56")
    result = run(
        own.replace(epochs=1, batch=4, workers=0, warmup_epochs=0, device="cpu"),
        data_dir=folder,
        out=tmp_path / "run",
        silent=True,
    )
    assert (result.test_images, result.dataset) == (4, "imagefolder")
    loaded = unskip.load(result.out)
    assert loaded(torch.zeros(1, 3, 16, 16)).shape == (1, 2)
    assert unskip.surgery.memory_plan(loaded).tensors[0].shape == (3, 16, 16)  # the size that it was trained on


def test_wandb_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"wandb=true needs that package: pip install 'unskip\[wandb\]'"):
        run(
            Recipe.of(model="plainnet_mlp", options={"depth": 2, "width": 8, "img_size": 8}, epochs=1, wandb=True),
            out=tmp_path,
            silent=True,
        )
