"""The page in a real Chromium, offline."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.browser import Visit, launch
from tests.doctor.reports import HOSTILE, report

OTHER = tuple(f"blocks.{i}.mlp" for i in range(24))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch() as running:
        yield running


@pytest.fixture
def two(browser: Any, tmp_path: Path) -> Visit:
    file = tmp_path / "two.html"
    report("first").to_html(file, against=report("second", names=OTHER, suspect=None, outcome="trains", scale=2.0))
    return Visit(browser, file)


def test_it_opens_without_a_complaint_and_asks_for_nothing(two: Visit) -> None:
    assert two.complaints == []
    assert [url for url in two.requests if not url.startswith(("file:", "data:"))] == []
    assert two.page.title() == "first and second · unskip doctor"
    assert two.page.locator("article.verdict").count() == 2
    first = two.page.locator("main > *").first
    assert "Most likely won't train" in first.inner_text()  # the verdict comes before everything else


def test_each_plot_has_its_marks(two: Visit) -> None:
    def count(plot: str, network: int, color: str, width: float) -> int:
        marks = two.marks(plot, network)
        return sum(m["fill"] == color and m["width"] <= width and m["height"] <= width for m in marks)

    assert count("noise_to_signal", 0, "var(--a)", 6) == 12
    assert count("noise_to_signal", 1, "var(--b)", 6) == 24
    # Of 12 layers one is NaN and three can't stand on a logarithmic axis: those are triangles at its edges.
    assert count("gradient_norm", 0, "var(--a)", 6) == 8
    triangles = [m for m in two.marks("gradient_norm") if m["stroke"] == "var(--a)" and m["fill"] == "var(--card)"]
    assert len(triangles) == 3
    lines = [m for m in two.marks("noise_to_signal") if m["stroke"] == "var(--a)" and m["width"] > 100]
    assert len(lines) == 1
    bars = two.page.evaluate(
        "document.querySelector('.plot[data-plot=odd_measure]').querySelectorAll('[stroke-opacity=\"0.45\"]').length"
    )
    assert bars == 6


def test_two_networks_share_a_scale(two: Visit) -> None:
    """1.5^11 · 1 and 2 · 1.5^11 at layer 12 stand at heights in that proportion, since the axis starts at 0."""

    def heights(network: int) -> list[float]:
        color = ("var(--a)", "var(--b)")[network]
        marks = [m for m in two.marks("noise_to_signal", network) if m["fill"] == color and m["width"] <= 6]
        return [m["y"] for m in sorted(marks, key=lambda m: m["x"])]

    one, other = heights(0), heights(1)
    per_unit = (other[0] - other[23]) / (2 * 1.5**23 - 2)
    assert one[0] - one[11] == pytest.approx(per_unit * (1.5**11 - 1), abs=1.5)


def picked_x(visit: Visit, plot: str, network: int) -> float:
    """Where the ring around the picked point stands."""
    (ring,) = [m for m in visit.marks(plot, network) if m["stroke"] == "var(--pick)" and 5 < m["width"] < 20]
    return ring["x"]


def point_x(visit: Visit, plot: str, network: int, index: int) -> float:
    color = ("var(--a)", "var(--b)")[network]
    marks = [m for m in visit.marks(plot, network) if m["fill"] == color and m["width"] <= 6]
    return sorted(m["x"] for m in marks)[index]


def test_the_layer_picked_is_the_layer_shown(two: Visit) -> None:
    page = two.page
    assert set(two.shown()) == {"layer5.conv", "blocks.10.mlp"}  # the suspect first; 5 of 11 is 10 of 23
    page.get_by_label("Layer of first").select_option(label="layer9.conv")
    two.wait_for("layer9.conv")
    assert set(two.shown()) == {"layer9.conv", "blocks.19.mlp"}
    value = page.locator(".now").first.inner_text()
    assert value == "layer9.conv: 38.4"  # 1.5^9
    assert picked_x(two, "noise_to_signal", 0) == pytest.approx(point_x(two, "noise_to_signal", 0, 9), abs=1)
    assert picked_x(two, "noise_to_signal", 1) == pytest.approx(point_x(two, "noise_to_signal", 1, 19), abs=1)
    assert page.get_by_label("Position in first").get_attribute("aria-valuetext") == "layer9.conv"
    page.locator("button.where").click()
    two.wait_for("layer5.conv")


def test_arrow_keys_move_through_all_plots(two: Visit) -> None:
    page = two.page
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    two.wait_for("layer7.conv")
    page.keyboard.press("ArrowLeft")
    two.wait_for("layer6.conv")
    page.get_by_label("Position in second").focus()
    page.keyboard.press("End")
    two.wait_for("layer11.conv")
    assert set(two.shown()) == {"layer11.conv", "blocks.23.mlp"}
    page.keyboard.press("ArrowRight")  # there is nothing beyond the end
    assert set(two.shown()) == {"layer11.conv", "blocks.23.mlp"}


def test_a_click_picks_the_layer_and_a_hover_names_it(two: Visit) -> None:
    page = two.page
    place = page.locator(".plot[data-plot=noise_to_signal][data-network='0']")
    x = point_x(two, "noise_to_signal", 0, 3)
    place.click(position={"x": x, "y": 100})
    two.wait_for("layer3.conv")
    place.hover(position={"x": point_x(two, "noise_to_signal", 0, 8), "y": 90})
    tip = page.locator(".tip:visible")
    tip.wait_for()
    assert tip.locator("b").inner_text() == "layer8.conv"
    assert "25.6" in tip.inner_text()  # 1.5^8


def test_the_numbers_behind_a_plot(two: Visit) -> None:
    page = two.page
    figure = page.locator("figure", has=page.locator(".plot[data-plot=gradient_norm][data-network='0']"))
    figure.locator("summary").click()
    rows = figure.locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 12
    texts = [rows.nth(i).inner_text().split("\t") for i in (0, 1, 2, 3, 8)]
    assert texts == [
        ["layer0.conv", "0"],
        ["layer1.conv", "infinity"],
        ["layer2.conv", "not measured"],
        ["layer3.conv", "minus infinity"],
        ["layer8.conv", "1"],
    ]
    assert figure.locator("tr.picked th").inner_text() == "layer5.conv"
    label = figure.locator(".plot").get_attribute("aria-label")
    assert label is not None
    assert "lowest 0 at layer0.conv, highest 1000 at layer11.conv" in label


def test_a_kind_of_layers_can_be_hidden(browser: Any, tmp_path: Path) -> None:
    one = report()
    layers = tuple(replace(layer, kind="norm" if i % 3 else "conv") for i, layer in enumerate(one.measured.layers))
    replace(one, measured=replace(one.measured, layers=layers)).to_html(tmp_path / "one.html")
    visit = Visit(browser, tmp_path / "one.html")

    def points() -> int:
        return sum(m["fill"] == "var(--a)" and m["width"] <= 6 for m in visit.marks("noise_to_signal"))

    assert points() == 12
    visit.page.get_by_role("checkbox", name="norm").uncheck()
    assert points() == 4
    assert visit.shown()[0] == "layer5.conv"  # the picked layer stays
    visit.page.get_by_role("checkbox", name="norm").check()
    assert points() == 12
    assert visit.complaints == []


@pytest.mark.parametrize(("last", "lines"), [(8, 2), (11, 1)])
def test_no_line_joins_layers_that_lie_far_apart(browser: Any, tmp_path: Path, last: int, lines: int) -> None:
    one = report()
    kinds = {0: "norm", last: "norm"}
    layers = tuple(replace(layer, kind=kinds.get(i, "conv")) for i, layer in enumerate(one.measured.layers))
    replace(one, measured=replace(one.measured, layers=layers)).to_html(tmp_path / "one.html")
    visit = Visit(browser, tmp_path / "one.html")
    drawn = [m for m in visit.marks("noise_to_signal") if m["stroke"] == "var(--a)" and m["width"] > 100]
    assert len(drawn) == lines
    assert visit.complaints == []


def test_hostile_names_do_nothing(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "evil.html"
    report(HOSTILE[1], names=HOSTILE).to_html(file, against=report(HOSTILE[2], names=HOSTILE))
    visit = Visit(browser, file)
    page = visit.page
    for i in range(len(HOSTILE)):
        page.get_by_label("Layer of ").first.select_option(index=i)
    for summary in page.locator("summary").all():
        summary.click()
    page.locator(".plot[data-plot]").first.hover()
    page.locator(".tip:visible").wait_for()
    shown = page.locator("select").first.locator("option").all_text_contents()
    assert [text.replace("\ufffd", "\0") for text in shown] == list(HOSTILE)
    assert page.evaluate("window.broken") is None
    assert page.locator("img, main script, svg[onload]").count() == 0
    assert visit.complaints == []


def test_every_control_has_a_name(two: Visit) -> None:
    names = two.page.evaluate(
        """[...document.querySelectorAll("select, input, button, [role=img], [tabindex]")].map(
            n => n.getAttribute("aria-label") || n.textContent)"""
    )
    assert len(names) >= 12
    assert all(name.strip() for name in names)
    levels = two.page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(n => Number(n.tagName[1]))")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


@pytest.mark.parametrize("width", [320, 390, 800, 1600])
def test_nothing_sticks_out(browser: Any, tmp_path: Path, width: int) -> None:
    file = tmp_path / "one.html"
    long = tuple(f"{'module.' * 20}layer{i}" for i in range(12))
    report("net" * 40, names=long).to_html(file, against=report("b"))
    visit = Visit(browser, file, viewport={"width": width, "height": 800})
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


def test_dark_and_print_have_colours_of_their_own(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "one.html"
    report().to_html(file)
    visit = Visit(browser, file, color_scheme="dark")

    def colors() -> list[str]:
        return visit.page.evaluate(
            """[getComputedStyle(document.body).backgroundColor,
                getComputedStyle(document.querySelector(".plot svg path[stroke='var(--a)']")).stroke]"""
        )

    dark = colors()
    visit.page.emulate_media(media="print")
    printed = colors()
    assert sum(map(int, dark[0][4:-1].split(", "))) < 150
    assert printed[0] == "rgb(255, 255, 255)"
    assert dark[1] != printed[1]
    assert not visit.page.locator("#picker").is_visible()
    assert visit.page.pdf().startswith(b"%PDF")
