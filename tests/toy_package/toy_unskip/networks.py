"""A hand-written residual network; it knows nothing of unskip."""

from torch import Tensor, nn


class HandBlock(nn.Module):
    """y = ReLU(x + norm2(conv2(ReLU(norm1(conv1(x))))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


def residual(num_classes: int = 10, in_chans: int = 1) -> nn.Module:
    """Two blocks of 8 channels between a stem and a classifier."""
    stem = [nn.Conv2d(in_chans, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)]
    return nn.Sequential(*stem, HandBlock(8), HandBlock(8), *head)
