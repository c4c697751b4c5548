"""A text as a data set: its parts, what is fed, and what is refused; and a small GPT that learns it."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from unskip.data.config import DataConfig
from unskip.data.feed import TextFeed, make_feed
from unskip.data.sets import find_kind, load
from unskip.train import Recipe, run

TEXT = "".join(f"Zeile {i}: äöü and {i * i}.\n" for i in range(400))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def config(**fields: object) -> DataConfig:
    return DataConfig(dataset="text", **{"context": 16, "val_fraction": 0.05, **fields})


def test_the_parts_of_a_text_stand_in_order(file: Path) -> None:
    data = load(config(), file)
    assert find_kind(file) == "text"
    assert load(config(), file.parent).fingerprint() == data.fingerprint()
    parts = [data.train, data.val, data.test]
    whole = "".join(data.vocabulary[i] for part in parts for i in part.labels.tolist())
    assert whole == TEXT
    assert data.vocabulary == tuple(sorted(set(TEXT)))
    assert len(data.train) / len(TEXT) == pytest.approx(0.9, abs=0.001)
    share = [n / len(data.train) for n in Counter(TEXT[: len(data.train)]).values()]
    assert data.chance_loss == pytest.approx(-sum(p * math.log(p) for p in share))  # that of single characters

    raw = TEXT.encode()
    data = load(config(tokens="bytes", val_fraction=0.0), file)
    assert data.val is None
    assert bytes(torch.cat([data.train.labels, data.test.labels]).tolist()) == raw
    assert data.classes == 256


def test_a_feed_gives_each_piece_once_with_the_next_tokens(file: Path) -> None:
    data = load(config(), file)
    feed = make_feed(data, config(), batch=8, seed=3)
    assert isinstance(feed, TextFeed)
    text = "".join(map(chr, data.train.labels.tolist()))
    starts = []
    for x, y in feed.epoch(0):
        assert x.shape == y.shape == (8, 16)
        assert torch.equal(x[:, 1:], y[:, :-1])
        starts += [
            text.find("".join(map(chr, [*piece, int(last)]))) for piece, last in zip(x.tolist(), y[:, -1], strict=True)
        ]
    assert -1 not in starts
    assert len(set(starts)) > 0.9 * len(starts)  # pieces may read alike
    assert len(starts) == feed.steps * 8 > 0.9 * len(text) / 16 - 8
    again = list(feed.epoch(1, 5))
    assert torch.equal(again[0][0], list(feed.epoch(1))[5][0])

    seen = sum(int(weight.sum()) for _, _, weight in feed.evaluation(data.test))
    assert seen == (len(data.test) - 1) // 16


def test_what_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too few for context=4000 and the token after it"):
        load(config(context=4000), file)
    file.write_bytes(b"\xff\xfe" * 500)
    with pytest.raises(ValueError, match=r"no text in UTF-8 .* tokens = 'bytes' reads any file"):
        load(config(), file)
    file.write_text("a" * 999)
    with pytest.raises(ValueError, match="has 1 different characters"):
        load(config(), file)
    (tmp_path / "other.txt").write_text("b")
    with pytest.raises(ValueError, match=r"must be a \.txt file, or a folder with one in it"):
        load(config(), tmp_path)
    file.write_text(TEXT)
    data = load(config(), file)
    with pytest.raises(ValueError, match="mixup, cutmix and repeats are for images"):
        make_feed(data, config(flip=0.5), batch=8)
    with pytest.raises(ValueError, match=r"batch=4096 is larger than the training text"):
        make_feed(data, config(), batch=4096)


@pytest.mark.parametrize("tokens", ["characters", "bytes"])
def test_a_text_is_refused_by_the_memory_that_its_tokens_take(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token takes eight bytes and more, so a text far below the limit would fill the memory."""
    monkeypatch.setenv("UNSKIP_MAX_GIB", "0.5")
    path = tmp_path / "long.txt"
    with open(path, "wb") as text:
        text.truncate(100 << 20)
    with pytest.raises(ValueError, match=r"long\.txt would take \S+ GiB of memory, and at most 0\.5 are allowed"):
        load(config(tokens=tokens), path)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_skip_free_gpt_learns_a_text_goes_on_and_writes(file: Path, tmp_path: Path, optimizer: str) -> None:
    sizes = {"width": 16, "depth": 3, "heads": 2, "context": 16, "hidden": {"16": 40}}
    recipe = Recipe.of(
        model="pnnh_gpt_small_char", options=sizes, dataset="text", context=16, val_fraction=0.05, optimizer=optimizer,
        lr=0.01, momentum=0.9, beta2=0.95, epochs=2, batch=32, device="cpu", keep="best",
    )  # fmt: skip
    result = run(recipe, data_dir=file, out=tmp_path / "whole", silent=True)
    assert not result.stuck
    assert result.test_loss < 2.0 < load(config(), file).chance_loss
    assert f"perplexity {math.exp(result.test_loss):.2f}" in str(result)
    assert len(result.sample) == 16 + 200
    assert result.sample.startswith("".join(TEXT[-len(load(config(), file).test) :][:16]))
    again = run(recipe.replace(log_steps=7), data_dir=file, out=tmp_path / "again", silent=True)
    assert again.test_loss == result.test_loss
