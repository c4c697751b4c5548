"""Draws the pictures of docs/notes from the numbers of the records.

python benchmarks/draw_notes.py [--out docs/figures]
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from unskip._core.drawing import FAINT, INK, PLAIN, PNNH, RESIDUAL, dress, legend, panels
from unskip.reproduce import paper_table
from unskip.reproduce.registry import as_png

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
NOW = RECORDS / "2026-11-19_paper-figures_cpu"
OLDER = RECORDS / "2026-11-15_figures_cpu"


def numbers(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["numbers"]
    return found


def cifar_errors() -> dict[str, list[float]]:
    """Test errors on CIFAR-10 by name of the run without its seed, one for each seed, of all records of the gap."""
    runs: dict[str, float] = {}
    for file in sorted(RECORDS.glob("*cifar-gap*/*results.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            if "test_error" in run:  # it did not fail
                runs[run["name"]] = run["test_error"]
    found = defaultdict(list)
    for name, error in sorted(runs.items()):
        found[name.rsplit("_s", 1)[0]].append(error)
    return found


def coders() -> Figure:
    """Reconstruction loss of coders against the test error of the networks that have them."""
    loss, errors = numbers(NOW / "pnnh-reconstruction.json"), cifar_errors()
    names = {
        "identity": "table4_identity",
        "pair average": "table4_pair",
        "rectified normal": "table4_rectified_normal",
        "uniform": "table4_uniform",
    }
    figure, (axes,) = panels(1, 1, size=(6.0, 3.9), title="Reconstruction loss and test error of four coders")
    for name, run in names.items():
        colour = PNNH if name == "identity" else PLAIN if name == "pair average" else RESIDUAL
        x, seeds = loss[name]["once"], errors[run]
        shift = {"pair average": -0.0025, "uniform": 0.0025}.get(name, 0.0)  # three lie on the floor
        axes.plot([x + shift] * len(seeds), seeds, "o", color=colour, markersize=4)
        axes.annotate(
            name, (x + shift, max(seeds)), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8, color=INK
        )
    axes.axvline(loss["floor"], color=FAINT, linestyle=":", linewidth=1)
    axes.text(loss["floor"], 15.7, " the floor", color=FAINT, fontsize=8)
    axes.set_xlim(0.15, 0.26)
    axes.set_ylim(15.5, 19.5)
    dress(
        axes,
        x="loss on rectified normal inputs",
        y="test error (%)",
        title="110 layers, CIFAR-10, 15 epochs, each seed",
    )
    return figure


def ablations() -> Figure:
    """Table II of Oyedotun et al. 2020: what the paper prints and what we find."""
    record = json.loads((RECORDS / "2026-11-15_plainnet-table2_h200" / "results.json").read_text(encoding="utf-8"))
    found = defaultdict(list)
    for run in record["final"]:
        found[run["row"]].append(run["test_error"])
    printed = paper_table("plainnet", "II").rows
    figure, (axes,) = panels(1, 1, size=(7.2, 3.6), title="100-layer MLPs on USPS by component")
    for i, row in enumerate(printed):
        ours = [error for error in found[str(row["components"])] if error is not None]
        axes.plot(row["test_error"], i, "s", color=FAINT, markersize=7, label="paper" if not i else None)
        axes.plot(ours, [i] * len(ours), "o", color=PLAIN, markersize=5, label="ours, each seed" if not i else None)
    axes.set_yticks(range(len(printed)), [str(row["components"]) for row in printed])
    axes.invert_yaxis()
    dress(axes, x="test error (%)", y="", title="")
    axes.set_xlim(0, 100)
    legend(axes, loc="lower center")
    return figure


def growth() -> Figure:
    """Growth of gradients by activation, with and without BatchNorm, beside theory."""
    found = numbers(OLDER / "seqnet-figure5.json")
    figure, (axes,) = panels(1, 1, size=(6.0, 3.6), title="Growth of gradients, 20 layers of 256")
    for i, activation in enumerate(("SELU", "Tanh", "ReLU")):
        for words, colour, shift in (("with", RESIDUAL, -0.18), ("without", PLAIN, 0.18)):
            rate = found[f"{activation} {words} BatchNorm"]
            bar = {"label": f"{words} BatchNorm"} if not i else {}
            error = 2 * rate["log_rate"]["error"]
            axes.bar(i + shift, rate["log_rate"]["value"], 0.34, yerr=error, color=colour, **bar)
            theory = {"label": "theory"} if not i and words == "with" else {}
            axes.plot(i + shift, rate["theory"], "_", color=INK, markersize=16, markeredgewidth=1.6, **theory)
    axes.set_xticks(range(3), ("SELU", "Tanh", "ReLU"))
    dress(axes, x="", y="ln(gradient norm) a layer", title="")
    legend(axes)
    return figure


def streams() -> Figure:
    """Test error by the width of what lasts from block to block."""
    errors = cifar_errors()
    figure, (axes,) = panels(1, 1, size=(6.4, 3.9), title="Error by the channels that last (110 layers, CIFAR-10)")
    for label, colour, marker, runs in STREAMS:
        for width, names, words in runs:
            seeds = [error for name in names for error in errors[name]]
            axes.plot([width] * len(seeds), seeds, marker, color=colour, markersize=5, label=label)
            label = ""
            axes.annotate(
                words,
                (width, statistics.fmean(seeds)),
                textcoords="offset points",
                xytext=(7, 3),
                fontsize=8,
                color=INK,
            )
    axes.set_xticks((8, 16, 24, 32))
    axes.set_xlim(6, 38)
    x = "channels of the first stage that last from block to block"
    dress(axes, x=x, y="test error (%)", title="30 epochs, decay 5e-4, each seed")
    legend(axes)
    return figure


# Label, colour, marker; then lasting channels of the first stage, the runs, and words for the point.
STREAMS: list[tuple[str, str, str, list[tuple[int, list[str], str]]]] = [
    (
        "PNNH, half of the channels last",
        PNNH,
        "o",
        [
            (8, ["he_centred"], "He's widths"),
            (16, ["screen3_centred", "second2_centred_decay_5e-4"], "twice"),
            (24, ["screen3_centred_3x", "second3_centred_3x"], "three times"),
            (32, ["second3_centred_4x"], "four times"),
        ],
    ),
    (
        "residual networks, all channels last",
        RESIDUAL,
        "s",
        [
            (16, ["second2_resnet110_decay_5e-4", "screen3_resnet110"], ""),
            (16, ["screen3_residual_half"], ""),
        ],
    ),
]
PICTURES = {"note-coders": coders, "note-ablations": ablations, "note-growth": growth, "note-streams": streams}
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures", help="the folder of the pictures")
    arguments = parser.parse_args()
    for name, draw in PICTURES.items():
        (arguments.out / f"{name}.png").write_bytes(as_png(draw()))
        print(arguments.out / f"{name}.png")
