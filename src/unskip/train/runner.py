"""A whole run: data, network, training, test, and what stays of it in its folder.

result = unskip.train.run("digits-pnnh-56")                                  # a named recipe
result = unskip.train.run(Recipe.of(dataset="npz"), model=net, data_dir="usps.npz", out="runs/usps")
"""

import json
import math
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskip._core.errors import RUN_ERRORS, reason
from unskip._core.rng import seeded
from unskip.data import sets
from unskip.data.sets import DataSet
from unskip.io.load import weights_from
from unskip.models.build import build_network, start_from
from unskip.train import machine, saving
from unskip.train.checkpoint import Resume, RunFolder
from unskip.train.curves import draw_curves
from unskip.train.metrics import read_metrics
from unskip.train.penalties import Constraint, Penalty
from unskip.train.quantized import NETWORK, quantization_aware, write_network
from unskip.train.recipe import Recipe, load_recipe
from unskip.train.trainer import Training


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of a run. Its text is one line."""

    network: str  # the recipe's with its method, or the class of your own
    dataset: str
    test_error: float  # percent, of the weights that the recipe keeps
    test_loss: float  # cross-entropy
    test_images: int  # of a text its tokens
    val_error: float | None  # percent, of the same weights
    val_loss: float | None
    parameters: int  # trained
    epochs: int
    steps: int
    seconds: float  # of all parts of the run, without reading the data
    stuck: bool  # the training loss ended no better than guessing
    out: str
    sample: str = ""  # what the network writes, where it has learnt a text

    def __str__(self) -> str:
        if self.sample:
            val = "" if self.val_loss is None else f", validation loss {self.val_loss:.4f}"
            return (
                f"{self.network} on {self.dataset}: test loss {self.test_loss:.4f} (perplexity "
                f"{math.exp(self.test_loss):.2f}) of {self.test_images:,} tokens{val}, {self.epochs} epochs, "
                f"{self.steps:,} updates, {self.seconds:.0f} s, in {self.out}"
            )
        val = "" if self.val_error is None else f", validation error {self.val_error:.2f} %"
        return (
            f"{self.network} on {self.dataset}: test error {self.test_error:.2f} % of {self.test_images:,} images{val}"
            f", {self.epochs} epochs, {self.steps:,} updates, {self.seconds:.0f} s, in {self.out}"
        )


def run(
    recipe: str | Path | Recipe,
    *,
    model: nn.Module | None = None,
    data: DataSet | None = None,
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: Resume = "never",
    take_over: bool = False,
    penalties: Sequence[Penalty] = (),
    constraints: Sequence[Constraint] = (),
    silent: bool = False,
) -> Result:
    """Trains a network and tests it.

    Args:
        recipe: a Recipe, the name of one, or the path of a TOML file.
        model: a network of your own, trained in place, instead of the recipe's; with `ema` the averaged weights,
            which are tested, are in the run's folder alone.
        data: a data set of your own, instead of the recipe's.
        data_dir: where the recipe's data set lies.
        out: the folder of the run; 'runs/' and the recipe's name unless given.
        resume: 'auto' goes on with the run in `out` if there is one, 'never' refuses to touch it.
        take_over: trains in a folder that a process of another host has locked and left.
        penalties, constraints: besides those of the recipe.
        silent: shows nothing.

    Raises:
        ValueError: something about recipe, data, network or folder is wrong; nothing has been overwritten.
        TrainingInterrupted: SIGTERM, SIGINT or SIGHUP came; the run is saved, and resume='auto' goes on with it.
        TrainingDiverged: the loss is no number any more.
    """
    if not isinstance(recipe, str | Path | Recipe):
        raise ValueError(
            f"train: recipe={recipe!r} must be a Recipe, the name of one, or a TOML file's path; see Recipe.of."
        )
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(
            f"train: model={model!r} is not an nn.Module; a name goes into the recipe, Recipe.of(model=NAME)."
        )
    name = Path(recipe).stem if isinstance(recipe, str | Path) else recipe.network.model.replace(":", ".")
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    with machine.seeded_run(recipe.run):
        machine.make_accelerator(recipe)  # refuses what this machine can't do before the data is read
        data = data or sets.load(recipe.data, data_dir)
        training = train_one(
            recipe, model=model, data=data, out=out or Path("runs") / name, resume=resume, take_over=take_over,
            silent=silent, penalties=penalties, constraints=constraints,
        )  # fmt: skip
        while True:
            try:
                next(training)
            except StopIteration as ended:
                result: Result = ended.value
                return result


def train_one(
    recipe: Recipe,
    *,
    model: nn.Module | None = None,
    data: DataSet,
    out: str | Path,
    resume: Resume,
    take_over: bool = False,
    **more: Any,
) -> Generator[None, None, Result]:
    """Builds, trains and tests a model. Yields after each update, so that other models can take turns with it.

    `more` goes to Training.
    """
    start = recipe.network
    if recipe.run.quantize and model is None and not (start.pretrained or start.init_from):
        raise ValueError(
            f"recipe: quantize={recipe.run.quantize} needs a trained network to start from, and {start} has random "
            "weights. Give init_from (--init-from RUN) or pretrained."
        )
    own = "" if model is None else type(model).__name__
    model = build(recipe, data) if model is None else model
    try_out(model, data)
    if recipe.network.init_from:
        note = start_from(model, weights_from(recipe.network.init_from, command="train"), recipe.network.init_from)
        data = replace(data, notes=(*data.notes, *([note] if note else [])))
    if recipe.run.quantize:
        model = quantization_aware(model, recipe, data)
        own = own or f"{recipe.network} in {recipe.run.quantize} bits"
    with machine.own_forward(model), RunFolder(out) as folder:
        training = Training(machine.make_accelerator(recipe), recipe, model, data, folder, own=own, **more)
        yield from training.updates(resume, take_over=take_over)
        return finish(training)


def build(recipe: Recipe, data: DataSet) -> nn.Module:
    """The network that a recipe names. The user's own recipe may name code of theirs, which can fail in any way."""
    name = f"train: model={recipe.network.model!r}"
    try:
        with seeded(recipe.run.seed):
            model: Any = build_network(
                recipe.network, num_classes=data.classes, in_chans=data.channels, allow_import=True
            )
    except ValueError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {reason(error)}"
        raise ValueError(f"{name} can't be built with options={recipe.network.options}: {why}.") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} gives {type(model).__name__!r}; a function that returns an nn.Module is expected.")
    return model


def try_out(model: nn.Module, data: DataSet) -> None:
    """Refuses a network that doesn't fit the data before anything is written."""
    kind = "text" if data.vocabulary else "image"
    shape, wanted = (1, *data.input_size), (1, *data.output_size)
    like = next(model.parameters(), None)
    if like is None:
        raise ValueError(f"train: {type(model).__name__} has no parameters, so there is nothing to train.")
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(torch.zeros(shape, device=like.device, dtype=torch.long if data.vocabulary else like.dtype))
    except RUN_ERRORS as error:
        why = reason(error)
        what = f"{kind}s of shape {shape[1:]} ({'T' if data.vocabulary else 'C, H, W'})"
        raise ValueError(f"train: the network can't read {what}: {why}.") from error
    finally:
        model.train(training)
    found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}, no tensor,"
    if found != f"shape {wanted}":
        raise ValueError(f"train: the network returns {found} for one {kind}; {wanted} is expected.")


@torch.no_grad()
def write_text(training: Training, tokens: int = 200, temperature: float = 0.8) -> str:
    """The test's first tokens, and how the network goes on: each next one is drawn from what it predicts."""
    data, model = training.data, training.bare if training.ema is None else training.ema.module
    ids = data.test.labels[None, : min(data.image_size, 64)].to(training.accelerator.device)
    generator = torch.Generator(ids.device).manual_seed(0)
    model.eval()
    with training.accelerator.autocast(), training.eager():
        for _ in range(tokens):
            logits = model(ids[:, -data.image_size :])[0, -1].float() / temperature
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)[None]], dim=1)
    return "".join(data.vocabulary[i] for i in ids[0].tolist())


def finish(training: Training) -> Result:
    """Tests the weights that the recipe keeps, and writes what stays of the run."""
    recipe, data, folder = training.recipe, training.data, training.folder
    network = training.own or str(recipe.network)
    if recipe.run.keep == "best":
        saving.read_weights(training, "best.safetensors")
    if recipe.run.recalibrate_batchnorm:
        training.recalibrate_batchnorm()
    test_loss, test_error = training.evaluate(data.test)
    val_loss, val_error = (None, None) if data.val is None else training.evaluate(data.val)
    sample = write_text(training) if data.vocabulary and not training.results_only else ""
    result = Result(
        network=network,
        dataset=data.name,
        test_error=test_error,
        test_loss=test_loss,
        test_images=training.feed.count(data.test) * (data.image_size if data.vocabulary else 1),
        val_error=val_error,
        val_loss=val_loss,
        parameters=sum(p.numel() for p in training.bare.parameters() if p.requires_grad),
        epochs=recipe.run.epochs,
        steps=training.done,
        seconds=training.seconds,
        stuck=training.stuck,
        out=str(folder.path),
        sample=sample,
    )
    if not training.results_only:
        saving.write_weights(training, "weights.safetensors")
        if training.main and recipe.run.quantize:
            model = training.bare if training.ema is None else training.ema.module
            write_network(folder.path / NETWORK, model, recipe, data)
        if training.main:
            guess = data.chance_loss if recipe.optimizer.loss == "cross_entropy" else None
            picture = draw_curves(read_metrics(folder.metrics), f"{network} on {data.name}", guess)
            folder.write("curves.png", picture)
    if training.main:
        folder.write("result.json", (json.dumps(asdict(result), indent=1) + "\n").encode())
    if result.stuck:
        training.display.say(
            f"The network did not learn: its loss ended no better than guessing ({data.chance_loss:.3f}). "
            f"{training.doctor}"
        )
    return result
