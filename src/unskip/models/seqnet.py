"""SeqNet (Hu, sections 4 and B): ResNet's layout with SeqBasic or SeqBottle blocks, and no skip.

A network of SeqBottle blocks has the widths of its 3x3 convolutions, 64 to 512, from stem to head, so SeqNet50 is
ResNet34's layout with another block. "50" is the ResNet it is compared with; it has 16 blocks of 4 convolutions.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn

from unskip.coders import CoderBank
from unskip.methods import BlockSpec, Unsupported, method_options
from unskip.methods.inits import Init
from unskip.methods.seq import PreReLU, Seq, SeqBottle, Tie
from unskip.models.cifar import cifar_resnet
from unskip.models.named import CIFAR, RESNET
from unskip.models.plainnet import USPS, PlainNet, layer
from unskip.models.registry import register_network
from unskip.models.staged import check_count
from unskip.surgery import plainify, register_reader

SEQNET: dict[str, Any] = {**RESNET, "family": "seqnet"}
CIFAR_SEQNET: dict[str, Any] = {**CIFAR, "family": "cifar_seqnet"}


def layout(*blocks: int, **kwargs: Any) -> nn.Module:
    """ResNet's stem, stages of so many blocks and of widths 64, 128, 256, 512, and its head."""
    return ResNet(BasicBlock, blocks, **kwargs)  # type: ignore[arg-type] # timm's annotation means the class


class SkipSeqBlock(nn.Module):
    """A SeqNet block with a skip connection around it (B.3): y = x + block(x), or a projection of x in its place."""

    def __init__(self, block: nn.Sequential, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.block = block
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + (x if self.shortcut is None else self.shortcut(x))


@register_reader(SkipSeqBlock)
def read_skip_seq(block: nn.Module, path: str) -> BlockSpec:
    return BlockSpec(path=path, branch=tuple(block.block), shortcut=block.shortcut)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class SkipSeq:
    """The block that `seq` builds, beside the shortcut of the one whose place it takes."""

    seq: SeqBottle

    keeps_weights: ClassVar[bool] = False

    def build(self, spec: BlockSpec, bank: CoderBank) -> nn.Module | None:
        block = self.seq.rebuild(spec, bank)
        return SkipSeqBlock(block, spec.shortcut)


def skip_seqnet50(**kwargs: Any) -> nn.Module:
    """SeqNet50 with a skip around each block (B.3)."""
    options = {name: kwargs.pop(name) for name in method_options("seq_bottle") if name in kwargs}
    residual = plainify(layout(3, 4, 6, 3, **kwargs), SkipSeq(seq=SeqBottle(**options)))
    del residual.surgery  # it is a residual network in its own right, not what an operation left of one
    return residual


class SeqMLP(PlainNet):
    """The fully-connected SeqNet (section 4.2): a layer from the image to d units, then pairs d -> k d -> d."""


def seqnet_mlp(
    *,
    depth: int = 20,  # layers: the first, two for each pair, the classifier
    width: int = 256,  # d; that of the networks in section 2.1
    k: int = 2,  # the hidden width of a pair, in multiples of d
    img_size: int = 16,  # px of a side; the image is flattened
    in_chans: int = 1,
    num_classes: int = 10,
    init: Init = "R",
    tie: Tie = "none",
    pre_relu: PreReLU = "none",
    drop_rate: float = 0.0,
) -> nn.Module:
    """The network `seqnet_mlp`: a stem, depth / 2 - 1 pairs of layers, and the classifier."""
    sizes = (
        ("depth", depth, 4),
        ("width", width, 1),
        ("k", k, 2),
        ("img_size", img_size, 1),
        ("in_chans", in_chans, 1),
    )
    for size in sizes:
        check_count("seqnet_mlp", *size)
    if depth % 2:
        raise ValueError(
            f"seqnet_mlp: depth={depth} must be even: the first layer, two for each pair and the classifier."
        )
    if init == "L" and k % 2:
        raise ValueError(f"seqnet_mlp: k={k} must be even for init='L', where half of the units mirror the others.")
    seq = Seq(init=init, tie=tie, pre_relu=pre_relu)
    stem = nn.Linear(in_chans * img_size**2, width)
    nn.init.kaiming_normal_(stem.weight, nonlinearity="relu")
    first = layer(stem, activation="relu", first=nn.Flatten())
    try:
        pairs = [seq.linear(width, k) for _ in range(depth // 2 - 1)]
    except Unsupported as reason:
        raise ValueError(f"seqnet_mlp: {reason}.") from reason
    shape = (in_chans, img_size, img_size)
    about: dict[str, Any] = {"num_features": width, "num_classes": num_classes, "in_chans": in_chans}
    return SeqMLP([[first, *pairs]], **about, drop_rate=drop_rate, image_shape=shape)


for name, method, blocks in (
    ("seqnet18", "seq", (2, 2, 2, 2)),
    ("seqnet34", "seq", (3, 4, 6, 3)),
    ("seqnet50", "seq_bottle", (3, 4, 6, 3)),
    ("seqnet101", "seq_bottle", (3, 4, 23, 3)),
):
    register_network(name, partial(layout, *blocks), method=method, **SEQNET)
register_network("skip_seqnet50", skip_seqnet50, options=tuple(method_options("seq_bottle")), **SEQNET)
for depth in (20, 56, 110):
    register_network(f"cifar_seqnet{depth}", partial(cifar_resnet, depth), method="seq", **CIFAR_SEQNET)
MLP_OPTIONS = ("depth", "width", "k", "img_size", "init", "tie", "pre_relu")
register_network("seqnet_mlp", seqnet_mlp, family="seqnet_mlp", options=MLP_OPTIONS, **USPS)
