"""Yu and Tomasi 2019, arXiv:1905.10944, Table 2 and Figure 6 (section B): equivalent networks trained side by side.

A simplified ResNet r and its plain image p = T(r) train on the same batches, p with its decay taken from the identity.
In exact arithmetic p = T(r) holds after every update. Here is how far rounding drives them apart, in float64 and in
float32, update by update.
"""

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from unskip._core.drawing import FAINT, OTHER, PLAIN, RESIDUAL, dress, legend, panels
from unskip.data.sets import DataSet
from unskip.models import to_plain
from unskip.models.simplified import simplified_net
from unskip.reproduce.images import DataPath, Dataset, load_set
from unskip.reproduce.papers import paper_table
from unskip.reproduce.registry import SEED, Limit, Outcome, Settings, between, one_of, reproduction

PRECISIONS = {"fp64": "float64", "fp32": "float32"}
PROMISED = 1e-9  # largest difference of a weight in float64
DEPTHS = Limit(range(5, 10_000, 3).__contains__, "3N + 2, for instance 8, 20, 32 or 44")


@dataclass(frozen=True, kw_only=True)
class Table2(Settings):
    """What can be set."""

    depth: Annotated[int, "layers of both networks: 3N + 2; the paper has 20, 32 and 44", DEPTHS] = 20
    epochs: Annotated[int, "epochs of training; the paper's table has 200", between(1, 1_000_000)] = 1
    batch: Annotated[int, "images in an update", between(1, 1_000_000)] = 128
    lr: Annotated[float, "learning rate, constant", between(1e-12, 100)] = 0.01
    precision: Annotated[str, "fp64, fp32 or both", one_of("fp64", "fp32", "both")] = "both"
    dataset: Dataset = "digits"
    data: DataPath = None
    size: Annotated[int, "side in px that images are brought to; 0: as they come", between(0, 1024)] = 0
    seed: Annotated[int, "seed of weights, order and augmentation", SEED] = 0
    minutes: Annotated[
        float | None, "stop each precision after so many minutes, and say how far it came", between(0, 1e6)
    ] = None


def largest_difference(residual: nn.Module, plain: nn.Module) -> float:
    """The largest absolute difference of a weight between T(r) and p."""
    pairs = zip(to_plain(residual).parameters(), plain.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def train_pair(settings: Table2, precision: str, data: DataSet, folder: Path) -> dict[str, Any]:
    """Trains r and T(r) in turns of one update; the differences after each, and both results."""
    from unskip.train.machine import seeded_run  # Accelerate takes seconds to import
    from unskip.train.metrics import read_metrics
    from unskip.train.recipe import load_recipe
    from unskip.train.runner import train_one

    colour = data.channels == 3
    recipe = load_recipe(
        "cifar10-simplified-resnet-20", dataset=settings.dataset, crop="pad" if colour else "none",
        flip=0.5 if colour else 0.0, epochs=settings.epochs, batch=settings.batch, lr=settings.lr, schedule="constant",
        milestones=(), decay_all=False, decay_from="identity", precision=precision, seed=settings.seed, device="cpu",
        log_steps=1,
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    residual = simplified_net(settings.depth, residual=True, num_classes=data.classes, in_chans=data.channels)
    residual.to(torch.float64 if precision == "fp64" else torch.float32)
    plain = to_plain(residual)
    models: dict[str, nn.Module] = {"resnet": residual, "plain": plain}
    differences = [largest_difference(residual, plain)]
    results: dict[str, Any] = {}
    deadline = math.inf if settings.minutes is None else time.monotonic() + 60 * settings.minutes
    with seeded_run(recipe.run):
        runs = {
            kind: train_one(recipe, model=model, data=data, out=folder / kind, resume="never", silent=True)
            for kind, model in models.items()
        }

        def updates(kind: str) -> Iterator[None]:
            results[kind] = yield from runs[kind]

        for _ in zip_longest(*map(updates, models)):
            differences.append(largest_difference(residual, plain))
            if len(differences) > 3 and time.monotonic() > deadline:  # losses are written two updates later
                break
        for training in runs.values():
            training.close()
    losses = {
        kind: [row["loss"] for row in read_metrics(folder / kind / "metrics.jsonl") if row["kind"] == "step"]
        for kind in models
    }
    return {
        "largest difference of a weight": differences,
        "loss": losses,
        "test_error": {kind: result.test_error for kind, result in results.items()},
        "test_loss": {kind: result.test_loss for kind, result in results.items()},
        "updates": len(differences) - 1,
        "updates asked for": settings.epochs * (len(data.train) // settings.batch),
    }


@reproduction("noise-table2", settings=Table2)
def table2(settings: Table2) -> Outcome:
    """Losses of both networks, the difference of their losses (Figure 6), and of their weights."""
    data = load_set(settings.dataset, settings.data, size=settings.size)
    precisions = list(PRECISIONS) if settings.precision == "both" else [settings.precision]
    numbers: dict[str, Any] = {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for precision in precisions:
            (at := Path(folder) / precision).mkdir()
            numbers[precision] = train_pair(settings, precision, data, at)
    title = f"Simplified ResNet-{settings.depth} and its plain image, the same batches of {data.name}"
    figure, axes = panels(1, 3, size=(11.0, 3.5), title=title)
    for precision, style in zip(precisions, ("-", "--"), strict=False):
        found = numbers[precision]
        losses, differences = found["loss"], found["largest difference of a weight"]
        name = PRECISIONS[precision]
        gaps = [abs(a - b) for a, b in zip(losses["resnet"], losses["plain"], strict=False)]
        steps = range(1, len(gaps) + 1)
        for kind, colour, width in (("resnet", RESIDUAL, 2.4), ("plain", PLAIN, 0.9)):
            axes[0].plot(
                steps, losses[kind][: len(gaps)], style, color=colour, linewidth=width, label=f"{kind}, {name}"
            )
        tone = OTHER if precision == "fp32" else PLAIN
        axes[1].plot(steps, [max(gap, 1e-18) for gap in gaps], color=tone, linewidth=0.8, label=name)
        axes[2].plot(range(1, len(differences)), differences[1:], color=tone, linewidth=1.2, label=name)
        tested = found["test_error"]
        errors = ", ".join(f"{error:.2f} % ({kind})" for kind, error in tested.items())
        last = losses["resnet"][len(gaps) - 1]
        lines.append(
            f"{name}: after {found['updates']:,} of {found['updates asked for']:,} updates a weight of T(r) and p "
            f"differs by at most {differences[-1]:.1e}, the losses by at most {max(gaps):.1e}; loss "
            f"{losses['resnet'][0]:.3f} to {last:.3f}. {f'Test error {errors}' if tested else 'Stopped by --minutes'}."
        )
    if "fp64" in numbers:
        worst = max(numbers["fp64"]["largest difference of a weight"])
        kept = "holds" if worst <= PROMISED else "does not hold"
        lines.append(f"In float64 p = T(r) {kept} to {PROMISED:g} at every update (worst {worst:.1e}).")
    printed = paper_table("noise_stability", "2")
    if settings.depth in [row["depth"] for row in printed.rows]:
        names = ("plain_error", "residual_error", "plain_loss", "residual_loss")
        plain, residual, *ends = (printed.value(name, depth=settings.depth) for name in names)
        lines.append(
            f"Paper, float64, 200 epochs: test errors {100 * plain:.2f} % (plain) and {100 * residual:.2f} % (residual)"
            f", losses {ends[0]:.5f} and {ends[1]:.5f}."
        )
    axes[2].axhline(PROMISED, color=FAINT, linestyle=":", linewidth=1)
    dress(axes[0], x="update", y="training loss", title="loss of a batch", log_y=True)
    dress(axes[1], x="update", y="|loss of r - loss of p|", title="difference of the losses", log_y=True)
    dress(axes[2], x="update", y="largest difference of a weight", title="|T(r) - p|", log_y=True)
    for ax in axes:
        legend(ax)
    return Outcome(lines=tuple(lines), numbers=numbers, figure=figure)
