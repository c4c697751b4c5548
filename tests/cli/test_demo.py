"""`unskip demo`: the whole of it, small in the quick suite, and as it is with three seeds in the full one."""

import json
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from unskip.cli import main
from unskip.demo import story as demo
from unskip.train import load_recipe


class Tags(HTMLParser):
    """Collects what a page refers to, and checks that its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [
            v or "" for k, v in attrs if k in ("src", "href", "xlink:href") and not (v or "").startswith("#")
        ]
        if tag not in ("meta", "path", "use", "rect", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


def run_demo(seed: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", ["unskip", "demo", "--seed", str(seed), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    return json.loads((out / "demo.json").read_text())


def check_files(out: Path) -> None:
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "index.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.links == []  # self-contained
    assert tags.open == []
    for word in (
        "What this is, and what it is not",
        "unskip train ",
        "3x the epochs",
        "before any training",
    ):
        assert word in page
    assert f"--out {out}" not in page, "that folder is taken: the command would be refused"
    assert "--out runs/plain" in page


@pytest.mark.full
def test_a_small_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """20 layers, one epoch; every part of the real one runs."""
    recipe = tmp_path / "small.toml"
    recipe.write_text(load_recipe(demo.RECIPE, epochs=1, batch=256, warmup_epochs=0.0).to_toml())
    monkeypatch.setattr(demo, "RECIPE", str(recipe))
    variants = tuple(replace(variant, network=variant.network.replace("56", "20")) for variant in demo.VARIANTS)
    monkeypatch.setattr(demo, "VARIANTS", variants)
    import unskip.demo.page

    monkeypatch.setattr(unskip.demo.page, "VARIANTS", variants)
    out = tmp_path / "unskip-demo"
    numbers = run_demo(0, out, monkeypatch)
    networks = numbers["networks"]
    assert isinstance(networks, dict)
    assert [networks[key]["epochs"] for key in ("plain", "pnnh", "residual", "plain-3x")] == [1, 1, 1, 3]
    assert networks["plain"]["trained_parameters"] == networks["residual"]["trained_parameters"]
    assert networks["pnnh"]["trained_parameters"] < 0.6 * networks["plain"]["trained_parameters"]
    assert (networks["pnnh"]["skips"], networks["residual"]["skips"]) == ("none", "all")
    check_files(out)
    assert (out / "doctor.html").read_text().count('<article class="verdict') == 2
    shown = capsys.readouterr().out
    assert "test error" in shown
    assert str(out / "index.html") in shown
    assert str(out / "doctor.html") in shown
    left = {p.name for p in out.iterdir()}
    demo.clear(out)  # a second demo starts from here: runs are gone, nothing else
    assert {p.name for p in out.iterdir()} == left
    assert not (out / "plain" / "checkpoint.pt").exists()


@pytest.mark.parametrize("seed", range(3))
def test_why_the_plain_network_fails_is_there_before_training(seed: int) -> None:
    recipe = load_recipe(demo.RECIPE, seed=seed)
    data = demo.load(recipe.data)
    ratio = {w.key: demo.facts_about(w.network, recipe, data).noise_to_signal for w in demo.VARIANTS[:3]}
    assert ratio["plain"][55] > 0.7
    assert ratio["pnnh"][55] < 0.3
    assert ratio["residual"][55] < 0.3
    for by_depth in ratio.values():
        assert by_depth[1] < 0.05  # after the stem nothing is lost yet
        assert list(by_depth) == list(range(1, 56, 2))


def test_a_failing_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="can't be written"):
        demo.train_all(0, tmp_path / "file" / "below", lambda tracks: None)
    with pytest.raises(ValueError, match="seed=-1"):
        demo.train_all(-1, tmp_path, lambda tracks: None)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_the_demo_tells_the_truth(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    numbers = run_demo(seed, tmp_path / "demo", monkeypatch)
    networks = numbers["networks"]
    assert isinstance(networks, dict)
    error = {key: networks[key]["test_error"] for key in networks}
    assert error["pnnh"] < 5
    assert error["residual"] < 5
    assert error["plain"] - max(error["pnnh"], error["residual"]) >= 20
    assert networks["plain-3x"]["epochs"] == 3 * networks["plain"]["epochs"]
    check_files(tmp_path / "demo")
    print(f"seed {seed}: {error}, {time.monotonic() - began:.0f} s")
