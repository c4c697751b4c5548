"""Network files: what was written is what is read, and what was tampered with is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import unskip
from unskip.io.load import LoadedModel, load_network, save_network
from unskip.io.shipping import Source, fold_to_file
from unskip.train import load_recipe, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PNNH-20 after an epoch of digits, and its folded file beside it."""
    out = tmp_path_factory.mktemp("run") / "digits"
    run(load_recipe("digits-pnnh-56", model="pnnh_resnet20", epochs=1, warmup_epochs=0.0), out=out, silent=True)
    return out


@pytest.fixture(scope="module")
def folded(trained: Path) -> Path:
    out = trained.parent / "folded.safetensors"
    fold_to_file(Source(word=str(trained)), out)
    return out


def metadata(file: Path) -> dict:
    with safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["unskip"])


def test_a_folded_network_comes_back(trained: Path, folded: Path) -> None:
    original, again = load_network(str(trained)), load_network(str(folded))
    x = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        y = original.network.eval()(x)
        assert (again.network(x) - y).abs().max() <= 1e-4 * y.abs().max()
    assert not any("running_mean" in key for key in load_file(folded))  # no norm is left
    assert again.input_size == (1, 8, 8)
    assert again.name == "pnnh_resnet20 of digits, folded (dense)"
    assert again.network.surgery.replaced == original.network.surgery.replaced
    assert not again.network.training
    said = metadata(folded)
    assert said["steps"] == [{"fold": "dense"}]
    assert said["version"] == unskip.__version__
    assert "The networks agree" in said["proof"]
    assert len(said["answer"]) == 20  # two inputs, ten classes


@pytest.mark.full
@pytest.mark.parametrize("form", ["dense", "fast"])
@pytest.mark.parametrize("word", ["pnnh_resnet20", "dirac_resnet20", "cifar_seqnet20", "torchvision:resnet18"])
def test_networks_by_name_come_back(word: str, form: str, tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    subject = load_network(word, method="pnnh" if ":" in word else "", seed=3, input_size=(3, 32, 32))
    subject.network.eval()
    save_network(out, subject, proof="", force=False, command="plainify")
    twice = tmp_path / "folded.safetensors"
    fold_to_file(Source(word=str(out)), twice, form=form)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        y = subject.network(x)
        for file in (out, twice):
            assert (load_network(str(file)).network(x) - y).abs().max() <= 1e-4 * y.abs().max()


def rewrite(file: Path, to: Path, weights: dict | None = None, **changes: object) -> str:
    said = {**metadata(file), **changes}
    save_file(load_file(file) if weights is None else weights, to, metadata={"unskip": json.dumps(said)})
    return str(to)


def test_what_was_tampered_with_is_refused(folded: Path, tmp_path: Path) -> None:
    other, weights = tmp_path / "other.safetensors", load_file(folded)
    wrong = {**weights, "fc.bias": weights["fc.bias"] + 0.01}
    with pytest.raises(ValueError, match=r"answers otherwise than the one that was written"):
        load_network(rewrite(folded, other, wrong))
    with pytest.raises(ValueError, match=r"don't fit what it says they are of: .*fc\.bias"):
        load_network(rewrite(folded, other, {k: v for k, v in weights.items() if k != "fc.bias"}))
    with pytest.raises(ValueError, match=r"its description can't be understood: KeyError"):
        load_network(rewrite(folded, other, format="unskip-network-9"))
    with pytest.raises(ValueError, match=r"its description can't be understood: TypeError"):
        load_network(rewrite(folded, other, more=1))
    with pytest.raises(ValueError, match=r"asks to call 'os:abort', and a file may name no code"):
        load_network(rewrite(folded, other, origin={"word": "os:abort", "seed": 0}))
    with pytest.raises(ValueError, match=r"does not say what its network is built from"):
        load_network(rewrite(folded, other, origin={}))
    other.write_bytes(folded.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"^doctor: .*other.safetensors can't be read as safetensors"):
        load_network(str(other))
    assert load_network(rewrite(folded, other)).name  # and unchanged it is read


def test_a_network_that_can_not_be_built_again_is_not_written(trained: Path, tmp_path: Path) -> None:
    subject, out = load_network(str(trained)), tmp_path / "net.safetensors"
    subject.network.eval()
    out.write_text("old")
    wrong = LoadedModel(**{**vars(subject), "steps": ({"fold": "dense"},)})
    with pytest.raises(ValueError, match=r"don't fit what it says they are of"):
        save_network(out, wrong, proof="", force=True, command="fold")
    own = LoadedModel(**{**vars(subject), "origin": {"word": "mine:net", "seed": 0}})
    with pytest.raises(ValueError, match=r"'mine:net' is code of your own, which a file may not name"):
        save_network(out, own, proof="", force=True, command="fold")
    assert out.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["net.safetensors"]
