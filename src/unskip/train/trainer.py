"""The training loop.

Accelerate carries device, mixed precision and distribution. A batch is the same images in the same order however many
processes share it, and a run that was killed goes on from its checkpoint with the same numbers (`unskip.train.saving`).
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from unskip._core import rng
from unskip.data.feed import Partition, make_feed
from unskip.data.sets import DataSet, Split
from unskip.train import machine, saving
from unskip.train.checkpoint import Resume, RunFolder
from unskip.train.display import Display
from unskip.train.metrics import Metrics, WandbRun, tensorboard
from unskip.train.optim import learning_rate, make_optimizer, set_rates
from unskip.train.penalties import Constraint, Penalty, from_config
from unskip.train.recipe import Recipe
from unskip.train.step import STATS, class_axis, compile_network, make_step


class TrainingInterrupted(Exception):  # noqa: N818 - no error
    """A signal asked the run to stop; it has been saved and can go on."""


class TrainingDiverged(Exception):  # noqa: N818 - a result
    """The loss is no number any more. The last checkpoint from before is untouched."""


class Training:
    """One run. Every object that it needs is made once here; the methods below are the loop."""

    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        model: nn.Module,
        data: DataSet,
        folder: RunFolder,
        penalties: Sequence[Penalty] = (),
        constraints: Sequence[Constraint] = (),
        silent: bool = False,
        own: str = "",  # the class of a network that the recipe does not name
        stop: machine.Stop | None = None,  # shared by several runs, and installed by whoever made it
        results_only: bool = False,  # no weights, picture or sample at the end, and no last checkpoint
    ) -> None:
        self.accelerator, self.recipe, self.folder, self.own = accelerator, recipe, folder, own
        self.main = accelerator.is_main_process
        self.silent = silent or not self.main
        self.results_only = results_only
        self.stop = stop or machine.Stop()
        self.signals = nullcontext() if stop else self.stop
        dtype = torch.float64 if recipe.run.precision == "fp64" else torch.float32
        partition = Partition(accelerator.process_index, accelerator.num_processes)
        self.feed = make_feed(
            data, recipe.data, **recipe.feeding, device=accelerator.device, dtype=dtype, partition=partition
        )
        self.data = self.feed.data
        self.fingerprint = self.data.fingerprint()
        images = recipe.run.recalibrate_batchnorm
        if images and not any(isinstance(m, _BatchNorm) for m in model.modules()):
            raise ValueError(f"recipe: recalibrate_batchnorm={images} needs one, and no BatchNorm is in the network.")
        model = model.to(accelerator.device, dtype)
        if recipe.run.channels_last:
            model = model.to(memory_format=torch.channels_last)
        if recipe.run.sync_bn and partition.world > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        more = from_config(model, recipe.optimizer)
        self.ema = ModelEmaV3(model, decay=recipe.optimizer.ema, use_warmup=True) if recipe.optimizer.ema else None
        compile_network(model, recipe, self.data.image_size)
        self.network, self.optimizer = accelerator.prepare(
            model, make_optimizer(model, recipe.optimizer, cuda_graph=recipe.run.cuda_graph)
        )
        penalties, constraints = [*penalties, *more[0]], [*constraints, *more[1]]
        self.step = make_step(accelerator, self.network, self.optimizer, recipe, penalties, constraints)
        self.bare = self.step.bare
        self.total = recipe.run.epochs * self.feed.steps
        # Updates between asking each other about signals
        self.wait = 1 if partition.world == 1 else recipe.run.log_steps
        # What changes from update to update, besides the objects above
        self.done = 0  # updates
        self.sums = [0.0] * len(STATS)  # over the updates of this epoch that have been looked at
        self.seconds = 0.0  # of all parts of the run
        self.best = math.inf  # validation error, of a text the loss
        self.stuck = False  # whether the last epoch was no better than guessing
        self.pending: list[tuple[dict[str, Any], Tensor]] = []  # updates whose numbers nobody has asked for
        self.asked_for: list[tuple[list[dict[str, Any]], Tensor, torch.cuda.Event | None]] = []  # groups under way

    @property
    def doctor(self) -> str:
        """A sentence that names what looks into the network."""
        return f"`{'unskip.diagnose(model, batch)' if self.own else self.recipe.doctor}` says what to look at."

    def updates(self, resume: Resume, *, take_over: bool = False) -> Iterator[None]:
        """Trains to the end, from the start or from the checkpoint in the folder. Yields after each update."""
        recipe = self.recipe
        found = machine.on_main(self.accelerator, lambda: self.folder.open(resume, take_over=take_over))
        rng.set_seed(recipe.run.seed, self.accelerator.process_index)
        length = saving.restore(self) if found else 0
        if self.main and not found:
            self.folder.write("recipe.toml", recipe.to_toml().encode())
        metrics: AbstractContextManager[Metrics | None] = nullcontext()
        if self.main:
            boards = [
                open_board(self.folder.path, self.done)
                for asked, open_board in ((recipe.run.tensorboard, tensorboard), (recipe.run.wandb, WandbRun))
                if asked
            ]
            metrics = Metrics(self.folder.metrics, length, boards=boards)
        display = Display(epochs=recipe.run.epochs, steps=self.feed.steps, step=self.done, silent=self.silent)
        with self.signals, metrics as self.metrics, display as self.display:
            for note in self.data.notes:
                display.say(f"Note: {note}.")
            if found:
                display.say(f"Going on after update {self.done:,} of {self.total:,}.")
            self.clock = time.perf_counter()
            while self.done < self.total:
                yield from self.epoch()
        self.folder.wait()

    def epoch(self) -> Iterator[None]:
        """From wherever this epoch stands to its end: updates, validation, checkpoint."""
        config, steps = self.recipe.run, self.feed.steps
        epoch, start = divmod(self.done, steps)
        began = time.perf_counter()
        self.network.train()
        for x, y in self.feed.epoch(epoch, start):
            lr = learning_rate(self.recipe.optimizer, self.done, epochs=config.epochs, steps=steps)
            set_rates(self.optimizer, lr)
            stats = self.step(x, y)
            self.done += 1
            if self.ema is not None:
                self.ema.update(self.bare, step=self.done)
            self.pending.append(({"kind": "step", "step": self.done, "epoch": epoch + 1, "lr": lr}, stats))
            yield
            if self.done % config.log_steps == 0:
                self.read_back()
                self.flush_metrics(keep=1)  # what the GPU has finished long ago, so that it never waits for us
            if self.done % steps == 0:
                break  # the end of an epoch is saved after its validation
            if config.save_steps and self.done % config.save_steps == 0:
                saving.save(self)
            if self.done % self.wait == 0:
                self.stop_if_asked()
        self.flush_metrics()
        self.close_epoch(epoch + 1, (steps - start) * config.batch / (time.perf_counter() - began))
        if self.done == self.total and self.results_only:
            self.count_seconds()
        elif self.done == self.total or time.perf_counter() - self.clock >= config.save_seconds:
            saving.save(self)
        if self.done < self.total:
            self.stop_if_asked()

    def count_seconds(self) -> None:
        """Adds the time since the last call to `seconds`."""
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now

    def close_epoch(self, epoch: int, images_per_s: float) -> None:
        """Validates, writes the epoch's line, and says so when the network does not learn."""
        loss, error, _ = (total / self.feed.steps for total in self.sums)
        self.sums = [0.0] * len(STATS)
        row: dict[str, Any] = {"kind": "epoch", "step": self.done, "epoch": epoch, "loss": loss, "error": error}
        machine.average_norms(self.accelerator, self.bare)
        if self.data.val is not None:
            row["val_loss"], row["val_error"] = self.evaluate(self.data.val)
            if self.data.vocabulary:
                row["perplexity"] = math.exp(min(row["val_loss"], 700.0))
            score = "val_loss" if self.data.vocabulary else "val_error"
            if self.recipe.run.keep == "best" and row[score] < self.best:
                self.best = row[score]
                saving.write_weights(self, "best.safetensors")
        row["images_per_s"] = images_per_s
        if self.metrics is not None:
            self.metrics.write([row])
        self.display.epoch(row)
        self.stuck = self.is_stuck(loss, error)
        judged = max(self.recipe.run.epochs // 4, 1 + math.ceil(self.recipe.optimizer.warmup_epochs))
        if self.stuck and self.done >= 30 and epoch == judged:
            self.display.say(
                f"After epoch {epoch} the loss is still {loss:.3f}, where guessing gives {self.data.chance_loss:.3f}. "
                f"{self.doctor}"
            )

    def read_back(self) -> None:
        """Asks for the numbers of the pending updates, without waiting for them."""
        if not self.pending:
            return
        values = torch.stack([stats for _, stats in self.pending])
        if self.accelerator.num_processes > 1:
            values = self.accelerator.reduce(values, reduction="mean")
        arrived = None
        if values.is_cuda:
            on_host = torch.empty_like(values, device="cpu", pin_memory=True)
            values = on_host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self.asked_for.append(([row for row, _ in self.pending], values, arrived))
        self.pending = []

    def flush_metrics(self, keep: int = 0) -> None:
        """Writes down all updates but the last `keep` groups, and stops a run whose loss is no number any more."""
        if not keep:
            self.read_back()
        while len(self.asked_for) > keep:
            rows, values, arrived = self.asked_for.pop(0)
            if arrived is not None:
                arrived.synchronize()
            for row, stats in zip(rows, values.double().tolist(), strict=True):
                row.update(zip(STATS, stats, strict=True))
                self.sums = [a + b for a, b in zip(self.sums, stats, strict=True)]
            if self.metrics is not None:
                self.metrics.write(rows)
            self.display.update(rows[-1], len(rows) * self.recipe.run.batch)
            for row in rows:
                if not math.isfinite(row["loss"] + row["penalty"]):
                    raise TrainingDiverged(
                        f"train: the loss is {row['loss']} at update {row['step']:,} (learning rate {row['lr']:.4g}). "
                        f"A lower lr, more warmup_epochs or clip = 1 may help; {self.doctor}"
                    )

    def is_stuck(self, loss: float, error: float) -> bool:
        """Whether training is where guessing is: by the loss where that can be compared, else by the error."""
        mixed = self.recipe.data.mixes or self.recipe.optimizer.smoothing
        if self.recipe.optimizer.loss == "cross_entropy" and not mixed:
            return loss > 0.97 * self.data.chance_loss
        return error > 0.97 * self.data.chance_error

    def stop_if_asked(self) -> None:
        """Saves and leaves if a process got a signal."""
        asked = bool(self.stop.asked)
        if self.accelerator.num_processes > 1:
            mine = torch.tensor(float(asked), device=self.accelerator.device)
            asked = self.accelerator.reduce(mine, reduction="sum").item() > 0
        if asked:
            saving.save(self)
            self.folder.wait()
            raise TrainingInterrupted(
                f"train: stopped by {self.stop.asked or 'a signal'} after update {self.done:,} of {self.total:,} and "
                f"saved in {self.folder.path}. Go on with --resume auto."
            )

    @torch.no_grad()
    def evaluate(self, split: Split) -> tuple[float, float]:
        """Mean cross-entropy and error in percent, of the averaged weights where the recipe has an EMA."""
        network = self.network if self.ema is None else self.ema.module
        network.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        with self.accelerator.autocast(), self.eager():
            for x, y, weight in self.feed.evaluation(split):
                logits = class_axis(network(x).to(self.feed.dtype), y)
                loss = F.cross_entropy(logits, y, reduction="none")
                wrong = (logits.argmax(1) != y).to(logits.dtype)
                if y.ndim == 2:  # the mean over a text's tokens
                    loss, wrong = loss.mean(1), wrong.mean(1)
                sums += torch.stack([(loss * weight).sum(), (wrong * weight).sum(), weight.sum()]).double()
        network.train(self.ema is None)
        loss_sum, wrong_sum, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        return loss_sum / count, 100 * wrong_sum / count

    @torch.no_grad()
    def recalibrate_batchnorm(self) -> None:
        """Measures BatchNorm's statistics anew on training images, without augmentation, as one batch.

        Each layer's statistics are then those of what it reads in eval mode. A running average over small batches is of
        other inputs: those of layers that were normalised by the batch, and many layers amplify the difference.
        """
        order = torch.randperm(len(self.data.train), generator=torch.Generator().manual_seed(0))
        network = self.bare if self.ema is None else self.ema.module
        training = network.training
        network.eval()  # dropout too, which torch.optim.swa_utils.update_bn would leave on
        momenta = {norm: norm.momentum for norm in network.modules() if isinstance(norm, _BatchNorm)}
        for norm in momenta:
            norm.train()
            norm.reset_running_stats()
            norm.momentum = None  # the mean over batches, of which there is one
        try:
            with self.accelerator.autocast(), self.eager():
                for x, _ in self.feed.plain_batches(self.data.train, (order[: self.recipe.run.recalibrate_batchnorm],)):
                    network(x)
        finally:  # one batch may be more than the memory holds, and the network may be the caller's
            for norm, momentum in momenta.items():
                norm.momentum = momentum
            network.train(training)

    def eager(self) -> AbstractContextManager[Any]:
        """Without torch.compile, for batches of other sizes than those it has seen."""
        return torch.compiler.set_stance("force_eager") if self.recipe.run.compile != "no" else nullcontext()
