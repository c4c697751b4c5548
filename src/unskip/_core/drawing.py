"""How our figures look: light, one set of colours, both axes labelled, and small files."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart. One kind of network keeps its colour in all figures.
PLAIN, RESIDUAL, PNNH, OTHER = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
INK, FAINT = "#222222", "#8a8a8a"


def panels(rows: int, columns: int, *, size: tuple[float, float], title: str) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of axes, row by row; size in inches. Needs no display and leaves pyplot alone."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=11, color=INK, fontweight="bold")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def dress(axes: Axes, *, x: str, y: str, title: str = "", log_x: bool = False, log_y: bool = False) -> None:
    """Labels, grid and spines."""
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left")
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes: Axes, **options: Any) -> None:
    """A small legend without a box."""
    axes.legend(fontsize=8, frameon=False, **options)
