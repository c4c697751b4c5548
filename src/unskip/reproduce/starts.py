"""Whether runs of GPTs start: what their first updates say beforehand, and what happened.

docs/attention.md, "When AdamW does not start". `unskip reproduce attention --predict` prints it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from unskip.data.feed import make_feed
from unskip.data.sets import DataSet, load
from unskip.measures import COLLAPSED, first_updates
from unskip.theory import common_growth
from unskip.train.many import Finished
from unskip.train.optim import learning_rate, make_optimizer, set_rates
from unskip.train.recipe import Recipe
from unskip.train.runner import build

START = 0.1  # nats below the loss of single tokens, at which a network has started
ORTHOGONAL = ("shaped", "value_skipinit", "espa")  # attention whose W_V and W_O start so
GROWN = 20.0  # growth of the common direction in an update above which networks of 64 channels did not start


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Whether a run starts, as its first updates say, as a bound says, and what happened."""

    before: float  # the spread of tokens behind the last norm before training
    spread: float  # the lowest of the first updates
    growth: float  # `unskip.theory.common_growth`; nan for networks with skips, or whose W_V and W_O aren't orthogonal
    loss: float  # of the run
    started: bool

    @property
    def by_updates(self) -> bool:
        """What the first updates say."""
        return self.spread >= COLLAPSED

    @property
    def by_growth(self) -> bool | None:
        """What the formula says, which knows nothing of a warm-up; None where it says nothing."""
        return None if math.isnan(self.growth) else self.growth <= GROWN


def prediction_of(recipe: Recipe, data: DataSet, run: Finished, updates: int) -> Prediction:
    """The prediction for a run from the first updates of its recipe, of the same texts in the same order."""
    feed = make_feed(data, recipe.data, **recipe.feeding)
    batches = list(islice(chain.from_iterable(feed.epoch(epoch) for epoch in range(recipe.run.epochs)), updates))

    def set_rate(optimizer: Optimizer, number: int) -> None:
        set_rates(optimizer, learning_rate(recipe.optimizer, number, epochs=recipe.run.epochs, steps=feed.steps))

    model, width = build(recipe, data), int(recipe.network.options["width"])
    spreads = first_updates(
        model, partial(make_optimizer, config=recipe.optimizer), batches, layer="norm", updates=updates,
        clip=recipe.optimizer.clip, set_rate=set_rate,
    )  # fmt: skip
    made: Any = getattr(model, "surgery", None)
    growth = math.nan
    if made is not None and made.attention in ORTHOGONAL and recipe.optimizer.optimizer == "adamw":
        growth = common_growth(recipe.optimizer.lr, width, width, 2 * len(made.replaced))
    lowest = min((row["val_loss"] for row in run.epochs if row.get("val_loss") is not None), default=math.inf)
    return Prediction(
        before=spreads[0], spread=min(spreads), growth=growth, loss=lowest,
        started=lowest < single_token_loss(data) - START,
    )  # fmt: skip


def single_token_loss(data: DataSet) -> float:
    """The validation loss of a network that only knows how frequent tokens are in the training text, in nats."""
    held = data.test if data.val is None else data.val
    counts, seen = (torch.bincount(split.labels, minlength=data.classes).double() for split in (data.train, held))
    return float(-(seen / seen.sum() * ((counts + 1) / (counts + 1).sum()).log()).sum())


def predictions(
    recipes: Mapping[str, Recipe], runs: Mapping[str, Finished], path: Path | None, updates: int
) -> dict[str, Prediction]:
    """By name of run, of the text at a path; empty for 0 updates."""
    if not updates or not recipes:
        return {}
    data = load(next(iter(recipes.values())).data, path)
    return {name: prediction_of(recipe, data, runs[name], updates) for name, recipe in recipes.items() if name in runs}


def prediction_lines(found: Mapping[str, Prediction], updates: int) -> list[str]:
    if not found:
        return []
    lines = [
        "",
        "| run | validation loss | | token spread before | lowest | first updates say | growth | the formula says |",
        "|---|---:|---|---:|---:|---|---:|---|",
    ]
    words = {True: "starts", False: "does not start"}

    def said(guess: bool | None, truth: bool) -> str:
        return "" if guess is None else words[guess] if guess == truth else f"**{words[guess]}**"

    for name, each in found.items():
        growth = "" if math.isnan(each.growth) else f"{each.growth:.3g}"
        lines.append(
            f"| {name} | {each.loss:.3f} | {words[each.started]} | {each.before:.3f} | {each.spread:.3f} | "
            f"{said(each.by_updates, each.started)} | {growth} | {said(each.by_growth, each.started)} |"
        )
    known = [each for each in found.values() if each.by_growth is not None]
    by_updates = sum(each.by_updates == each.started for each in found.values())
    by_growth = sum(each.by_growth == each.started for each in known)
    return [
        *lines,
        "",
        f"{sum(each.started for each in found.values())} of {len(found)} start: their validation loss gets {START:g} "
        f"nats below that of single characters. Right are {by_updates} of {len(found)} by the first {updates} updates "
        f"(whether the spread of tokens falls below {COLLAPSED:g}), and {by_growth} of {len(known)} by the "
        f"formula (whether (1 + η d / 2)^(2 layers) is above {GROWN:g}), which is for AdamW without a warm-up.",
    ]
