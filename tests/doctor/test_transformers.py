"""The doctor on transformers: rank collapse, texts as data, and the first updates of an optimizer."""

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import unskip
import unskip.doctor.page
from unskip.doctor.batches import load_batch
from unskip.doctor.examine import InputSpec, examine
from unskip.doctor.verdict import RANK_COLLAPSE
from unskip.io.load import load_model
from unskip.models.gpt import GPT

SIZES = "depth=8,width=32,heads=4,context=32"
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def report(name: str, data: Path | str | None = None, **more: object) -> unskip.doctor.Report:
    inputs = InputSpec(data=None if data is None else str(data), batch_size=16, measures=("tokens",), **more)
    return examine(f"{name}:{SIZES}", inputs)[0]


def test_a_plain_gpt_is_told_that_its_tokens_become_alike(text: Path) -> None:
    found = report("plain_gpt_small_char", text)
    verdict = found.verdict
    assert (verdict.outcome, verdict.mechanism, verdict.measures[0]) == ("fails", "rank collapse", "token_spread")
    assert "the tokens of an input become alike" in verdict.summary
    spread = found.measured.series["token_spread"].by_layer()
    assert verdict.layer is not None
    assert spread[verdict.layer] < RANK_COLLAPSE.at
    assert f"{spread['norm']:.2g} at the last hidden layer" in verdict.summary
    (proposed,) = [line for line in verdict.remedies if "plainify" in line]
    rebuilt = unskip.plainify(GPT(width=32, depth=2, heads=4, context=32), method="pnnh", attention="shaped")
    assert "unskip.plainify(model, method='pnnh', attention='shaped')" in proposed
    assert rebuilt.surgery.kept == {}
    assert "rank collapse" in unskip.doctor.page.render([found])
    assert "Do the tokens of an input stay different?" in unskip.doctor.page.render([found])


@pytest.mark.parametrize("name", ["gpt_small_char", "pnnh_gpt_small_char"])
def test_gpts_that_start_are_not_condemned(name: str, text: Path) -> None:
    for data in (text, None):  # random tokens, without data
        assert report(name, data).verdict.outcome == "trains"


def test_a_vit_that_trains_is_not_condemned() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4)
    verdict = unskip.diagnose(model, torch.randn(16, 3, 64, 64), measures=[]).verdict
    assert verdict.mechanism != "rank collapse"
    plain = unskip.plainify(model, "plain", attention="plain")
    verdict = unskip.diagnose(plain, torch.randn(16, 3, 64, 64), measures=[]).verdict
    assert (verdict.outcome, verdict.mechanism) == ("fails", "rank collapse")


def test_a_text_is_read_with_its_next_characters(text: Path) -> None:
    loaded = load_model(f"gpt_small_char:{SIZES}", command="doctor")
    assert loaded.input_size == (32,)  # context
    batch = load_batch(loaded, str(text), size=8)
    assert batch.description == "characters of text.txt"
    letters = sorted(set(TEXT))
    for ids, following in zip(batch.images, batch.targets, strict=True):
        assert "".join(letters[i] for i in ids) in TEXT
        assert torch.equal(ids[1:], following[:-1])
    loss = unskip.diagnose(loaded.model, batch.images, batch.targets, measures=[]).measured.numbers["loss"]
    logits = loaded.model.train()(batch.images)
    expected = nn.CrossEntropyLoss()(logits.flatten(0, 1), batch.targets.flatten())
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_texts_that_can_not_be_read(tmp_path: Path, text: Path) -> None:
    loaded = load_model(f"gpt_small_char:{SIZES},num_classes=9", command="doctor")
    with pytest.raises(ValueError, match=r"has \d\d different characters, and .* knows 9; give --num-classes"):
        load_batch(loaded, str(text))
    with pytest.raises(ValueError, match=r"reads tokens, and --data '.*' is no text: there is no such file"):
        load_batch(loaded, str(tmp_path / "none.txt"))


def test_an_optimizer_that_makes_tokens_alike_is_named(text: Path) -> None:
    def adamw(lr: float):
        return lambda model: torch.optim.AdamW(model.parameters(), lr=lr)

    found = report("pnnh_gpt_small_char", text, optimizer=adamw(3e-2))
    assert (found.verdict.outcome, found.verdict.mechanism, found.verdict.layer) == ("fails", "rank collapse", "norm")
    assert "with this optimizer and learning rate" in found.verdict.summary
    assert found.measured.numbers["token_spread_updated"] < 0.05
    factor = found.measured.numbers["starting_rate_factor"]
    assert factor < 1
    assert "(tried)" in found.verdict.remedies[0]
    found = report("pnnh_gpt_small_char", text, optimizer=adamw(3e-2 * factor))
    assert found.verdict.outcome == "trains"
    assert found.measured.numbers["token_spread_updated"] >= 0.05


def test_without_tokens_an_optimizer_changes_nothing() -> None:
    images: Tensor = torch.randn(16, 3, 32, 32)
    found = unskip.diagnose(
        unskip.create_model("resnet20"), images, measures=[], optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1)
    )
    assert any("first updates of the optimizer are not looked at" in note for note in found.measured.notes)
