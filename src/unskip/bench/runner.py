"""One case, ready to be timed: the network on its device, the step, its memory, and the largest batch that fits."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._core.rng import seeded
from unskip.bench.floor import synchronize
from unskip.bench.setting import Case, Setting

WARM_UP = 3  # steps before anything is measured: compilation, choice of algorithms, the optimizer's state
LEARNING_RATE = 1e-4  # small, so that many steps on one random batch stay finite


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What all networks of a comparison read and tell apart."""

    shape: tuple[int, ...]  # of one image
    classes: int


@contextmanager
def tuned(setting: Setting) -> Iterator[None]:
    """cuDNN picks its algorithms by trying, and the CPU has its threads; afterwards all is as it was."""
    before = torch.backends.cudnn.benchmark, torch.get_num_threads()
    torch.backends.cudnn.benchmark = True
    if setting.threads:
        torch.set_num_threads(setting.threads)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.set_num_threads(before[1])


class Runner:
    """Holds a network on its device and times rounds of its step."""

    def __init__(self, case: Case, network: nn.Module, reading: Reading, setting: Setting) -> None:
        self.case, self.setting, self.reading, self.device = case, setting, reading, setting.where
        self.rounds: list[float] = []  # images a second
        self.graph: torch.cuda.CUDAGraph | None = None
        self.base = allocated(self.device)
        training = case.mode == "train"
        network = network.train(training).requires_grad_(training)
        dtype = torch.float32 if training else setting.dtype
        self.network = network.to(self.device, dtype)
        if setting.channels_last:
            self.network = self.network.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE, momentum=0.9) if training else None
        self.call: nn.Module = self.network
        if case.compiled:
            # Networks share the code of their classes, and each of them counts as a recompilation of it.
            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 128)
            self.call = torch.compile(self.network, dynamic=False)  # type: ignore[assignment]
        self.batch(setting.images)
        began = time.perf_counter()
        self.step()
        synchronize(self.device)
        self.first_step = time.perf_counter() - began  # seconds, most of them the compiler's
        for _ in range(WARM_UP - 1):
            self.step()

    def batch(self, images: int) -> None:
        """Random images and labels: zeros would run faster than real data."""
        with seeded(0):
            x = torch.randn(images, *self.reading.shape, device=self.device).to(self.setting.dtype)
            self.y = torch.randint(self.reading.classes, (images,), device=self.device)
        self.x = x.contiguous(memory_format=torch.channels_last) if self.setting.channels_last and x.ndim == 4 else x

    @property
    def autocast(self) -> bool:
        return self.case.mode == "train" and self.setting.precision != "fp32"

    def step(self) -> None:
        if self.optimizer is None:
            with torch.no_grad():
                self.call(self.x)
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.update()

    def update(self) -> None:
        assert self.optimizer is not None
        with torch.autocast(self.device.type, self.setting.dtype, enabled=self.autocast):
            out = self.call(self.x)
        F.cross_entropy(out.float(), self.y).backward()
        self.optimizer.step()

    def record_graph(self) -> None:
        """The step as one CUDA graph, so that launching its kernels takes no time on either side."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.set_grad_enabled(self.optimizer is not None):
            self.update() if self.optimizer is not None else self.call(self.x)
        self.graph = graph

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
        return all(bool(torch.isfinite(p).all()) for p in self.network.parameters())

    # ------------------------------------------------------------ memory

    def peak(self) -> int:
        """The most bytes that this case holds at once: weights, gradients, the optimizer's state, batch and all."""
        return peak_bytes(self.step, self.device, self.base, resident(self))

    def largest_batch(self, limit: int) -> int:
        """The largest batch whose training step stays within `limit` bytes, by doubling and bisection; 0 if none."""
        images = len(self.x)

        def fits(batch: int) -> bool:
            try:
                self.batch(batch)
                self.step()
                return self.peak() <= limit
            except RuntimeError as error:  # of which torch.OutOfMemoryError is one; a CPU's allocator has no other
                if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                    return False
                raise
            finally:
                if self.optimizer is not None:
                    self.optimizer.zero_grad(set_to_none=True)
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
            self.batch(images)

    def close(self) -> None:
        """Gives its memory back."""
        self.graph = None
        del self.network, self.call, self.optimizer, self.x, self.y
        free()


def free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free()
    return torch.cuda.memory_allocated(device)


def resident(runner: Runner) -> int:
    """Bytes that are there between two steps: weights, buffers, the optimizer's state and the batch."""
    tensors: list[Tensor] = [*runner.network.parameters(), *runner.network.buffers(), runner.x, runner.y]
    if runner.optimizer is not None:
        tensors += [v for state in runner.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors})


def peak_bytes(step: Callable[[], object], device: torch.device, base: int, held: int) -> int:
    """The most bytes allocated during a step.

    On a GPU PyTorch counts them; `base` was there before the network. On a CPU the profiler notes each allocation and
    release, and `held` was there before the step.
    """
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - base
    free()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells whoever looks at the terminal when it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    level = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return held + peak
