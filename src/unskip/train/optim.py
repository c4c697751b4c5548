"""The optimizer and its learning rates: timm's optimizers and schedules, with a factor for each group of parameters."""

import fnmatch
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler
from torch import Tensor, nn

from unskip._core.text import nearest
from unskip.train.params import param_groups
from unskip.train.penalties import unit_weights
from unskip.train.recipe import OptimizerConfig

CAPTURABLE = ("sgd", "adam", "adamw")  # optimizers whose update can be part of a CUDA graph


def scaled_groups(network: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups with weight decay and `lr_scale`: what `param_groups` makes, divided by `lr_scales`.

    The first pattern that matches a parameter's name decides; a pattern may name a module (`layer3` is `layer3.*`).
    A pattern that matches nothing is refused. A factor of 0 leaves a parameter out, so it stays as it is.
    """
    names = {id(p): name for name, p in network.named_parameters()}
    shifted: set[int] = set()
    if config.decay_from != "zero":  # these decay through a penalty
        shifted = {id(p) for p in unit_weights(network)}
    used: set[str] = set()
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for group in param_groups(network, config.weight_decay, decay_all=config.decay_all):
        for p in group["params"]:
            pattern = next((pattern for pattern in config.lr_scales if _matches(names[id(p)], pattern)), None)
            used.update(() if pattern is None else (pattern,))
            scale = 1.0 if pattern is None else config.lr_scales[pattern]
            decay = 0.0 if id(p) in shifted else group["weight_decay"]
            same = groups.setdefault((scale, decay), {"params": [], "weight_decay": decay, "lr_scale": scale})
            same["params"].append(p)
    for pattern in config.lr_scales:
        if pattern not in used:
            raise ValueError(f"recipe: lr_scales has {pattern!r}, which matches no parameter of the network.")
    left = [group for (scale, _), group in groups.items() if scale]
    if not left:
        raise ValueError(
            f"recipe: nothing of the network is left to train: lr_scales={config.lr_scales} has a factor of 0 for all "
            "parameters that take gradients, or none does (requires_grad)."
        )
    return left


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def make_optimizer(network: nn.Module, config: OptimizerConfig, *, cuda_graph: bool = False) -> torch.optim.Optimizer:
    """The optimizer. Inside a CUDA graph its learning rates are tensors, which can change between replays."""
    known = [str(name) for name in list_optimizers()]
    name = config.optimizer.lower()
    if name not in known:
        raise ValueError(f"recipe: optimizer={config.optimizer!r} is not known to timm.{nearest(name, known)}")
    groups = scaled_groups(network, config)
    if name == "sgd":  # timm's 'sgd' is always Nesterov's
        where = next(network.parameters()).device.type
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=where == "cuda"
        )
    elif cuda_graph and name in CAPTURABLE:
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        betas = (config.momentum, 0.999)
        optimizer = kind(groups, lr=config.lr, betas=betas, fused=True, capturable=True)
    else:
        optimizer = create_optimizer_v2(groups, opt=name, lr=config.lr, momentum=config.momentum)
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", 1.0)
    return optimizer


class Rates:
    """The learning rate of each update: timm's schedule, run on a stand-in, times the factor of each group.

    The rates are a function of the number of the update alone. A stand-in carries the schedule, so that the optimizer's
    own rates may be tensors that a captured update reads.
    """

    def __init__(self, config: OptimizerConfig, epochs: int, steps: int) -> None:
        stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
        warm, total = round(config.warmup_epochs * steps), epochs * steps
        settings: dict[str, Any] = {"warmup_t": warm, "warmup_lr_init": config.warmup_lr, "t_in_epochs": False}
        self.schedule: CosineLRScheduler | MultiStepLRScheduler
        if config.schedule == "cosine":
            self.schedule = CosineLRScheduler(
                stand_in, t_initial=max(2, total - warm), lr_min=config.min_lr, warmup_prefix=True, **settings
            )
        else:
            # timm drops the rate one update before the number it is given
            drops = [epoch * steps + 1 for epoch in config.milestones] if config.schedule == "steps" else [total + 2]
            self.schedule = MultiStepLRScheduler(
                stand_in, decay_t=drops, decay_rate=config.gamma, warmup_prefix=False, **settings
            )

    def __getitem__(self, step: int) -> float:
        self.schedule.step_update(step)
        return self.schedule.optimizer.param_groups[0]["lr"]

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Sets the rates of the update with this number, counted from 0, and returns the rate before factors."""
        lr = self[step]
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * group["lr_scale"])
            else:
                group["lr"] = lr * group["lr_scale"]
        return lr
