"""`unskip plainify`: cost, proof and a file that the other commands take."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import unskip
from tests.ship.test_fold import trained
from unskip.cli.commands import app
from unskip.io.load import load_model
from unskip.models.cifar import cifar_resnet


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_from_weights_to_a_plain_network_and_its_folded_form(tmp_path: Path) -> None:
    network = trained(unskip.create_model("resnet20"))
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    plain, folded = tmp_path / "plain.safetensors", tmp_path / "folded.safetensors"
    shown = invoke("plainify", "resnet20", "--weights", tmp_path / "weights.pt", "-o", plain)
    assert "parameters                          0.27 M        0.50 M     1.86" in shown
    assert "The networks agree: " in shown
    assert f"{plain}: resnet20, rm, " in shown
    invoke("fold", plain, "-o", folded)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        y = network(x)
        for file in (plain, folded):
            again = load_model(str(file)).model
            assert (again(x) - y).abs().max() <= 1e-4 * y.abs().max()
            assert not [m for m in again.modules() if type(m) is type(cifar_resnet(8).layer1[0])]
    assert len(again.surgery.replaced) == 9


def test_a_dry_run_says_what_it_costs_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = invoke("plainify", "resnet20", "--dry-run")
    assert "parameters                          0.27 M        0.50 M     1.86" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["pnnh"])
def test_blocks_that_can_not_be_skip_free_are_left_and_named_where_that_is_asked(
    method: str, tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    words = ["plainify", "mobilenetv3_small_050", "--method", method, "--input-size", "3x64x64"]
    sentence = refused([*words, "-o", "net.safetensors"])
    assert "can't make block 'blocks.1.1' of MobileNetV3" not in sentence  # the one without squeeze and excitation
    assert sentence.strip().endswith("--no-strict leaves such blocks as they are.")
    named = "residual blocks that keep their skips (6 of 7): blocks.2.1, blocks.2.2, blocks.3.0, "
    assert named in invoke(*words, "--no-strict", "--dry-run")
    assert named in invoke(*words, "--no-strict", "-o", tmp_path / "net.safetensors")
    loaded = load_model(str(tmp_path / "net.safetensors"))  # which compares its answer with the file's
    assert loaded.name == f"mobilenetv3_small_050, {method} (6 of 7 blocks keep their skips)"
    assert loaded.model.surgery.replaced == ("blocks.1.1",)
    assert len(loaded.model.surgery.left) == 6


@pytest.mark.full
def test_a_method_for_training_from_scratch_says_so(tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    shown = invoke("plainify", "resnet20", "--method", "pnnh", "--options", "{ratio = 0.25}", "-o", out)
    assert "Method 'pnnh' is for training from scratch" in shown
    assert load_model(str(out)).model.surgery.method.ratio == 0.25


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["resnet20"], "there is no --out; name a .safetensors file, or ask what it would cost with --dry-run"),
        (["resnet20", "-o", "a.pt"], "--out 'a.pt' must end in .safetensors"),
        (
            ["resnet20", "-o", "there.safetensors"],
            "is there already. Choose another --out",
        ),
        (["resnet20", "-o", "a.safetensors", "--limit", "1.5"], "1.9 times its parameters, more than limit=1.5"),
        pytest.param(
            ["resnet50", "-o", "a.safetensors"],
            "plainify: the network would have 10.9 times its parameters, more than limit=4",
            marks=pytest.mark.full,
        ),
        (["resnet20", "-o", "a.safetensors", "--method", "mr"], "method='mr' is not known"),
        (["resnet20", "-o", "a.safetensors", "--options", "norm"], "--options 'norm' must be a table"),
        (["resnet20", "-o", "a.safetensors", "--options", "{nrom = 1}"], "method 'rm' has no option 'nrom'"),
        (["resnet20", "--dry-run", "--method", "pnnh", "--limit", "3"], "method 'pnnh' has no option 'limit'"),
        (["plain_resnet20", "-o", "a.safetensors"], "no residual connection that can be removed"),
        (["res2net50_26w_4s", "--dry-run"], "plainify: method 'rm' can't make block 'layer1.0'"),
        (
            ["res2net50_26w_4s", "--no-strict", "-o", "a.safetensors"],
            "'rm' can make no block of res2net50_26w_4s skip-free",
        ),
        (["hostile.pt", "-o", "a.safetensors"], "plainify: hostile.pt is no checkpoint"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_code_2(
    words: list[str], sentence: str, tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    (tmp_path / "there.safetensors").write_text("old")
    torch.save(cifar_resnet(8), tmp_path / "hostile.pt")  # a pickle of code
    assert sentence in refused(["plainify", *words])
