"""Draws docs/figures/cifar.png (error by depth and epochs) and cifar-coders.png (the paper's Table 4) from the records.

python benchmarks/draw_cifar.py docs/figures
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unskip.reproduce.drawing import FAINT, INK, PNNH, RESIDUAL, dress, legend, panels, save

RECORDS = Path(__file__).parent / "records"
WIDE = r"second3_centred_3x_s\d|screen3_centred_3x_s\d"
RESNET = r"second2_resnet110_decay_5e-4|screen3_resnet110_s\d"
# Label, colour, and the names of its runs, with the number of layers in the first group, or else 110.
LADDERS = {
    "PNNH, wide (decay 5e-4)": (PNNH, rf"ladder_(\d+)_s\d|{WIDE}"),
    "PNNH, He's widths, pairs (3e-4)": (FAINT, r"second2_he(\d+)_s\d|final_base_head_norm_s0"),
    "ResNet-110 (5e-4)": (RESIDUAL, RESNET),
}
# Label, colour, and the names of its runs by epochs.
SCHEDULES = {
    "PNNH-110, wide": (PNNH, {30: WIDE, 60: r"sixty_wide_s\d", 200: r"long_wide_s\d"}),
    "ResNet-110": (RESIDUAL, {30: RESNET, 60: r"sixty_resnet110_s\d", 200: r"long_resnet110_s\d"}),
}
CODERS = {
    "identity": "identity", "pair": "pair average", "rectified_normal": "rectified normal", "uniform": "uniform",
    "normal": "normal", "random": "random", "none": "no coder",
}  # fmt: skip


def finished() -> Iterator[tuple[str, float]]:
    """Name and test error of every run in the records."""
    for file in sorted(RECORDS.glob("*_cifar-gap*/*results.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            if row["status"] == "done":
                yield row["name"], row["test_error"]


def draw(axes: Axes, errors: dict[int, list[float]], label: str, colour: str) -> None:
    """A line through the means, and every run a mark."""
    places = sorted(errors)
    axes.plot(places, [mean(errors[place]) for place in places], color=colour)
    dots = [(place, error) for place in places for error in errors[place]]
    mark = {"marker": "_", "ms": 14} if colour == RESIDUAL else {"marker": "o", "ms": 4}
    axes.plot(*zip(*dots, strict=True), linestyle="", color=colour, label=label, **mark)


def depth_and_length(runs: list[tuple[str, float]]) -> Figure:
    figure, (left, right) = panels(1, 2, size=(9.6, 4), title="CIFAR-10, every run a mark")
    dress(left, x="layers", y="test error %", title="Depth (30 epochs)")
    title = "Length of the schedule, 110 layers (5e-4)"
    dress(right, x="epochs (200: with all 50,000 images)", y="", title=title, log_x=True)
    for label, (colour, names) in LADDERS.items():
        errors: dict[int, list[float]] = {}
        for name, error in runs:
            if found := re.fullmatch(names, name):
                errors.setdefault(int((found.groups() or (None,))[0] or 110), []).append(error)
        draw(left, errors, label, colour)
    for label, (colour, by_epochs) in SCHEDULES.items():
        errors = {at: [e for name, e in runs if re.fullmatch(names, name)] for at, names in by_epochs.items()}
        draw(right, errors, label, colour)
    left.set_xticks([20, 32, 44, 56, 110])
    right.set_xticks([30, 60, 200], ["30", "60", "200"])
    right.minorticks_off()
    legend(left)
    legend(right)
    return figure


def coders(runs: list[tuple[str, float]]) -> Figure:
    figure, (axes,) = panels(1, 1, size=(6.4, 3.6), title="The coder of 110 layers, in the paper's setting (15 epochs)")
    dress(axes, x="test error %", y="")
    for place, (name, label) in enumerate(reversed(CODERS.items())):
        own = [error for run, error in runs if re.fullmatch(rf"table4_{name}_s\d", run)]
        axes.barh(place, mean(own), color="#d7efe7")
        axes.plot(own, [place] * len(own), "o", color=PNNH, ms=4)
        axes.text(max(own) + 3 if max(own) < 80 else 2, place, label, va="center", fontsize=8, color=INK)
    axes.set(yticks=[], xlim=(0, 100))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of the pictures")
    out, runs = parser.parse_args().out, list(finished())
    save(depth_and_length(runs), out / "cifar.png")
    save(coders(runs), out / "cifar-coders.png")


if __name__ == "__main__":
    main()
