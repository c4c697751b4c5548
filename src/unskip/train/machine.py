"""The machine around a run: Accelerate's device and processes, signals, determinism; all of it put back afterwards."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from unskip._core import rng
from unskip.train.recipe import Recipe, RunConfig


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Accelerate with the recipe's device and precision; how many processes there are is the launcher's business."""
    # Accelerate keeps one global state, which holds the precision of an earlier run in this process.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    handlers: list[Any] = [
        # Each process keeps its own batch statistics; they are averaged before they are used (see average_norms).
        DistributedDataParallelKwargs(broadcast_buffers=False),
        AutocastKwargs(cache_enabled=not recipe.run.cuda_graph),  # a recorded update must cast anew at each replay
    ]
    precision = recipe.run.precision if recipe.run.precision in ("bf16", "fp16") else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=recipe.run.device == "cpu", kwargs_handlers=handlers)
    where = accelerator.device.type
    if recipe.run.device == "cuda" and where != "cuda":
        raise ValueError("recipe: device='cuda', but PyTorch finds no GPU here. Use 'auto' or 'cpu'.")
    if recipe.run.precision == "fp16" and where != "cuda":
        raise ValueError(f"recipe: precision='fp16' needs a GPU, and this runs on {where}. Use 'bf16' or 'fp32'.")
    if recipe.run.sync_bn and where != "cuda":
        raise ValueError(f"recipe: sync_bn=true needs GPUs, and this runs on {where}. Set sync_bn=false.")
    sharded = accelerator.distributed_type == DistributedType.FSDP
    for name in ("ema", "orthogonal", "max_norm", "decay_from"):
        value = getattr(recipe.optimizer, name)
        if sharded and value not in (0.0, "zero"):
            raise ValueError(f"recipe: {name}={value} needs whole weights, and FSDP shards them. Use DDP.")
    return accelerator


def is_main() -> bool:
    """Whether this is the process that speaks for all."""
    return PartialState().is_main_process


@contextmanager
def seeded_run(config: RunConfig) -> Iterator[None]:
    """Seeds and determinism for a run. Afterwards the global generators and flags are what they were."""
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    with rng.seeded(config.seed):
        try:
            torch.backends.cudnn.benchmark = not config.deterministic
            if config.deterministic:
                os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic with this alone
                torch.use_deterministic_algorithms(True)
            yield
        finally:
            torch.backends.cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            if config.deterministic and workspace is None:
                os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
            elif workspace is not None:
                os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


@contextmanager
def own_forward(network: nn.Module) -> Iterator[None]:
    """Accelerate gives a network another `forward` for mixed precision; afterwards it has its own again."""
    names = ("forward", "_original_forward")
    before = {name: vars(network)[name] for name in names if name in vars(network)}
    try:
        yield
    finally:
        for name in names:
            vars(network).pop(name, None)
        vars(network).update(before)


class Stop:
    """SIGTERM, SIGINT or a time limit ask for a stop after the update under way; a second signal acts as usual.

    Several runs may share one: signals reach the main thread only.
    """

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, minutes: float | None = None) -> None:
        self.signal = ""  # the name of the signal that came
        self.minutes = minutes
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.before: dict[int, Any] = {}

    @property
    def asked(self) -> str:
        """Who asked for a stop; '' while nobody has."""
        return self.signal or (f"its limit of {self.minutes:g} minutes" if time.monotonic() > self.deadline else "")

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self.restore()

    def restore(self) -> None:
        while self.before:
            number, handler = self.before.popitem()
            signal.signal(number, handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.restore()


# ---------------------------------------------------------------- whole states, also of sharded networks


def _sharded(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.FSDP


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def network_state(accelerator: Accelerator, network: nn.Module) -> dict[str, Tensor]:
    """The network's whole state. All processes must ask; with FSDP only the main one gets it."""
    if _sharded(accelerator):
        return get_model_state_dict(network, options=WHOLE)  # type: ignore[return-value]
    return accelerator.unwrap_model(network).state_dict()


def optimizer_state(accelerator: Accelerator, network: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimizer's whole state, its learning rates as numbers."""
    if _sharded(accelerator):
        return get_optimizer_state_dict(network, optimizer.optimizer, options=WHOLE)
    state = optimizer.state_dict()
    groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
    return {"state": state["state"], "param_groups": groups}


def load_states(
    accelerator: Accelerator, network: nn.Module, optimizer: Any, weights: dict[str, Tensor], state: dict[str, Any]
) -> None:
    if _sharded(accelerator):
        set_model_state_dict(network, dict(weights), options=WHOLE)
        set_optimizer_state_dict(network, optimizer.optimizer, state, options=WHOLE)
        return
    accelerator.unwrap_model(network).load_state_dict(weights)
    optimizer.load_state_dict(state)


def average_norms(accelerator: Accelerator, network: nn.Module) -> None:
    """Running statistics as the mean over all processes, each of which has seen its own part of each batch."""
    if accelerator.num_processes == 1:
        return
    running = [b for name, b in network.named_buffers() if name.endswith(("running_mean", "running_var"))]
    if running:
        flat = accelerator.reduce(torch.cat([b.reshape(-1) for b in running]), reduction="mean")
        for buffer, part in zip(running, flat.split([b.numel() for b in running]), strict=True):
            buffer.copy_(part.view_as(buffer))
