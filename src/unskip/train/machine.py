"""The machine around a run: Accelerate's device and processes, signals, determinism; all of it put back afterwards."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self, TypeVar

import torch
from accelerate import Accelerator, utils
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict

from unskip._core import rng
from unskip.train.recipe import Recipe, RunConfig

T = TypeVar("T")


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Accelerate with the recipe's device and precision; how many processes there are is the launcher's business."""
    # Accelerate keeps one global state, which holds the precision of an earlier run in this process.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    handlers: list[Any] = [
        # Each process keeps its own batch statistics; they are averaged before they are used (see average_norms).
        utils.DistributedDataParallelKwargs(broadcast_buffers=False),
        utils.AutocastKwargs(cache_enabled=not recipe.run.cuda_graph),  # a recorded update casts anew at each replay
    ]
    precision = recipe.run.precision if recipe.run.precision in ("bf16", "fp16") else "no"
    # Accelerate joins processes on CPUs only where it is told that there is nothing better.
    cpu = recipe.run.device == "cpu" or not torch.accelerator.is_available()
    if cpu and utils.parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError("train: the launcher asks for FSDP, which Accelerate has on GPUs alone. Use DDP on CPUs.")
    accelerator = Accelerator(mixed_precision=precision, cpu=cpu, kwargs_handlers=handlers)
    where = accelerator.device.type
    launched = utils.get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1)
    if launched > accelerator.num_processes:
        raise ValueError(
            f"train: the launcher has started {launched} processes, and Accelerate joins "
            f"{accelerator.num_processes} of them on {where}. Start one process alone, or say --device cpu."
        )
    if where != "cuda":
        if recipe.run.device == "cuda":
            raise ValueError("recipe: device='cuda', but PyTorch finds no GPU here. Use 'auto' or 'cpu'.")
        if recipe.run.precision == "fp16":
            raise ValueError(f"recipe: precision='fp16' needs a GPU, and this runs on {where}. Use 'bf16' or 'fp32'.")
        if recipe.run.sync_bn:
            raise ValueError(f"recipe: sync_bn=true needs GPUs, and this runs on {where}. Set sync_bn=false.")
    for name in ("ema", "orthogonal", "max_norm", "decay_from", "keep"):
        value = recipe.flat()[name]
        if _sharded(accelerator) and value not in (0.0, "zero", "last"):
            raise ValueError(f"recipe: {name}={value} needs whole weights, and FSDP shards them. Use DDP.")
    return accelerator


def is_main() -> bool:
    """Whether this is the process that speaks for all: the launcher's first, also before they have joined."""
    return int(os.environ.get("RANK", 0)) == 0


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """What a function returns in the main process, in all of them; its ValueError is raised in all, too."""
    answer: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            answer[0] = function()
        except ValueError as error:
            answer[1] = error
    utils.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


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
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
            os.environ.update({} if workspace is None else {"CUBLAS_WORKSPACE_CONFIG": workspace})


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Accelerate gives a model another `forward` for mixed precision; afterwards it has its own again."""
    own, names = vars(model), ["forward", "_original_forward"]
    before = {name: own[name] for name in names if name in own}
    try:
        yield
    finally:
        for name in names:
            own.pop(name, None)
        own.update(before)


class Stop:
    """A signal or a time limit asks for a stop after the update under way; a second signal acts as usual.

    Several runs may share one: signals reach the main thread only.
    """

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self, minutes: float | None = None) -> None:
        self.signal = ""  # the name of the signal that came
        self.minutes = minutes
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        self.before: dict[int, Any] = {}

    @property
    def asked(self) -> str:
        """Who asked for a stop; '' while nobody has."""
        return self.signal or (f"its limit of {self.minutes:g} minutes" if time.monotonic() > self.deadline else "")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as it is under nohup
                    self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self.restore()

    def restore(self) -> None:
        while self.before:
            number, handler = self.before.popitem()
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self.restore()


# ---------------------------------------------------------------- whole states, also of sharded networks


def _sharded(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.FSDP)


WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)


def network_state(accelerator: Accelerator, network: nn.Module) -> dict[str, Tensor]:
    """The network's whole state. All processes must ask; with FSDP only the main one gets it."""
    if _sharded(accelerator):
        return state_dict.get_model_state_dict(network, options=WHOLE)  # type: ignore[return-value]
    whole: dict[str, Tensor] = accelerator.unwrap_model(network).state_dict()
    return whole


def optimizer_state(accelerator: Accelerator, network: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimizer's whole state, its learning rates as numbers."""
    if _sharded(accelerator):
        return state_dict.get_optimizer_state_dict(network, optimizer.optimizer, options=WHOLE)
    state = optimizer.state_dict()
    groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
    return {"state": state["state"], "param_groups": groups}


def load_network(accelerator: Accelerator, network: nn.Module, weights: dict[str, Tensor]) -> None:
    if _sharded(accelerator):
        state_dict.set_model_state_dict(network, dict(weights), options=WHOLE)
    else:
        accelerator.unwrap_model(network).load_state_dict(weights)


def load_optimizer(accelerator: Accelerator, network: nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
    """Puts an optimizer's state back. Settings of a kind that its groups don't have are left as the recipe says."""
    if _sharded(accelerator):
        state_dict.set_optimizer_state_dict(network, optimizer.optimizer, saved, options=WHOLE)
        return
    pairs = zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True)
    groups = [{**own, **{k: v for k, v in there.items() if type(v) is type(own.get(k))}} for own, there in pairs]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    for parameter, state in optimizer.state.items():
        for name in {"momentum_buffer", "exp_avg", "exp_avg_sq"} & set(state):
            if state[name] is not None and state[name].shape != parameter.shape:
                shapes = tuple(state[name].shape), tuple(parameter.shape)
                raise ValueError(f"{name} has the shape {shapes[0]} for a parameter of shape {shapes[1]}.")


def average_norms(accelerator: Accelerator, network: nn.Module) -> None:
    """Running statistics as the mean over all processes, each of which has seen its own part of each batch."""
    if accelerator.num_processes == 1:
        return
    running = [b for name, b in network.named_buffers() if name.endswith(("running_mean", "running_var"))]
    if running:
        flat = accelerator.reduce(torch.cat([b.reshape(-1) for b in running]), reduction="mean")
        for buffer, part in zip(running, flat.split([b.numel() for b in running]), strict=True):
            buffer.copy_(part.view_as(buffer))
