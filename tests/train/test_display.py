"""The progress bar of a run."""

import io
import re
from functools import partial

import pytest
from rich.console import Console

from unskip.train import display


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(file: io.StringIO, **_: object) -> Console:
    return Console(file=file, force_terminal=True, width=120, soft_wrap=True)


def test_colours_without_a_terminal_get_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter sets FORCE_COLOR for what a cell runs."""
    monkeypatch.setattr(display, "Console", partial(terminal, io.StringIO()))
    with display.Display(epochs=2, steps=10) as shown:
        assert shown.console.is_terminal
        assert shown.progress is None


def test_updates_that_come_at_once_are_one_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "Console", partial(terminal, Screen()))
    with display.Display(epochs=2, steps=10) as shown:
        shown.mark -= 2.0
        for step in (1, 2):
            shown.update({"epoch": 1, "step": step, "loss": 0.25, "error": 12.5}, images=100)
        assert 0 < shown.speed < 60


def test_before_the_first_update_the_bar_shows_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(display, "Console", partial(terminal, screen))
    with display.Display(epochs=2, steps=10) as shown:
        shown.progress.refresh()  # type: ignore[union-attr]
        assert "epoch 1/2" in screen.getvalue()
        assert "nan" not in screen.getvalue()
        shown.update({"epoch": 2, "step": 11, "loss": 0.25, "error": 12.5}, images=64)
        shown.progress.refresh()  # type: ignore[union-attr]
        assert "loss 0.2500  error 12.50 %" in screen.getvalue()
        shown.epoch({"epoch": 2, "step": 20, "loss": 0.25, "error": 12.5, "images_per_s": 3.0, "val_error": 9.0})
        assert "epoch 2/2, update 20: loss 0.2500, error 12.50 %, validation error 9.00 %" in re.sub(
            r"\x1b\[[\d;]*m", "", screen.getvalue()
        )
