"""One case, ready to be timed: the model on its device, the step, its memory, and the largest batch that fits.

A training step is the one of `unskip train` (`unskip.train.step`): the same optimizer, mixed precision and CUDA graph.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskip._core.rng import seeded
from unskip.bench.floor import synchronize
from unskip.bench.setting import Case, Setting
from unskip.train.machine import make_accelerator
from unskip.train.optim import make_optimizer
from unskip.train.recipe import Recipe
from unskip.train.step import GraphStep, Step, make_step

WARM_UP = 3  # steps before anything is measured: compilation, choice of algorithms, the optimizer's state
LEARNING_RATE = 1e-4  # small, so that many steps on one random batch stay finite


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all models of a comparison read and give."""

    shape: tuple[int, ...]  # of one image
    classes: int


@contextmanager
def tuned(setting: Setting) -> Iterator[None]:
    """Lets cuDNN pick its algorithms by trying and sets device and threads; afterwards all is as it was."""
    before = torch.backends.cudnn.benchmark, torch.get_num_threads()
    torch.backends.cudnn.benchmark = True
    if setting.threads:
        torch.set_num_threads(setting.threads)
    try:
        with torch.cuda.device(setting.where) if setting.where.type == "cuda" else nullcontext():
            yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.set_num_threads(before[1])


class Runner:
    """Holds a model on its device and times rounds of its step."""

    def __init__(self, case: Case, model: nn.Module, task: Task, setting: Setting) -> None:
        self.case, self.setting, self.task, self.device = case, setting, task, setting.where
        self.rounds: list[float] = []  # images a second
        self.graph: torch.cuda.CUDAGraph | None = None
        free()
        self.base = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0  # bytes
        training = case.mode == "train"
        model = model.train(training).to(self.device, torch.float32 if training else setting.dtype)
        self.model = model.to(memory_format=torch.channels_last) if setting.channels_last else model
        if case.compiled:
            # Models share the code of their classes, and each of them counts as a recompilation of it.
            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 128)
            self.model.compile(dynamic=False)
        self.train_step = self._train_step() if training else None
        self.set_batch(setting.images)
        began = time.perf_counter()
        self.step()
        synchronize(self.device)
        self.first_step = time.perf_counter() - began  # seconds, most of them the compiler's
        for _ in range(WARM_UP - 1):
            self.step()

    def _train_step(self) -> Step:
        recipe = self.recipe
        accelerator = make_accelerator(recipe)
        model, optimizer = accelerator.prepare(
            self.model, make_optimizer(self.model, recipe.optimizer, cuda_graph=recipe.run.cuda_graph)
        )
        return Step(accelerator, model, optimizer, recipe)

    @property
    def recipe(self) -> Recipe:
        """How `unskip train` would be asked for this step."""
        return Recipe.of(
            optimizer="sgd",
            lr=LEARNING_RATE,
            precision=self.setting.precision,
            device="cuda" if self.device.type == "cuda" else "cpu",
            channels_last=self.setting.channels_last,
            cuda_graph=self.setting.graph and self.device.type == "cuda",
        )

    def set_batch(self, images: int) -> None:
        """Makes random images and labels: zeros would run faster than real data."""
        with seeded(0):
            x = torch.randn(images, *self.task.shape, device=self.device).to(self.setting.dtype)
            self.y = torch.randint(self.task.classes, (images,), device=self.device)
        self.x = x.contiguous(memory_format=torch.channels_last) if self.setting.channels_last and x.ndim == 4 else x

    def step(self) -> None:
        if self.train_step is not None:
            self.train_step(self.x, self.y)
        else:
            with torch.no_grad():
                self.model(self.x)

    def record_graph(self) -> None:
        """Records the step as one CUDA graph, so that launching its kernels takes no time on either side."""
        free()
        if self.train_step is not None:
            eager = self.train_step
            step = make_step(eager.accelerator, eager.network, eager.optimizer, self.recipe)
            assert isinstance(step, GraphStep)
            step.capture(self.x, self.y)
            self.train_step, self.graph = step, step.graph
            free()  # what its warm-up left in the cache
            return
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def run(self, steps: int) -> float:
        """Seconds of so many steps."""
        once = self.step if self.graph is None else self.graph.replay
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            once()
        synchronize(self.device)
        return time.perf_counter() - began

    def round(self) -> None:
        """One turn: as many steps as fit into it, at least one."""
        if not self.rounds:
            self.steps = max(1, round(self.setting.seconds / self.run(2) * 2))
        self.rounds.append(self.steps * len(self.x) / self.run(self.steps))

    def finite(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for p in self.model.parameters())

    # ------------------------------------------------------------ memory

    def peak(self) -> int:
        """The most bytes that this case holds at once: weights, gradients, the optimizer's state, batch and all."""
        tensors: list[Tensor] = [*self.model.parameters(), *self.model.buffers(), self.x, self.y]
        if self.train_step is not None:
            states = self.train_step.optimizer.state.values()
            tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        resident = sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors})  # between two steps
        return peak_bytes(self.step, self.device, self.base, resident)

    def largest_batch(self, limit: int) -> int:
        """The largest batch whose training step stays within `limit` bytes, by doubling and bisection; 0 if none."""
        images = len(self.x)

        def fits(batch: int) -> bool:
            try:
                self.set_batch(batch)
                self.step()
                return self.peak() <= limit
            except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's allocator has no class of its own
                if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                    return False
                raise
            finally:
                self.model.zero_grad()
                free()

        try:
            low, high = 0, 2  # a norm in training needs two images
            while fits(high):
                low, high = high, 2 * high
            while high - low > max(1, low // 128):  # to within 1 %
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            return low
        finally:
            self.set_batch(images)

    def close(self) -> None:
        """Gives its memory back."""
        self.graph = None
        del self.model, self.train_step, self.x, self.y
        free()


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA has not been used


def peak_bytes(step: Callable[[], object], device: torch.device, base: int, held: int) -> int:
    """The most bytes allocated during a step.

    On a GPU PyTorch counts them; `base` was there before the model. On a CPU the profiler notes each allocation and
    release, and `held` was there before the step.
    """
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - base
    free()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print when it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    level = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return held + peak
