"""Saving a run and going on with it: what of a Training goes into a checkpoint, and back."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors import torch as safetensors

from unskip._core import rng
from unskip.data.feed import preparation
from unskip.train import machine
from unskip.train.checkpoint import START_ANEW, check_same, load_checkpoint
from unskip.train.recipe import Recipe

if TYPE_CHECKING:
    from unskip.train.trainer import Training

MISFITS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)  # of values that don't belong


def save(training: "Training") -> None:
    """Writes the checkpoint of this moment, between two updates. All processes take part; the main one writes."""
    t = training
    t.flush_metrics()
    machine.average_norms(t.accelerator, t.bare)
    t.count_seconds()
    weights = machine.network_state(t.accelerator, t.network)
    optimizer = machine.optimizer_state(t.accelerator, t.network, t.optimizer)
    random = gather_object([rng.get_state()])
    if t.metrics is not None:  # in the main process
        scaler = t.accelerator.scaler
        state = {
            "recipe": t.recipe.as_dict(),
            "data": t.fingerprint,
            "input_size": [*t.data.input_size],
            "preparation": preparation(t.data, t.recipe.data),
            "feed": type(t.feed).__name__,
            "network": weights,
            "optimizer": optimizer,
            "scaler": None if scaler is None else scaler.state_dict(),
            "ema": None if t.ema is None else t.ema.state_dict(),
            "random": random,
            "step": t.done,  # of the schedule, and the position in the data: both are functions of it
            "metrics_length": t.metrics.length(),
            **{name: getattr(t, name) for name in ("own", "sums", "seconds", "best", "stuck")},
        }
        t.folder.save(state)
    t.accelerator.wait_for_everyone()


def restore(training: "Training") -> int:
    """Takes up the run in the folder; returns the length that metrics.jsonl had at its last checkpoint."""
    t, path = training, training.folder.checkpoint
    state = load_checkpoint(path)
    recipe = Recipe.from_tables(state["recipe"], f"train: the recipe in {path}")
    check_same(recipe.same_numbers(), t.recipe.same_numbers(), "recipe", path)
    check_same(state["data"], t.fingerprint, "data set", path)
    feed = {"feed": type(t.feed).__name__}  # each draws crops and mirrors in its own way
    check_same({"feed": state["feed"]}, feed, "way to hold its images (cache_gib)", path)

    def set_random(states: list[Any]) -> None:
        if len(states) == t.accelerator.num_processes:  # else what the network draws starts a new stream
            rng.set_state(states[t.accelerator.process_index])

    parts: dict[str, Callable[[Any], object]] = {
        "network": lambda weights: machine.load_network(t.accelerator, t.network, weights),
        "optimizer": lambda saved: machine.load_optimizer(t.accelerator, t.network, t.optimizer, saved),
        "ema": lambda saved: t.ema is None or t.ema.load_state_dict(saved),
        "scaler": lambda saved: t.accelerator.scaler is None or t.accelerator.scaler.load_state_dict(saved),
        "random": set_random,
        "sums": lambda sums: [0.0 + total for _, total in zip(t.sums, sums, strict=True)],
        "step": range(t.total + 1).index,
    }
    for name, take_up in parts.items():
        try:
            take_up(state[name])
        except MISFITS as error:
            reason = " ".join(str(error).split())[:400]
            raise ValueError(
                f"train: {path} belongs to another network, or is damaged: its field {name!r} does not fit: {reason} "
                f"{START_ANEW}"
            ) from error
    t.done, t.sums, t.seconds = state["step"], state["sums"], state["seconds"]
    t.best, t.stuck = state["best"], state["stuck"]
    length: int = state["metrics_length"]
    return length


def write_weights(training: "Training", name: str) -> None:
    """The tested weights as safetensors. Tied ones are stored once for each name, so that any loader finds them."""
    t = training
    state = machine.network_state(t.accelerator, t.network) if t.ema is None else t.ema.module.state_dict()
    if t.main:
        copies = {key: value.detach().to("cpu").clone().contiguous() for key, value in state.items()}
        t.folder.write(name, safetensors.save(copies, metadata={"format": "pt"}))


def read_weights(training: "Training", name: str) -> None:
    """Puts weights that the run has written back into the network that is tested."""
    target, path = training.bare if training.ema is None else training.ema.module, training.folder.path / name
    try:
        target.load_state_dict(safetensors.load(path.read_bytes()))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"train: {path} can't be read, or is another network's: {error}. {START_ANEW}") from error
