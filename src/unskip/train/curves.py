"""curves.png: loss and error of a run over its epochs, from its metrics.jsonl."""

from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.figure import Figure

INK, GRID = "#1f2937", "#e5e7eb"
BLUE, ORANGE = "#2563eb", "#ea580c"


def draw_curves(rows: list[dict[str, Any]], title: str, chance: float | None = None) -> bytes:
    """A PNG. Loss of each update and its mean over an epoch; error in training and validation."""
    steps = [row for row in rows if row["kind"] == "step"]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    figure = Figure(figsize=(9, 3.6), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    per_epoch = max(1, epochs[0]["step"]) if epochs else 1
    at = np.array([row["step"] for row in steps]) / per_epoch
    left.plot(at, _values(steps, "loss"), color=BLUE, alpha=0.25, lw=0.8, label="each update")
    left.plot([r["epoch"] for r in epochs], _values(epochs, "loss"), color=BLUE, lw=1.8, label="mean of an epoch")
    if chance is not None:
        left.axhline(chance, color=INK, lw=0.8, ls=":", label="guessing")
    left.set_ylabel("training loss")
    for key, color, label in (("error", BLUE, "training"), ("val_error", ORANGE, "validation")):
        if epochs and key in epochs[0]:
            right.plot([r["epoch"] for r in epochs], _values(epochs, key), color=color, lw=1.8, label=label)
    right.set_ylabel("error (%)")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.grid(color=GRID)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, color=INK)
    data = BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _values(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([np.nan if row[key] is None else row[key] for row in rows], dtype=float)
