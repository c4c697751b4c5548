"""The optimizer, its groups of parameters and its learning rates; optimizers by name are timm's."""

import bisect
import fnmatch
import inspect
import math
from typing import Any

import torch
from timm.optim import Muon, create_optimizer_v2, list_optimizers, param_groups_weight_decay
from torch import Tensor, nn

from unskip._core.text import nearest
from unskip.train.penalties import unit_weights
from unskip.train.recipe import OptimizerConfig

ADAM = ("adam", "adamw", "nadam", "nadamw")  # optimizers that take `beta2` and `eps`
MUON_IS_CAPTURABLE = "capturable" in inspect.signature(Muon).parameters  # in timm 1.0.29 and later
# Optimizers whose update can be part of a CUDA graph
CAPTURABLE = ("sgd", "adam", "adamw", *(["muon"] if MUON_IS_CAPTURABLE else []))


def param_groups(model: nn.Module, weight_decay: float, *, decay_all: bool = False) -> list[dict[str, Any]]:
    """Groups for torch.optim: norms, biases and whatever the model names in `no_weight_decay()` don't decay.

    Coders are buffers and in no group. `decay_all=True` is what the CIFAR recipes of the papers do: one group in which
    every trained parameter decays.

    Example:
        >>> net = unskip.create_model("pnnh_resnet20")
        >>> groups = unskip.param_groups(net, weight_decay=5e-4)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(23, 0.0), (20, 0.0005)]
        >>> optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    """
    if isinstance(weight_decay, bool) or not isinstance(weight_decay, int | float):
        raise ValueError(f"param_groups: weight_decay={weight_decay!r} must be a number.")
    if not weight_decay >= 0:
        raise ValueError(f"param_groups: weight_decay={weight_decay} must not be negative; 0 switches it off.")
    if decay_all:
        return [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": weight_decay}]
    named: set[str] = getattr(model, "no_weight_decay", set)()
    groups: list[dict[str, Any]] = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=tuple(named))
    return groups


def scaled_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups with weight decay and `lr_scale`: what `param_groups` makes, divided by `lr_scales`.

    The first pattern that matches a parameter's name decides; a pattern may name a module (`layer3` is `layer3.*`).
    A pattern that matches nothing is refused. A factor of 0 leaves a parameter out, so it stays as it is.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    hidden = hidden_matrices(model) if config.optimizer.lower() == "muon" else None
    # What decays from elsewhere than 0 does so through a penalty.
    shifted = {id(p) for p in unit_weights(model)} if config.decay_from != "zero" else set()
    unused = dict(config.lr_scales)
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for group in param_groups(model, config.weight_decay, decay_all=config.decay_all):
        for p in group["params"]:
            pattern = next((pattern for pattern in config.lr_scales if _matches(names[id(p)], pattern)), "")
            unused.pop(pattern, None)
            scale = config.lr_scales.get(pattern, 1.0)
            decay = 0.0 if id(p) in shifted else group["weight_decay"]
            orthogonalised = hidden is not None and id(p) in hidden
            new: dict[str, Any] = {"params": [], "weight_decay": decay, "lr_scale": scale}
            if hidden is not None:
                new["use_muon"] = orthogonalised
            same = groups.setdefault((scale, decay, orthogonalised), new)
            same["params"].append(p)
    for pattern in unused:
        raise ValueError(f"recipe: lr_scales has {pattern!r}, which matches no parameter of the network.")
    left = [group for (scale, *_), group in groups.items() if scale]
    if not left:
        raise ValueError(
            f"recipe: nothing of the network is left to train: lr_scales={config.lr_scales} has a factor of 0 for all "
            "parameters that take gradients, or none does (requires_grad)."
        )
    return left


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the weights that Muon orthogonalises: those of linear layers and convolutions in one group.

    Without the first and the last layer of the network, and without embeddings: their inputs or outputs are no vectors
    of features (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd)]
    inner = [m for m in layers[1:-1] if not isinstance(m, nn.Embedding) and getattr(m, "groups", 1) == 1]
    outer = {id(layers[i].weight) for i in (0, -1)} if layers else set()  # which may be tied to an inner one
    return {id(m.weight) for m in inner if m.weight.requires_grad} - outer


def make_muon(
    groups: list[dict[str, Any]], config: OptimizerConfig, *, cuda_graph: bool = False
) -> torch.optim.Optimizer:
    """timm's Muon for the groups with `use_muon`, and AdamW for the rest, which shares the learning rate.

    An update is orthogonalised by Newton and Schulz and scaled to the size of AdamW's, 0.2 √(larger side) (Liu et al.
    2025, arXiv:2502.16982), so that one learning rate serves both. The settings are those of torch.optim.Muon.
    """
    adamw = {"use_fallback": True, "nesterov": False, "eps": config.eps, "adamw_lr": config.lr}
    capturable: dict[str, Any] = {"capturable": True} if cuda_graph else {}  # older ones don't know the word
    return Muon(
        [group if group["use_muon"] else {**group, **adamw} for group in groups],
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=5,
        ns_coefficients="original",
        eps=1e-7,
        safety_factor=1.0,
        adjust_lr_fn="match_rms_adamw",
        conv_mode="flatten",
        normalize_spatial=True,
        betas=(0.9, config.beta2),
        **capturable,
    )


def make_optimizer(model: nn.Module, config: OptimizerConfig, *, cuda_graph: bool = False) -> torch.optim.Optimizer:
    """The optimizer. Inside a CUDA graph its learning rates are tensors, which can change between replays."""
    known = [str(name) for name in list_optimizers()]
    name = config.optimizer.lower()
    if name not in known:
        raise ValueError(f"recipe: optimizer={config.optimizer!r} is not known to timm.{nearest(name, known)}")
    groups, lr, momentum = scaled_groups(model, config), config.lr, config.momentum
    optimizer: torch.optim.Optimizer
    adam: dict[str, Any] = {"betas": (momentum, config.beta2), "eps": config.eps} if name in ADAM else {}
    if not adam and name != "muon" and (config.beta2, config.eps) != (OptimizerConfig.beta2, OptimizerConfig.eps):
        raise ValueError(
            f"recipe: beta2 and eps are options of muon, {', '.join(ADAM)}, and optimizer={name!r} is none of them; "
            "leave them out."
        )
    if name == "sgd":  # timm's 'sgd' is always Nesterov's
        fused = next(model.parameters()).device.type == "cuda"
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=config.nesterov, fused=fused)
    elif name == "muon":
        optimizer = make_muon(groups, config, cuda_graph=cuda_graph)
    elif cuda_graph and name in CAPTURABLE:
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        optimizer = kind(groups, lr=lr, fused=True, capturable=True, **adam)
    else:
        optimizer = create_optimizer_v2(groups, opt=name, lr=lr, **(adam or {"momentum": momentum}))
    for group in optimizer.param_groups:
        group.setdefault("lr_scale", 1.0)
    return optimizer


def learning_rate(config: OptimizerConfig, step: int, *, epochs: int, steps: int) -> float:
    """The learning rate of an update, counted from 0, in a run of `epochs` with `steps` updates each.

        cosine   min_lr + (lr - min_lr) / 2 * (1 + cos(pi t / T)), t of the T updates after the warm-up
        steps    lr * gamma^k after k milestones
    """  # fmt: skip
    warm = round(config.warmup_epochs * steps)
    if step < warm:
        return config.warmup_lr + (config.lr - config.warmup_lr) * step / warm
    if config.schedule == "cosine":
        share = (step - warm) / max(2, epochs * steps - warm)
        return config.min_lr + (config.lr - config.min_lr) / 2 * (1 + math.cos(math.pi * share))
    drops = bisect.bisect_right(config.milestones, step // steps) if config.schedule == "steps" else 0
    return config.lr * config.gamma**drops


def set_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives each group the learning rate times its factor; in place where a captured update reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * group["lr_scale"])
        else:
            group["lr"] = lr * group["lr_scale"]
            if "adamw_lr" in group:  # AdamW's beside Muon; timm has read it from `lr` since 1.0.23
                group["adamw_lr"] = group["lr"]
