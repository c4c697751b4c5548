"""Modules for what residual blocks do in lines of their forward: gains, shifts, changes of axes, zero padding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Constant(nn.Module):
    """A number, or a tensor of the block in the shape in which its forward uses it."""

    value: float | Tensor

    def __init__(self, value: float | Tensor, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        if isinstance(value, nn.Parameter) or not isinstance(value, Tensor):
            self.value = value
        else:
            self.register_buffer("value", value)
        self.shape = shape

    def shaped(self) -> float | Tensor:
        return self.value if isinstance(self.value, int | float) else self.value.reshape(self.shape)

    def of_channels(self, channels: int, behind: int) -> Tensor | None:
        """The value by channel, in float64, where `behind` axes follow that of the channels; None if it has none."""
        value = self.shaped()
        value = value.detach().double() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        if value.numel() == 1:
            return value.reshape(1).expand(channels)
        fits = value.numel() == channels and value.ndim > behind and value.shape[value.ndim - 1 - behind] == channels
        return value.flatten() if fits else None

    def extra_repr(self) -> str:
        return f"{self.value:g}" if isinstance(self.value, float | int) else f"shape={self.shape}"


class Scale(Constant):
    """A gain: g x."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.shaped()


class Shift(Constant):
    """x + b."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shaped()


class Permute(nn.Module):
    """x.permute(order)."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)

    def inverse(self) -> "Permute":
        return Permute(tuple(self.order.index(i) for i in range(len(self.order))))

    def undoes(self, other: nn.Module) -> bool:
        return isinstance(other, Permute) and self.order == other.inverse().order

    def extra_repr(self) -> str:
        return str(self.order)


class Transpose(nn.Module):
    """x.transpose(first, second)."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.axes = first, second

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(*self.axes)

    def inverse(self) -> "Transpose":
        return Transpose(*self.axes)

    def undoes(self, other: nn.Module) -> bool:
        return isinstance(other, Transpose) and set(self.axes) == set(other.axes)


class PadShortcut(nn.Module):
    """Option A: every stride-th pixel, with `before` zero channels before the others and `extra` behind them."""

    def __init__(self, stride: int, extra: int, before: int = 0, axes: int = 2) -> None:
        super().__init__()
        self.stride = stride
        self.extra = extra
        self.before = before
        self.axes = axes  # of a pixel

    def forward(self, x: Tensor) -> Tensor:
        every = (slice(None, None, self.stride),) * self.axes
        return F.pad(x[:, :, *every], (*(0, 0) * self.axes, self.before, self.extra))

    def mixing(self, channels: int) -> Tensor:
        """The equivalent 1 x 1 kernel, (out, in)."""
        identity = torch.eye(channels, dtype=torch.float64, device="cpu")
        return F.pad(identity, (0, 0, self.before, self.extra))


class Residual(nn.Module):
    """y = out_act(shortcut + branch(pre(x))), cut out of a forward that does more."""

    def __init__(
        self,
        branch: nn.Sequential,
        *,
        pre: nn.Sequential,
        shortcut: nn.Module | None = None,
        out_act: nn.Module | None = None,
        projects_input: bool = False,
        attention: bool = False,
    ) -> None:
        super().__init__()
        self.pre = pre
        self.branch = branch
        self.shortcut = shortcut
        self.out_act = nn.Identity() if out_act is None else out_act
        self.projects_input = projects_input  # the shortcut reads x, and not pre(x)
        self.attention = attention  # the branch is attention, whose skip stays

    def forward(self, x: Tensor) -> Tensor:
        read = self.pre(x)
        path = x if self.shortcut is None else self.shortcut(x if self.projects_input else read)
        return self.out_act(path + self.branch(read))
