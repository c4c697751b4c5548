"""Residual networks of every make for hypothesis: what people write, sensible or not.

Each may have one twist that a look at its modules does not show: a hook, a subclass with a forward of its own, a write
through a view, a decision by the size of the input and so on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrize

from unskip.methods import BlockSpec
from unskip.methods.pieces import PadShortcut
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
    other_size: tuple[int, int]
    seed: int
    between: str  # what stands between the stem and the first block, a key of BETWEEN
    block: str  # the class of the blocks, a key of BLOCKS
    twist: str  # what is done to one module of the network, a key of TWISTS


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
        shortcut=kinds("identity", "identity", "1x1", "1x1 norm", "pool", "pad", more=("3x3", "odd pool")),
        out_act=kinds("relu", "relu", "relu6", "leaky", "none", more=acts),
    )
    return st.builds(
        Plan,
        width=st.sampled_from([4, 6, 8]),
        stem_act=kinds("relu", "relu", "relu6", "leaky", "none", "gelu"),
        blocks=st.lists(blocks, min_size=1, max_size=3),
        size=st.tuples(st.integers(5, 12), st.integers(5, 12)),
        other_size=st.tuples(st.integers(8, 18), st.integers(8, 18)),
        seed=st.integers(0, 2**16),
        between=st.sampled_from(["module"] * len(BETWEEN) + list(BETWEEN)),
        block=st.sampled_from(["module"] * 2 * len(BLOCKS) + list(BLOCKS)),
        twist=st.sampled_from(["none"] * len(TWISTS) + list(TWISTS)),
    )


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
    if plan.shortcut == "odd pool":
        kind = plan.strided + len(plan.layers)
        pool = (
            nn.AvgPool2d(1, stride, divisor_override=3),
            nn.AvgPool2d(stride, stride, divisor_override=5),
            nn.MaxPool2d(1, stride),
            nn.AvgPool2d(3, stride, 1),
            nn.MaxPool2d(stride, stride, ceil_mode=True),
        )[kind % 5]
    if "pool" in plan.shortcut:
        return nn.Sequential(pool, nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out))
    return nn.Sequential(conv, nn.BatchNorm2d(out)) if plan.shortcut == "1x1 norm" else conv


class FunctionalBlock(AnyBlock):
    """Which calls functions where a reader names modules."""

    def forward(self, x: Tensor) -> Tensor:
        read = x
        for module in self.pre:
            read = F.leaky_relu(read, 0.2) if type(module) is nn.LeakyReLU else module(read)
        y = read
        for module in self.branch:
            y = F.relu(y) if type(module) is nn.ReLU else module(y)
        y = torch.add(y, x if self.shortcut is None else self.shortcut(read))
        return F.relu(y, inplace=True) if type(self.out_act) is nn.ReLU else self.out_act(y)


class ScaledBlock(AnyBlock):
    """Whose branch has a gain that no module tells."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(1.5 * x)


class SizedBlock(AnyBlock):
    """Which does more with large inputs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.shape[-1] < 7 else 0.5 * y


class KeywordBlock(AnyBlock):
    """With an argument whose default is not what its reader thinks."""

    def forward(self, x: Tensor, gain: float = 1.25) -> Tensor:
        return gain * super().forward(x)


class GradBlock(AnyBlock):
    """Which asks whether gradients are wanted."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.is_grad_enabled() else super().forward(x) - 0.25


BLOCKS: dict[str, type[AnyBlock]] = {
    "module": AnyBlock, "functional": FunctionalBlock, "scaled": ScaledBlock, "sized": SizedBlock,
    "keyword": KeywordBlock, "grad": GradBlock,
}  # fmt: skip


@register_reader(*BLOCKS.values())
def read_any(block: nn.Module, path: str) -> BlockSpec:
    assert isinstance(block, AnyBlock)
    out_act = None if isinstance(block.out_act, nn.Identity) else block.out_act
    return BlockSpec(
        path=path, branch=tuple(block.branch), pre=tuple(block.pre), shortcut=block.shortcut, out_act=out_act
    )


def written(view: Callable[[Tensor], Tensor]) -> Callable[["AnyNet", Tensor], Tensor]:
    def between(net: "AnyNet", x: Tensor) -> Tensor:
        x = net.stem_act(x)
        view(x).sub_(1)
        return x

    return between


BETWEEN: dict[str, Callable[["AnyNet", Tensor], Tensor]] = {
    "module": lambda net, x: net.stem_act(x),
    "functional": lambda net, x: F.relu(x),
    "in place": lambda net, x: x.relu_(),
    "pooled": lambda net, x: F.max_pool2d(net.stem_act(x), 3, 1, 1),
    "odd pool": lambda net, x: F.avg_pool2d(net.stem_act(x), 3, 1, 1, divisor_override=-9),
    "clamp": lambda net, x: x.clamp(min=0),
    "softplus": lambda net, x: F.softplus(x, beta=-1),
    "view": written(lambda x: x.view(-1)),
    "chunk": written(lambda x: x.chunk(2, 1)[1]),
    "detach": written(lambda x: x.detach()),
    "indexing": written(lambda x: x[:, 1:]),
    "transpose": written(lambda x: x.transpose(1, 2)),
    "reshape": lambda net, x: net.stem_act(x).reshape(len(x), -1).view(x.shape),
    "half": lambda net, x: (x[:, ::2].relu_(), x)[1],
    "grad": lambda net, x: x.relu() if torch.is_grad_enabled() else x,
    "sized": lambda net, x: x.relu() if x.shape[-1] > 8 else x,
    "values": lambda net, x: x.relu() if x.mean() > 0 else x,
    "keyword": lambda net, x: net.rectified(x),
}


class AnyNet(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, plan.width, 3, padding=1)
        self.stem_act = ACTS[plan.stem_act]()
        self.between = plan.between
        width, blocks = plan.width, []
        for block in plan.blocks:
            blocks.append(BLOCKS[plan.block](width, block))
            width = 2 * block.out or width
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = BETWEEN[self.between](self, self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))

    def rectified(self, x: Tensor, slope: float = 0.1) -> Tensor:
        return F.leaky_relu(x, slope)


def add_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, y: 1.25 * y)


def add_pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: (args[0] - 0.5,))


def set_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: 1.25 * forward(x)


def set_class(module: nn.Module) -> None:
    kind = type(module)
    module.__class__ = type(f"Odd{kind.__name__}", (kind,), {"forward": lambda self, x: kind.forward(self, x) - 0.5})


def set_same_class(module: nn.Module) -> None:
    module.__class__ = type(f"My{type(module).__name__}", (type(module),), {"extra_repr": lambda self: "mine"})


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * weight


def add_parametrization(module: nn.Module) -> None:
    if isinstance(getattr(module, "weight", None), nn.Parameter):
        parametrize.register_parametrization(module, "weight", Halved())


def share(module: nn.Module) -> None:
    """Two of its parts become one module, as with one ReLU for all."""
    acts = [(parent, name) for parent in module.modules() for name, m in parent._modules.items() if type(m) is nn.ReLU]
    for parent, name in acts[1:]:
        parent._modules[name] = acts[0][0]._modules[acts[0][1]]


TWISTS: dict[str, Callable[[nn.Module], None]] = {
    "none": lambda module: None, "hook": add_hook, "pre-hook": add_pre_hook, "instance forward": set_forward,
    "subclass": set_class, "harmless subclass": set_same_class, "parametrised": add_parametrization, "shared": share,
    "global hook": lambda module: None,
}  # fmt: skip

PLANS = st.sampled_from([False, False, True]).flatmap(plans)
USUAL_PLANS = st.sampled_from([False, False, True]).flatmap(lambda wild: plans(wild, usual=True))


def twist(network: nn.Module, plan: Plan) -> None:
    """Does what the plan says to one of the network's modules, a different one for each seed."""
    modules = [m for m in network.modules() if not isinstance(m, nn.ModuleList | nn.ModuleDict)]
    TWISTS[plan.twist](network if plan.twist == "shared" else modules[plan.seed % len(modules)])


@contextmanager
def circumstances(plan: Plan) -> Iterator[None]:
    """A global hook, if the plan asks for it."""
    if plan.twist != "global hook":
        yield
        return
    kind = nn.Conv2d if plan.seed % 2 else nn.BatchNorm2d
    handle = global_hooks.register_module_forward_hook(
        lambda module, args, y: 1.25 * y if isinstance(module, kind) else None
    )
    try:
        yield
    finally:
        handle.remove()


def build(plan: Plan) -> tuple[nn.Module, list[Tensor]]:
    """The network as after training, in eval mode and float64, with a few dead channels; inputs of two sizes."""
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
    sizes = (plan.size, plan.other_size)
    return network, [4 * torch.randn(2, 3, *size, generator=generator, dtype=torch.float64) for size in sizes]
