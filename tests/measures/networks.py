"""Small random networks for the fuzz tests, and what a measurement must leave as it was."""

import random

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn


def snapshot(model: nn.Module) -> dict[str, object]:
    """Everything that a measurement must leave as it was."""
    return {
        "state": {key: value.clone() for key, value in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "requires": [p.requires_grad for p in model.parameters()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
    }


def same(left: object, right: object) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left.nan_to_num(), right.nan_to_num())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


class Residual(nn.Module):
    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Twice(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x))


class Random(nn.Module):
    """Draws from every generator, as augmentation inside a network does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.rand(()).item() * random.random() * np.random.rand())


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("this layer is broken")


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A network of a few random parts and a batch that most of them take."""
    width = draw(st.sampled_from([1, 3, 4]))
    images = draw(st.booleans())

    def weight() -> nn.Module:
        if images:
            return nn.Conv2d(width, width, draw(st.sampled_from([1, 3])), padding="same", bias=draw(st.booleans()))
        return nn.Linear(width, width, bias=draw(st.booleans()))

    def part(depth: int = 0) -> nn.Module:
        kinds = ["weight", "weight", "norm", "relu", "tanh", "dropout", "random", "identity"]
        kinds += ["residual", "twice", "nest", "pool", "fails"] if depth < 2 else []
        kind = draw(st.sampled_from(kinds))
        if kind == "norm":
            return nn.BatchNorm2d(width) if images else draw(st.sampled_from([nn.BatchNorm1d, nn.LayerNorm]))(width)
        if kind == "relu":
            return draw(st.sampled_from([nn.ReLU, nn.LeakyReLU]))(inplace=draw(st.booleans()))
        if kind == "residual":
            return Residual(*(part(depth + 1) for _ in range(draw(st.integers(1, 3)))))
        if kind == "nest":
            return nn.Sequential(*(part(depth + 1) for _ in range(draw(st.integers(0, 3)))))
        if kind == "twice":
            return Twice(part(depth + 1))
        if kind == "pool":
            return nn.AvgPool2d(1) if images else nn.Identity()
        if kind == "fails":
            return Fails() if draw(st.integers(0, 5)) == 0 else nn.GELU()
        return {"weight": weight, "tanh": nn.Tanh, "dropout": nn.Dropout, "random": Random, "identity": nn.Identity}[
            kind
        ]()

    parts = [part() for _ in range(draw(st.integers(0, 6)))]
    if draw(st.booleans()):
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if images else []
        parts += [nn.Linear(width, draw(st.integers(1, 4)))]
    model = nn.Sequential(*parts)
    for module in model.modules():
        module.training = draw(st.booleans())
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.integers(0, 4)) > 0)
        if draw(st.integers(0, 4)) == 0:
            parameter.grad = torch.randn_like(parameter)
        if draw(st.integers(0, 20)) == 0:
            parameter.data.fill_(draw(st.sampled_from([0.0, float("nan"), float("inf"), 1e30])))
    samples = draw(st.sampled_from([1, 2, 5, 20]))
    return model, torch.randn(samples, width, 5, 5) if images else torch.randn(samples, width)
