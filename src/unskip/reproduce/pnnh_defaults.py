"""The defaults of PNNH: norms, coder and scale per family of blocks, compared on held-out training images.

The settings that differ from the defaults one at a time, and norms with every coder, each trained by the short recipe
of `unskip reproduce frontier` on nine tenths of Tiny-ImageNet's training images. The other tenth is what defaults are
chosen on, so test errors are not shown.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from unskip.reproduce.registry import Outcome, between, one_of, reproduction
from unskip.reproduce.trained import Row, Trained, flags, mean, train_table, versions
from unskip.train.recipe import load_recipe

FAMILIES = ("resnet18", "resnet34", "resnet50", "mobilenetv2")
NORMS: dict[str, dict[str, Any]] = {
    "no more norms": {"norm": "first", "head_norm": False},
    "before pooling": {"norm": "first", "head_norm": True},
    "after W_2": {"norm": "both", "head_norm": False},
    "after W_2 and before pooling": {"norm": "both", "head_norm": True},
}
CODERS = {"pairs": "group_average", "identity": "identity", "fitted": "rectified_normal"}
SCALES = (0.1, 1.0)  # besides the default of 0.3


@dataclass(frozen=True, kw_only=True)
class Defaults(Trained):
    """What can be set."""

    dataset: Annotated[
        str, "the data set: sprites (Tiny-ImageNet); digits, to try it out", one_of("sprites", "digits")
    ] = "sprites"
    families: Annotated[str, f"backbones, with commas between: {', '.join(FAMILIES)}"] = ",".join(FAMILIES)
    seeds: Annotated[int, "runs of each row", between(1, 1000)] = 1
    results_only: Annotated[bool, "keep the results of finished runs alone, without weights"] = True


def defaults_rows(families: str) -> list[Row]:
    """The rows of each backbone: norms x coders at the default scale, then other scales with a norm before pooling."""
    rows = []
    for family in (name.strip() for name in families.split(",")):
        if family not in FAMILIES:
            raise ValueError(f"reproduce: families has {family!r}; it must be among {', '.join(FAMILIES)}.")
        settings = {
            f"{norm}, {coder}": {**options, "pretext": pretext}
            for norm, options in NORMS.items()
            for coder, pretext in CODERS.items()
            if not (family == "mobilenetv2" and coder == "fitted")  # signed input: ReLU6 cuts half of each unit off
        }
        settings |= {
            f"{norm}, pairs, scale {scale:g}": {**NORMS[norm], "scale": scale}
            for norm in ("before pooling", "after W_2 and before pooling")
            for scale in SCALES
        }
        for label, options in settings.items():
            recipe = load_recipe("tinyimagenet32-pnnh-34", model=f"pnnh_{family}", options=options)
            name = f"{family}-{label}".replace(", ", "-").replace(" ", "_")
            rows.append(Row(name=name, label=f"{family}: {label}", recipe=recipe))
    return rows


@reproduction("pnnh-defaults", settings=Defaults, trains=True)
def defaults(settings: Defaults, folder: Path) -> Outcome:
    table = train_table("pnnh-defaults", settings, defaults_rows(settings.families), folder)
    rows, runs = table.rows, table.runs
    lines = ["| setting | runs | validation error % | validation loss |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row.label} | {len(runs[row.name])} | {mean([run.val_error for run in runs[row.name]])} "
        f"| {mean([run.val_loss for run in runs[row.name]], 3)} |"
        for row in rows
    ]
    found = []
    for family in FAMILIES:
        known: dict[str, float] = {}
        for row in rows:
            losses = [run.val_loss for run in runs[row.name] if run.val_loss is not None]
            if losses and row.label.startswith(f"{family}:"):
                known[row.label] = statistics.fmean(losses)
        if known:
            best = min(known, key=lambda label: known[label])
            found.append(f"Least validation loss, {best} ({known[best]:.3f}).")
    about = versions()
    how = f"`unskip reproduce pnnh-defaults {flags(settings)}`. {', '.join(f'{k} {v}' for k, v in about.items())}."
    numbers = {row.name: [run.epochs[-1] for run in runs[row.name] if run.epochs] for row in rows}
    return Outcome(
        lines=(*lines, *found),
        numbers={"rows": numbers, "versions": about},
        readme=(*lines, "", *found, "", "## How", how),
        ended=table.ended,
    )
