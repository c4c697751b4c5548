"""What a user sees while a network trains: a line for each epoch and, on a terminal, a progress bar. On stderr."""

import contextlib
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

SHORTEST = 0.05  # s, below which no speed is told


class Display:
    """Shows a run. `silent` is for processes other than the main one, and for callers who show it themselves."""

    def __init__(self, *, epochs: int, steps: int, step: int = 0, silent: bool = False) -> None:
        self.epochs, self.silent = epochs, silent
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.mark = time.perf_counter()  # since when `images` are counted
        self.images, self.speed = 0, 0.0
        self.progress: Progress | None = None
        # Jupyter asks for colours (FORCE_COLOR), which rich takes for a terminal; a bar would fill the cell.
        if self.console.is_terminal and self.console.file.isatty() and not silent:
            columns = (
                SpinnerColumn(),
                TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[now]}"),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.console, transient=True)
            self.task = self.progress.add_task(
                "train", total=epochs * steps, completed=step, epoch=1 + step // steps, epochs=epochs, now=""
            )

    def __enter__(self) -> Self:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            with contextlib.suppress(OSError):
                self.progress.stop()

    def update(self, row: dict[str, Any], images: int) -> None:
        """The last update that was looked at, and how many images were seen since the look before."""
        self.images += images
        if (now := time.perf_counter()) - self.mark > SHORTEST:  # several may come at once
            self.speed, self.images, self.mark = self.images / (now - self.mark), 0, now
        if self.progress is not None:
            now_words = f"loss {row['loss']:.4f}  error {row['error']:.2f} %  {self.speed:,.0f} images/s"
            self.progress.update(self.task, completed=row["step"], epoch=row["epoch"], now=now_words)

    def epoch(self, row: dict[str, Any]) -> None:
        """One line for a finished epoch; it stays, above the bar."""
        val = f", validation error {row['val_error']:.2f} %" if "val_error" in row else ""
        val = f", validation loss {row['val_loss']:.4f}{val}" if "perplexity" in row else val
        self.say(
            f"epoch {row['epoch']}/{self.epochs}, update {row['step']}: loss {row['loss']:.4f}, "
            f"error {row['error']:.2f} %{val}, {row['images_per_s']:,.0f} images/s",
            style="",
        )
        self.images, self.mark = 0, time.perf_counter()  # evaluation is not counted as training

    def say(self, text: str, style: str = "yellow") -> None:
        """A sentence. A terminal that is gone or a full disk behind stderr must not end a run."""
        if not self.silent:
            with contextlib.suppress(OSError):
                self.console.print(text, style=style if self.console.is_terminal else None, markup=False)
