"""The HTML page is self-contained and small, and escapes names."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.doctor.reports import HOSTILE, report
from unskip.doctor import page


class Reader(HTMLParser):
    """Elements with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self.inside == "script" else self.words).append(data)

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


def test_the_page_loads_no_other_files() -> None:
    text = page.render([report("one"), report("two", outcome="trains", suspect=None)])
    for tag, attributes in Reader(text).elements:
        for key in ("src", "href", "action", "data", "srcset"):
            assert attributes.get(key) in (None, "data:,", "#plots"), (tag, attributes)
    css = "".join(re.findall(r"<style>(.*?)</style>", text, re.S))
    assert "url(" not in css
    assert "@import" not in css


def test_only_the_two_scripts_of_the_page_may_run() -> None:
    """The content security policy lists their hashes, so an injected script would not run."""
    reader = Reader(page.render([report()]))
    (policy,) = [a["content"] for tag, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    allowed = re.search(r"script-src (.*)$", policy)
    assert allowed is not None
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in reader.scripts[1:]]
    assert allowed[1].split() == [f"'sha256-{digest}'" for digest in digests]


def test_hostile_names_stay_text() -> None:
    honest = page.render([report(names=tuple(f"layer{i}" for i in range(len(HOSTILE)))), report()])
    evil = page.render([report(HOSTILE[1], names=HOSTILE), report(HOSTILE[2])])
    tags = [[tag for tag, _ in Reader(text).elements] for text in (honest, evil)]
    assert tags[0] == tags[1]
    networks = Reader(evil).data["networks"]
    assert [layer["name"] for layer in networks[0]["layers"]] == list(HOSTILE)
    assert networks[0]["name"] == HOSTILE[1]
    assert "<!--" not in evil.split('id="data">')[1].split("</script>")[0]


def test_plots_get_the_measured_values() -> None:
    one = report()
    data = Reader(page.render([one])).data
    (network,) = data["networks"]
    assert [layer["name"] for layer in network["layers"]] == [layer.name for layer in one.measured.layers]
    for name, series in one.measured.series.items():
        drawn = network["series"][name]
        assert [network["layers"][x]["name"] for x in drawn["x"]] == list(series.layers)
        for value, shown in zip(series.values, drawn["y"], strict=True):
            if math.isfinite(value):
                assert shown == pytest.approx(value, rel=1e-3)
            else:
                assert shown == (None if math.isnan(value) else ("inf" if value > 0 else "-inf"))
    assert network["layers"][network["suspect"]]["name"] == one.verdict.layer
    plots = [plot["name"] for group in data["groups"] for plot in group["plots"]]
    assert sorted(plots) == sorted(set(one.measured.series) - {"nowhere"})  # each once, known to the page or not


def test_the_verdict_can_be_read_without_javascript() -> None:
    text = page.render([report("some net", outcome="doubtful")])
    words = " ".join(Reader(text.split("<script")[0]).words)
    for part in (
        "Doubtful",
        "some net will do what it will do.",
        "Dissipating",
        "layer5.conv",
        "75 %",
        "1,234",
        "Loss on this batch",
    ):
        assert part in words


@pytest.mark.parametrize("layers", [200, 6000])
def test_a_page_stays_below_its_limit(layers: int) -> None:
    """With too many layers, plots show a part of them and a note says so."""
    many = tuple(f"a.rather.long.path.to.a.layer.{i}.conv" for i in range(layers))
    big = report(names=many)
    for i in range(20):
        more = replace(big.measured.series["noise_to_signal"], name=f"more_{i}")
        big.measured.series[more.name] = more
    text = page.render([big, big])
    assert len(text.encode()) <= page.MAX_BYTES == 1_500_000
    shown = Reader(text).data["networks"][0]
    step = math.ceil(layers / len(shown["layers"]))
    assert [layer["name"] for layer in shown["layers"]] == list(many[::step])
    assert (f"one layer in {step}," in text) == (step > 1) == (layers > 1000)
    assert shown["series"]["noise_to_signal"]["x"] == list(range(len(shown["layers"])))


def test_a_file_that_can_not_be_written_raises_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^doctor: the file .* can't be written: .*choose another place\.$"):
        report().to_html(tmp_path / "nowhere" / "report.html")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ValueError, match=r"can't be written"):
        report().to_html(tmp_path / "report.html")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
