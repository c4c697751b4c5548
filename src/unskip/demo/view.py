"""What `unskip demo` prints: four runs side by side on a terminal, elsewhere a line at times; then a table."""

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unskip.demo.story import DEPTH, Story, Track
from unskip.doctor.table import BARS


class View:
    """A live table on a terminal; elsewhere one line for each fifth of a run."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        live = Live(console=self.console, refresh_per_second=4, transient=True)
        self.live = live if self.console.is_terminal else None
        self.began = time.perf_counter()
        self.printed: dict[str, int] = {}

    def __enter__(self) -> "View":
        self.console.print(
            f"One network of {DEPTH} layers, scikit-learn's digits, one recipe for all. "
            "PNNH has no skip connections, as the plain network; it keeps an internal path.",
            soft_wrap=True,
        )
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, tracks: dict[str, Track]) -> None:
        if self.live is not None:
            grid = Table.grid(expand=True)
            for _ in tracks:
                grid.add_column(ratio=1)
            grid.add_row(*[panel(track) for track in tracks.values()])
            self.live.update(Group(grid, Text(f"{time.perf_counter() - self.began:.0f} s", style="dim")))
            return
        for key, track in tracks.items():
            rows = track.epoch_rows
            fifths = 5 * len(rows) // track.epochs
            if fifths > self.printed.get(key, 0):
                self.printed[key] = fifths
                seconds, row = time.perf_counter() - self.began, rows[-1]
                values = f"loss {row['loss']:.3f}, validation error {row['val_error']:.1f} %"
                text = f"{seconds:4.0f} s  {track.variant.title}: epoch {row['epoch']}/{track.epochs}, {values}"
                self.console.print(text, soft_wrap=True)


def panel(track: Track) -> Panel:
    last = track.rows[-1] if track.rows else {}
    errors = [row["val_error"] for row in track.epoch_rows]
    done = last.get("epoch", 0) if last.get("kind") == "epoch" else max(0, last.get("epoch", 1) - 1)
    body = Group(
        ProgressBar(total=track.epochs, completed=done),
        Text(f"epoch {last.get('epoch', '-')}/{track.epochs}"),
        Text(f"loss  {last['loss']:.3f}" if last.get("loss") is not None else "loss  -"),
        Text(f"validation error {errors[-1]:.1f} %" if errors else "validation error -", style="bold"),
        Text(spark(errors), style=track.variant.color),
    )
    return Panel(body, title=track.variant.title, border_style=track.variant.color)


def spark(errors: list[float], width: int = 20) -> str:
    """The last errors as little bars, 0 to 100 %."""
    return "".join(BARS[min(7, int(error / 100 * 8))] for error in errors[-width:])


def table(story: Story) -> Table:
    """The comparison."""
    made = Table(
        title=f"{DEPTH} layers on digits, seed {story.seed}, {story.seconds:.0f} s",
        title_justify="left",
        caption="Trained: number of trained parameters.",
        caption_justify="left",
    )
    made.add_column("network", no_wrap=True)
    for column in ("layers", "trained", "skips", "epochs", "test error"):
        made.add_column(column, justify="right", no_wrap=True)
    for key, track in story.tracks.items():
        facts = story.facts[track.variant.network]
        cells = (str(DEPTH), f"{facts.trained:,}", facts.skips, str(track.epochs), f"{story.error(key):.1f} %")
        made.add_row(Text(track.variant.title, style=track.variant.color), *cells)
    return made
