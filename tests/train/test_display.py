"""The progress bar of a run."""

import io
import re

import pytest
from rich.console import Console

from unskip.train import display


def test_before_the_first_update_the_bar_shows_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    def terminal(**_: object) -> Console:
        return Console(file=screen, force_terminal=True, width=120, soft_wrap=True)

    monkeypatch.setattr(display, "Console", terminal)
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
