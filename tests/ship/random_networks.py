"""Residual networks of every make for hypothesis: what people write, sensible or not."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.methods import BlockSpec
from unskip.models.cifar import PadShortcut
from unskip.surgery import register_reader

ACTS = {
    "relu": nn.ReLU, "relu6": nn.ReLU6, "leaky": lambda: nn.LeakyReLU(0.2), "prelu": nn.PReLU, "gelu": nn.GELU,
    "silu": nn.SiLU, "tanh": nn.Tanh, "none": nn.Identity,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    kernel: int
    groups: int
    width: int  # in units of the groups
    norm: str
    act: str
    bias: bool
    drop: bool


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    pre: str  # activation behind a norm before branch and projection; "" for none
    layers: list[LayerPlan]
    out: int  # width, in units of 2; 0: that of its input
    stride: int
    strided: int  # which of the layers has the stride
    shortcut: str
    out_act: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    width: int
    stem_act: str
    blocks: list[BlockPlan]
    size: tuple[int, int]
    seed: int


def usual_shape(layers: list[LayerPlan]) -> list[LayerPlan]:
    """Two k x k convolutions, or 1 x 1, k x k, 1 x 1, the shapes that methods for training know."""
    first, *_, last = layers = [layers[0], *layers] if len(layers) == 1 else layers
    if len(layers) == 2:
        return [replace(layer, kernel=first.kernel, groups=1) for layer in layers]
    return [replace(first, kernel=1, groups=1), layers[1], replace(last, kernel=1, groups=1)]


def plans(wild: bool, usual: bool = False) -> st.SearchStrategy[Plan]:
    """Networks of parts that rm has an exact form for, or (wild) of any; their branches of any shape, or the usual."""

    def kinds(*tame: object, more: tuple[object, ...] = ()) -> st.SearchStrategy:
        return st.sampled_from([*tame, *(more if wild else ())])

    acts = ("gelu", "silu", "tanh", "none", "prelu")
    layers = st.builds(
        LayerPlan,
        kernel=st.sampled_from([1, 3, 3, 5]),
        groups=st.sampled_from([1, 1, 1, 2, 0]),  # 0: depthwise
        width=st.integers(1, 3),
        norm=kinds("batch", "batch", "none", more=("group",)),
        act=kinds("relu", "relu", "relu6", "leaky", more=acts),
        bias=st.booleans(),
        drop=st.booleans(),
    )
    blocks = st.builds(
        BlockPlan,
        pre=kinds("", "", "relu", "leaky", more=("gelu",)),
        layers=st.lists(layers, min_size=1, max_size=3).map(usual_shape if usual else list),
        out=st.sampled_from([0, 0, 0, 2, 3, 4]),
        stride=st.sampled_from([1, 1, 1, 2, 2, 3]),
        strided=st.integers(0, 2),
        shortcut=kinds("identity", "identity", "1x1", "1x1 norm", "pool", "pad", more=("3x3",)),
        out_act=kinds("relu", "relu", "relu6", "leaky", "none", more=acts),
    )
    return st.builds(
        Plan,
        width=st.sampled_from([4, 6, 8]),
        stem_act=kinds("relu", "relu", "relu6", "leaky", "none", "gelu"),
        blocks=st.lists(blocks, min_size=1, max_size=3),
        size=st.tuples(st.integers(5, 12), st.integers(5, 12)),
        seed=st.integers(0, 2**16),
    )


PLANS = st.sampled_from([False, False, True]).flatmap(plans)
USUAL_PLANS = st.sampled_from([False, False, True]).flatmap(lambda wild: plans(wild, usual=True))


class AnyBlock(nn.Module):
    """y = out_act(shortcut + branch(pre(x))); the shortcut is x, or a projection of pre(x)."""

    def __init__(self, channels: int, plan: BlockPlan) -> None:
        super().__init__()
        out = 2 * plan.out or channels
        self.pre = nn.ModuleList([nn.BatchNorm2d(channels), ACTS[plan.pre]()] if plan.pre else [])
        branch: list[nn.Module] = []
        width = channels
        for i, layer in enumerate(plan.layers):
            last = i == len(plan.layers) - 1
            wide = out if last else 2 * layer.width
            groups = layer.groups or width
            if width % groups or wide % groups:
                groups = 1
            stride = plan.stride if i == min(plan.strided, len(plan.layers) - 1) else 1
            bias = layer.bias
            branch.append(nn.Conv2d(width, wide, layer.kernel, stride, layer.kernel // 2, groups=groups, bias=bias))
            if layer.norm == "batch":
                branch.append(nn.BatchNorm2d(wide))
            elif layer.norm == "group":
                branch.append(nn.GroupNorm(2, wide))
            if not last:
                branch.append(ACTS[layer.act]())
            if layer.drop:
                branch.append(DropPath(0.1) if last else nn.Dropout(0.1))
            width = wide
        self.branch = nn.ModuleList(branch)
        self.shortcut = shortcut(plan, channels, out)
        self.out_act = ACTS[plan.out_act]()

    def forward(self, x: Tensor) -> Tensor:
        read = x
        for module in self.pre:
            read = module(read)
        y = read
        for module in self.branch:
            y = module(y)
        return self.out_act(y + (x if self.shortcut is None else self.shortcut(read)))


def shortcut(plan: BlockPlan, channels: int, out: int) -> nn.Module | None:
    stride = plan.stride
    if plan.shortcut == "identity" and stride == 1 and out == channels:
        return None
    if plan.shortcut == "pad" and out >= channels:
        return PadShortcut(stride, out - channels)
    if plan.shortcut == "3x3":
        return nn.Conv2d(channels, out, 3, stride, 1)
    conv = nn.Conv2d(channels, out, 1, stride, bias=plan.shortcut == "1x1")
    if plan.shortcut == "pool":
        pool = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)
        return nn.Sequential(pool, nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out))
    return nn.Sequential(conv, nn.BatchNorm2d(out)) if plan.shortcut == "1x1 norm" else conv


@register_reader(AnyBlock)
def read_any(block: nn.Module, path: str) -> BlockSpec:
    assert isinstance(block, AnyBlock)
    out_act = None if isinstance(block.out_act, nn.Identity) else block.out_act
    return BlockSpec(
        path=path, branch=tuple(block.branch), pre=tuple(block.pre), shortcut=block.shortcut, out_act=out_act
    )


class AnyNet(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, plan.width, 3, padding=1)
        self.stem_act = ACTS[plan.stem_act]()
        width, blocks = plan.width, []
        for block in plan.blocks:
            blocks.append(AnyBlock(width, block))
            width = 2 * block.out or width
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_act(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def build(plan: Plan) -> tuple[nn.Module, Tensor]:
    """The network as after training, in eval mode and float64, with a few dead channels; a batch of large numbers."""
    generator = torch.Generator().manual_seed(plan.seed)
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        network = AnyNet(plan).double().eval()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.3, generator=generator)
                module.running_var.uniform_(0.3, 2, generator=generator)
                module.weight.uniform_(-1.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.3, generator=generator)
            elif isinstance(module, nn.PReLU):
                module.weight.uniform_(-0.5, 0.5, generator=generator)
            elif isinstance(module, nn.Conv2d) and plan.seed % 3 == 0:
                module.weight[plan.seed % len(module.weight)] = 0
    return network, 4 * torch.randn(2, 3, *plan.size, generator=generator, dtype=torch.float64)
