"""The demo's page in a real browser: it fits a phone, a desk and a sheet of paper."""

from pathlib import Path

from tests.doctor.browser import launch
from unskip.demo import story as demo
from unskip.demo.page import page
from unskip.train import load_recipe


def story() -> demo.Story:
    """Numbers like those of a real demo; no training."""
    recipe = load_recipe(demo.RECIPE)
    tracks = {variant.key: demo.start(variant, recipe, 0, Path("unskip-demo")) for variant in demo.VARIANTS}
    for track in tracks.values():
        track.rows = [{"kind": "epoch", "epoch": e, "error": 90 - e} for e in range(1, track.epochs + 1)]
        track.result = {"test_error": 88.8}
    ratio = {depth: depth / 60 for depth in range(1, 56, 2)}
    known = demo.Facts(trained=852_730, frozen=5_376, skips="none", noise_to_signal=ratio)
    facts = {variant.network: known for variant in demo.VARIANTS}
    return demo.Story(
        seed=0, tracks=tracks, facts=facts, recipe=recipe, sizes=(1299, 143, 355), chance_error=89.9, seconds=100.0
    )


SCROLLS = """[...document.querySelectorAll("*")].filter(
    e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === "auto").map(e => e.tagName)"""
DRAWN = """[...document.querySelectorAll("figure > div")].map(
    e => [e.className, e.getBoundingClientRect().width, e.firstElementChild.viewBox.baseVal.width])"""
COLOURS = """["color", "backgroundColor"].map(c => getComputedStyle(document.querySelector("pre"))[c])"""


def test_nothing_but_the_commands_scrolls_sideways_and_letters_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(page(story()))
    with launch() as browser:
        tab = browser.new_page()
        tab.goto((tmp_path / "index.html").as_uri())
        for width, shown in ((360, "on-narrow"), (390, "on-narrow"), (768, "on-wide"), (1280, "on-wide")):
            tab.set_viewport_size({"width": width, "height": 844})
            assert set(tab.evaluate(SCROLLS)) <= {"PRE"}
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            drawn = [(name, wide, points) for name, wide, points in tab.evaluate(DRAWN) if wide]
            assert [name for name, _, _ in drawn] == [shown, shown]
            assert all(9 * wide / points > 8 for _, wide, points in drawn)  # pixels of the legend's 9 points
        tab.emulate_media(media="print", color_scheme="dark")  # where backgrounds are not printed
        assert tab.evaluate(COLOURS) == ["rgb(30, 41, 59)", "rgba(0, 0, 0, 0)"]
