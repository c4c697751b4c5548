"""A real Chromium for tests: Debian's, driven by Playwright."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def missing() -> str:
    """Why there is no browser here; '' if there is one."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (pip install 'unskip[dev]')"
    if not any(map(shutil.which, PROGRAMS)):
        return f"none of {', '.join(PROGRAMS)} is installed (Debian: apt-get install chromium)"
    return ""


@contextmanager
def launch() -> Iterator[Any]:
    """A browser; without one the test is skipped, but where CI=true it fails."""
    if missing():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true, but {missing()}")
        pytest.skip(missing())
    from playwright.sync_api import sync_playwright

    program = next(path for path in map(shutil.which, PROGRAMS) if path)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that is open, offline, and everything that it complained about or asked the network for."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        self.context = browser.new_context(offline=True, **context)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.locator(".now[data-layer]").first.wait_for()

    def wait_for(self, layer: str) -> None:
        """Until the plots show a layer. (Playwright's wait_for_function needs eval, which the page forbids.)"""
        self.page.locator(f".now[data-layer='{layer}']").first.wait_for()

    def shown(self) -> list[str]:
        """The layer that each plot says it shows."""
        return self.page.eval_on_selector_all(".now[data-layer]", "nodes => nodes.map(n => n.dataset.layer)")

    def marks(self, plot: str, network: int = 0) -> list[dict[str, Any]]:
        """The drawn things of a plot that have a colour: {tag, stroke, fill, x, y, width, height} in pixels."""
        return self.page.evaluate(
            """([plot, network]) => {
                const place = [...document.querySelectorAll(".plot[data-plot]")].find(
                    p => p.dataset.plot === plot && p.dataset.network === String(network));
                const zero = place.getBoundingClientRect();
                return [...place.querySelectorAll("svg path")].map(node => {
                    const box = node.getBoundingClientRect();
                    return {stroke: node.getAttribute("stroke"), fill: node.getAttribute("fill"),
                            x: box.x + box.width / 2 - zero.x, y: box.y + box.height / 2 - zero.y,
                            width: box.width, height: box.height};
                });
            }""",
            [plot, network],
        )
