"""`unskip fold` and `unskip export`, from a run to files that onnxruntime runs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

from unskip import create_model
from unskip._core.rng import seeded
from unskip.cli.commands import app
from unskip.io.load import load_model
from unskip.train import load_recipe, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PNNH-20 after an epoch of digits."""
    out = tmp_path_factory.mktemp("run") / "digits"
    run(load_recipe("digits-pnnh-56", model="pnnh_resnet20", epochs=1, warmup_epochs=0.0), out=out, silent=True)
    return out


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def answers(file: Path, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return session.run(None, {"input": x.numpy()})[0]


def test_from_a_run_to_onnx(trained: Path, tmp_path: Path) -> None:
    folded, file = tmp_path / "net.safetensors", tmp_path / "net.onnx"
    shown = invoke("fold", trained, "-o", folded)
    assert shown.startswith("one image of 1 x 8 x 8 ")  # what folding costs
    assert "parameters                          0.13 M        0.27 M     1.9" in shown
    assert "\nThe networks agree: " in shown
    assert f"{folded}: pnnh_resnet20 of digits, folded (dense), " in shown
    shown = invoke("export", folded, "-o", file, "--opset", 20)
    assert shown.startswith("pnnh_resnet20 of digits, folded (dense)\n")
    assert f"{file}: ONNX, opset 20, " in shown
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        y = load_model(str(trained)).model.eval()(x).numpy()
    assert np.abs(answers(file, x) - y).max() <= 1e-4 * np.abs(y).max()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx", "net.safetensors"]


@torch.no_grad()
def test_a_name_with_its_trained_weights(tmp_path: Path) -> None:
    """Without --pretrained they are random, which is said on stderr, since the file does not tell."""
    name, x = "pnnh_resnet20_wide", torch.randn(3, 3, 32, 32)
    wanted = create_model(name, pretrained=True).eval()(x).numpy()
    said = {}
    for file, words in {"trained.onnx": ["--pretrained"], "random.onnx": []}.items():
        result = CliRunner().invoke(app, ["export", name, "-o", str(tmp_path / file), *words], catch_exceptions=False)
        said[file] = result.stderr.splitlines()
    far = {file: np.abs(answers(tmp_path / file, x) - wanted).max() for file in said}
    assert far["trained.onnx"] <= 1e-4 * np.abs(wanted).max()
    assert far["random.onnx"] > 0.1 * np.abs(wanted).max()
    note = f"Note: random weights (seed 0); {name} has trained ones: --pretrained."
    assert said["random.onnx"][0] == note
    assert note not in said["trained.onnx"]


@torch.no_grad()
def test_trained_weights_are_folded(tmp_path: Path) -> None:
    name, out, x = "pnnh_resnet20_wide", tmp_path / "net.safetensors", torch.randn(3, 3, 32, 32)
    invoke("fold", name, "-o", out, "--pretrained")
    wanted = create_model(name, pretrained=True).eval()(x)
    assert (load_model(str(out)).model(x) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    "words", [["export", "-o", "a.onnx"], ["fold", "-o", "a.safetensors"], ["plainify", "--dry-run"], ["doctor"]]
)
def test_pretrained_is_refused_alike(words: list[str], refused: Callable[[list[str]], str]) -> None:
    command = words[0]
    said = refused([*words, "pnnh_resnet20_wide", "--pretrained", "--weights", "a.pt"])
    assert f"{command}: --pretrained and --weights a.pt both say which weights; leave one out." in said
    assert "'pnnh_resnet20' has no pretrained weights" in refused([*words, "pnnh_resnet20", "--pretrained"])


@pytest.mark.full
def test_from_a_run_to_int8(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    words = ["export", trained, "-o", file, "--int8", "--calibrate", "digits", "--calibration-images", 64]
    shown = invoke(*words, "--limit", 100)
    assert "calibrated on 64 inputs" in shown
    assert "Accuracy on 355 inputs: " in shown
    assert "layer3.2.2" in shown
    assert answers(file, torch.rand(3, 1, 8, 8)).shape == (3, 10)


@pytest.mark.full
def test_a_residual_network_by_name_stays_as_it_is(tmp_path: Path) -> None:
    shown = invoke("export", "resnet20", "-o", tmp_path / "net.pt2", "--keep-skips")
    assert shown.startswith("resnet20, as it is (fold: 'layer1.0' (CifarBlock) keeps its skip connection")
    program = torch.export.load(str(tmp_path / "net.pt2"))
    assert program.module()(torch.randn(4, 3, 32, 32)).shape == (4, 10)


def test_skips_are_refused_or_removed(tmp_path: Path, refused: Callable[[list[str]], str]) -> None:
    words = ["export", "resnet20", "-o", str(tmp_path / "net.onnx")]
    assert "keeps 9 skip connections ('layer1.0' first). --method rm removes them" in refused(words)
    assert "method='pnnh' does not keep the network's function" in refused([*words, "--method", "pnnh"])
    assert invoke(*words, "--method", "rm").startswith("resnet20, rm, folded (dense): ")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), seeded(0):
        wanted = create_model("resnet20").eval()(x).numpy()
    assert np.abs(answers(tmp_path / "net.onnx", x) - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fold", "resnet20", "-o", "a.safetensors"], "'layer1.0' (CifarBlock) keeps its skip connection"),
        (["fold", "plain_resnet20", "-o", "a.onnx"], "--out 'a.onnx' must end in .safetensors"),
        (["fold", "plain_resnet20", "-o", "there.safetensors"], "is there already. Choose another --out"),
        (["fold", "plain_resnet20", "-o", "a.safetensors", "--form", "sparse"], "form='sparse' must be 'dense' or"),
        (["fold", "broken.safetensors", "-o", "a.safetensors"], "fold: broken.safetensors "),
        (["fold", "resnet21", "-o", "a.safetensors"], "there is no network named 'resnet21'"),
        (["fold", "tests.doctor.small:Picky", "-o", "a.safetensors"], "say the shape of one with --input-size"),
        (["export", "plain_resnet20", "-o", "a.tflite"], "must end in .onnx"),
        (["export", "plain_resnet20", "-o", "there.safetensors"], "is there already. Choose another --out"),
        (["export", "plain_resnet20", "-o", "a.onnx", "--fold", "yes"], "--fold 'yes' must be auto, dense, fast, no"),
        (["export", "plain_resnet20", "-o", "a.onnx", "--int8"], "--int8 needs --calibrate"),
        (["export", "plain_resnet20", "-o", "a.onnx", "--calibrate", "digits"], "is for --int8; add it"),
        (
            ["export", "plain_resnet20", "-o", "a.onnx", "--int8", "--calibrate", "digits", "--fold", "no"],
            "the images of --calibrate 'digits' have 1 channels",
        ),
        (
            ["export", "plain_resnet20", "-o", "a.onnx", "--int8", "--calibrate", "no.npz", "--fold", "no"],
            "--calibrate 'no.npz' is not 'digits', and there is no such file",
        ),
        (["export", "plain_resnet20", "-o", "a.onnx", "--seed", "-1"], "--seed -1 must not be negative"),
        (["export", "plain_resnet20", "-o", "a.onnx", "--input-size", "3x"], "--input-size '3x' must be whole"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_code_2(
    words: list[str], sentence: str, tmp_path: Path, refused: Callable[[list[str]], str]
) -> None:
    for name in ("there.safetensors", "broken.safetensors"):
        (tmp_path / name).write_text("old")
    assert sentence in refused(words)


def test_a_run_is_calibrated_on_the_set_that_it_was_trained_on(
    trained: Path, refused: Callable[[list[str]], str]
) -> None:
    words = ["export", str(trained), "-o", "a.onnx", "--fold", "no", "--int8", "--calibrate", str(trained)]
    sentence = refused(words)
    assert "trained on digits, and is calibrated on images of the same set" in sentence
    assert "give --calibrate digits instead of" in sentence
