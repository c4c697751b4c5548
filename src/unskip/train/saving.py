"""Saving a run and going on with it: what of a Training goes into a checkpoint, and back."""

import time
from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from unskip._core import rng
from unskip.train import machine
from unskip.train.checkpoint import check_same
from unskip.train.recipe import Recipe

if TYPE_CHECKING:
    from unskip.train.trainer import Training


def save(training: "Training") -> None:
    """Writes the checkpoint of this moment, between two updates. All processes take part; the main one writes."""
    t = training
    t.flush_metrics()
    machine.average_norms(t.accelerator, t.bare)
    now = time.perf_counter()
    t.seconds, t.clock = t.seconds + now - t.clock, now
    weights = machine.network_state(t.accelerator, t.network)
    optimizer = machine.optimizer_state(t.accelerator, t.network, t.optimizer)
    random = gather_object([rng.get_state()])
    if t.main:
        assert t.metrics is not None
        scaler = t.accelerator.scaler
        state = {
            "recipe": t.recipe.as_dict(),
            "own": t.own,
            "data": t.fingerprint,
            "input_size": [t.data.channels, t.data.image_size, t.data.image_size],
            "feed": type(t.feed).__name__,
            "network": weights,
            "optimizer": optimizer,
            "scaler": None if scaler is None else scaler.state_dict(),
            "ema": None if t.ema is None else t.ema.state_dict(),
            "random": random,
            "step": t.done,  # of the schedule, and the position in the data: both are functions of it
            "sums": t.sums,
            "seconds": t.seconds,
            "best": t.best,
            "stuck": t.stuck,
            "metrics_length": t.metrics.length(),
        }
        t.folder.save(state)
    t.accelerator.wait_for_everyone()


def restore(training: "Training") -> int:
    """Takes up the run in the folder; returns the length that metrics.jsonl had at its last checkpoint."""
    t = training
    state, path = t.folder.load(), t.folder.checkpoint
    recipe = Recipe.from_tables(state["recipe"], f"train: the recipe in {path}")
    check_same(recipe.same_numbers(), t.recipe.same_numbers(), "recipe", path)
    check_same(state["data"], t.fingerprint, "data set", path)
    feed = {"feed": type(t.feed).__name__}  # each draws crops and mirrors in its own way
    check_same({"feed": state["feed"]}, feed, "way to hold its images (cache_gib)", path)
    try:
        machine.load_states(t.accelerator, t.network, t.optimizer, state["network"], state["optimizer"])
        if t.ema is not None:
            t.ema.load_state_dict(state["ema"])
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"train: {path} belongs to another network: {reason} Nothing was changed.") from error
    if t.accelerator.scaler is not None and state["scaler"] is not None:
        t.accelerator.scaler.load_state_dict(state["scaler"])
    if len(state["random"]) == t.accelerator.num_processes:  # else what the network draws starts a new stream
        rng.set_state(state["random"][t.accelerator.process_index])
    t.done, t.sums, t.seconds = state["step"], state["sums"], state["seconds"]
    t.best, t.stuck = state["best"], state["stuck"]
    return state["metrics_length"]


def write_weights(training: "Training", name: str) -> None:
    """The weights that are tested, as safetensors."""
    t = training
    state = machine.network_state(t.accelerator, t.network) if t.ema is None else t.ema.module.state_dict()
    if t.main:
        t.folder.write_weights(name, state)


def read_weights(training: "Training", name: str) -> None:
    target = training.bare if training.ema is None else training.ema.module
    target.load_state_dict(training.folder.read_weights(name))
