"""Factories that `package.module:function` can name."""

from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 10))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def recurrent() -> nn.Module:
    return nn.LSTM(5, 8, batch_first=True)


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))


def odd_vector() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 4))


def number() -> int:
    return 7


def needs_an_argument(width: int) -> nn.Module:
    return nn.Linear(width, width)


class Picky(nn.Module):
    """Takes 20 px and nothing else, which no look at its layers tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 20:
            raise RuntimeError(f"20 px, not {x.shape[-1]}\nsecond line")
        return self.layer(x).mean((2, 3))


def headed(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 30 * 30, num_classes))


READY = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 2))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(10))
