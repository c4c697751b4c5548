"""Draws docs/figures/cifar.png from the records: error by depth, and the coders of the paper's Table 4.

PYTHONPATH=../../src python picture.py ../../docs/figures/cifar.png
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from unskip.reproduce.drawing import FAINT, INK, PNNH, RESIDUAL, dress, legend, panels, save

RECORDS = Path(__file__).parent.parent / "records"
# Label, colour, and the names of its runs, with the number of layers in the first group, or else 110.
LADDERS = {
    "PNNH, wide (decay 5e-4)": (PNNH, r"ladder_(\d+)_s\d|second3_centred_3x_s\d|screen3_centred_3x_s\d"),
    "PNNH, He's widths (3e-4)": (FAINT, r"second2_he(\d+)_s\d|final_base_head_norm_s0"),
    "ResNet-110 (5e-4)": (RESIDUAL, r"second2_resnet110_decay_5e-4|screen3_resnet110_s\d"),
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


def main() -> None:
    runs = list(finished())
    figure, (left, right) = panels(1, 2, size=(9.6, 4), title="CIFAR-10, every run a mark")
    dress(left, x="layers", y="test error %", title="Depth (30 epochs)")
    dress(right, x="test error %", y="", title="The coder, 110 layers, the paper's setting (15 epochs)")
    for label, (colour, names) in LADDERS.items():
        errors: dict[int, list[float]] = {}
        for name, error in runs:
            if found := re.fullmatch(names, name):
                errors.setdefault(int((found.groups() or (None,))[0] or 110), []).append(error)
        depths = sorted(errors)
        left.plot(depths, [mean(errors[d]) for d in depths], color=colour)
        dots = [(d, error) for d in depths for error in errors[d]]
        mark = {"marker": "_", "ms": 14} if colour == RESIDUAL else {"marker": "o", "ms": 4}
        left.plot(*zip(*dots, strict=True), linestyle="", color=colour, label=label, **mark)
    left.set_xticks([20, 32, 44, 56, 110])
    legend(left)
    for place, (name, label) in enumerate(reversed(CODERS.items())):
        own = [error for run, error in runs if re.fullmatch(rf"table4_{name}_s\d", run)]
        right.barh(place, mean(own), color="#d7efe7")
        right.plot(own, [place] * len(own), "o", color=PNNH, ms=4)
        right.text(max(own) + 3 if max(own) < 80 else 2, place, label, va="center", fontsize=8, color=INK)
    right.set(yticks=[], xlim=(0, 100))
    save(figure, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
