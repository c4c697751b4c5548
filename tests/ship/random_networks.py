"""Residual networks of every make: what people write, sensible or not.

Half of them are ordinary. The others are odd in one or two ways, many of which a look at their modules does not show:
a hook, a subclass with a forward of its own, a write through a view, a decision by the size of the input and so on.
Blocks have a reader or are read by their code; layers are two-dimensional, one-dimensional or linear.
`kinds` names what a network has of the kinds that the tests count.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.nn.utils import prune as torch_prune

from unskip.methods import BlockSpec
from unskip.methods.pieces import PadShortcut, Scale
from unskip.surgery import register_reader

ACTS = {
    "relu": nn.ReLU, "relu6": nn.ReLU6, "leaky": lambda: nn.LeakyReLU(0.2), "prelu": nn.PReLU, "gelu": nn.GELU,
    "silu": nn.SiLU, "hardswish": nn.Hardswish, "mish": nn.Mish, "tanh": nn.Tanh, "none": nn.Identity,
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
    padding_mode: str = "zeros"
    dilation: int = 1
    left: int | None = None  # zeros before the first pixel, up to the kernel's reach; None: as many as behind the last
    gate: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    pre: str  # activation behind a norm before branch and projection; "" for none
    layers: list[LayerPlan]
    out: int  # width, in units of 2; 0: that of its input
    stride: int
    strided: int  # which of the layers has the stride
    shortcut: str
    out_act: str
    pre_norm: bool = True  # whether a norm stands before that activation
    gains: tuple[bool, bool] = (False, False)  # whether branch and shortcut have one for each channel


@dataclass(frozen=True, kw_only=True)
class Plan:
    width: int
    stem_act: str
    blocks: list[BlockPlan]
    size: tuple[int, int]
    other_size: tuple[int, int]
    seed: int
    axes: int = 2  # of an image, a series or (0) a vector
    between: str = "module"  # what stands between the stem and the first block, a key of BETWEEN
    block: str = "module"  # the class of the blocks, a key of BLOCKS
    part: str = "none"  # what one block has in place of an ordinary part, a key of PARTS
    twist: str = "none"  # what is done to the network or one of its modules, a key of TWISTS


def usual_shape(layers: list[LayerPlan]) -> list[LayerPlan]:
    """Two k x k convolutions, or 1 x 1, k x k, 1 x 1, the shapes that methods for training know."""
    first, *_, last = layers = [layers[0], *layers] if len(layers) == 1 else layers
    if len(layers) == 2:
        return [replace(layer, kernel=first.kernel, groups=1) for layer in layers]
    return [replace(first, kernel=1, groups=1), layers[1], replace(last, kernel=1, groups=1)]


def draw(number: int, *, usual: bool = False) -> Plan:
    """The network of a number. Even numbers are ordinary, the odd ones go through KINDS; one in four is odd twice.

    Args:
        number: what all is drawn from.
        usual: whether branches have a shape that methods for training know.
    """
    chance = random.Random(number)
    one_of, flip = chance.choice, lambda: chance.random() < 0.5

    def layer() -> LayerPlan:
        return LayerPlan(
            kernel=one_of([1, 3, 3, 5]),
            groups=one_of([1, 1, 1, 2, 0]),  # 0: depthwise
            width=one_of([1, 2, 3]),
            norm=one_of(["batch", "batch", "none"]),
            act=one_of(["relu", "relu", "relu6", "leaky"]),
            bias=flip(),
            drop=flip(),
        )

    def block() -> BlockPlan:
        layers = [layer() for _ in range(chance.randint(1, 3))]
        return BlockPlan(
            pre=one_of(["", "", "relu", "leaky"]),
            layers=usual_shape(layers) if usual else layers,
            out=one_of([0, 0, 0, 2, 3, 4]),
            stride=one_of([1, 1, 1, 2, 2, 3]),
            strided=chance.randint(0, 2),
            shortcut=one_of(["identity", "identity", "1x1", "1x1 norm", "pool", "pad"]),
            out_act=one_of(["relu", "relu", "relu6", "leaky", "none"]),
        )

    kind = list(KINDS)[number // 2 % len(KINDS)]
    ways = [one_of(KINDS[kind]), *([one_of(KINDS[one_of(list(KINDS))])] if chance.random() < 0.25 else [])]
    odd = dict(ways) if number % 2 else {}
    if "part" in odd:  # with a reader or without
        odd.setdefault("block", one_of(["module", "written functional"]))
    blocks = [block() for _ in range(chance.randint(1, 3))]
    changed = chance.randrange(len(blocks))
    blocks[changed] = PARTS[odd.get("part", "none")](blocks[changed])
    return Plan(
        width=one_of([4, 6, 8]),
        stem_act=one_of(["relu", "relu", "relu6", "leaky", "none", "gelu"]),
        blocks=blocks,
        size=(chance.randint(5, 12), chance.randint(5, 12)),
        other_size=(chance.randint(8, 18), chance.randint(8, 18)),
        seed=chance.randrange(2**16),
        **odd,
    )


def kernels_of_3(layer: LayerPlan) -> LayerPlan:
    return replace(layer, kernel=max(3, layer.kernel))


def one_sided(block: BlockPlan) -> BlockPlan:
    """With more zeros on one side, a side and a number for each layer."""
    layers = [replace(kernels_of_3(layer), left=(block.strided + i) % 3) for i, layer in enumerate(block.layers)]
    return replace(block, layers=layers)


def of_layers(**changes: object) -> Callable[[BlockPlan], BlockPlan]:
    return lambda block: replace(block, layers=[replace(layer, **changes) for layer in block.layers])


def of_block(**changes: object) -> Callable[[BlockPlan], BlockPlan]:
    return lambda block: replace(block, **changes)


# What one block has in place of an ordinary part.
PARTS: dict[str, Callable[[BlockPlan], BlockPlan]] = {
    "none": of_block(),
    "pre without a norm": of_block(pre="relu", pre_norm=False),
    "gelu before": of_block(pre="gelu"),
    "odd pool": of_block(shortcut="odd pool", stride=2),
    "odd pool without a stride": of_block(shortcut="odd pool", stride=1),
    "3x3 projection": of_block(shortcut="3x3"),
    "layer scale": of_layers(norm="scale"),
    "group norm": of_layers(norm="group"),
    "norm without gain": of_layers(norm="bare"),
    "norm of the batch": of_layers(norm="untracked"),
    "reflection": of_layers(padding_mode="reflect"),
    "dilation": of_layers(dilation=2),
    "one-sided padding": one_sided,
    "gate": of_layers(gate=True),
    "gain on the branch": of_block(gains=(True, False)),
    "gain on the shortcut": of_block(gains=(False, True)),
    "gains on both": of_block(gains=(True, True)),
    **{f"{act} within": of_layers(act=act) for act in ("gelu", "silu", "hardswish", "mish", "prelu", "none")},
    **{f"{act} behind": of_block(out_act=act) for act in ("gelu", "silu", "tanh", "prelu")},
}


class Axes:
    """The layers of images, series or vectors."""

    def __init__(self, axes: int) -> None:
        self.axes = axes
        self.norm = nn.BatchNorm2d if axes == 2 else nn.BatchNorm1d

    def conv(self, width: int, out: int, *sizes: int, **settings: object) -> nn.Module:
        if not self.axes:
            return nn.Linear(width, out, bias=bool(settings.get("bias", True)))
        return getattr(nn, f"Conv{self.axes}d")(width, out, *sizes, **settings)

    def made_norm(self, kind: str, width: int) -> nn.Module:
        if kind == "group":
            return nn.GroupNorm(2, width)
        if kind == "scale":
            return Scale(nn.Parameter(torch.full((width,), 0.5)), (width, *[1] * self.axes))
        return self.norm(width, affine=kind != "bare", track_running_stats=kind != "untracked")


class Gate(nn.Module):
    """Squeeze and excitation: x σ(w mean(x))."""

    def __init__(self, width: int, axes: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(width, width)
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(2).mean(2) if self.axes else x
        return x * torch.sigmoid(self.weigh(mean))[(..., *[None] * self.axes)]


class Parts(nn.Module):
    """y = out_act(shortcut + branch(pre(x))); the shortcut is x, or a projection of pre(x). Without a forward."""

    def __init__(self, channels: int, plan: BlockPlan, axes: int) -> None:
        super().__init__()
        out, make = 2 * plan.out or channels, Axes(axes)
        norm = [make.norm(channels)] if plan.pre_norm else []
        self.pre = nn.ModuleList([*norm, ACTS[plan.pre]()] if plan.pre else [])
        branch: list[nn.Module] = []
        width = channels
        for i, layer in enumerate(plan.layers):
            last = i == len(plan.layers) - 1
            wide = out if last else 2 * layer.width
            groups = layer.groups or width
            if width % groups or wide % groups:
                groups = 1
            stride = plan.stride if i == min(plan.strided, len(plan.layers) - 1) else 1
            settings = {"dilation": layer.dilation, "groups": groups, "padding_mode": layer.padding_mode}
            reach = layer.dilation * (layer.kernel - 1)
            padding = reach // 2
            if layer.left is not None and axes:
                padding, sides = 0, (layer.left, reach - layer.left)
                branch.append(nn.ZeroPad2d(sides * 2) if axes == 2 else nn.ZeroPad1d(sides))
            branch.append(make.conv(width, wide, layer.kernel, stride, padding, bias=layer.bias, **settings))
            if layer.norm != "none":
                branch.append(make.made_norm(layer.norm, wide))
            if not last:
                branch.append(ACTS[layer.act]())
            if layer.gate:
                branch.append(Gate(wide, axes))
            if layer.drop:
                branch.append(DropPath(0.1) if last else nn.Dropout(0.1))
            width = wide
        self.branch = nn.ModuleList(branch)
        self.shortcut = shortcut(plan, channels, out, make)
        shape = (out, *[1] * axes)
        self.gains = nn.ParameterList(torch.full(shape, 0.5 + i) if has else None for i, has in enumerate(plan.gains))
        self.out_act = ACTS[plan.out_act]()

    def add_up(self, x: Tensor) -> Tensor:
        read = x
        for module in self.pre:
            read = module(read)
        y = read
        for module in self.branch:
            y = module(y)
        path = x if self.shortcut is None else self.shortcut(read)
        if self.gains[0] is not None:
            y = self.gains[0] * y
        if self.gains[1] is not None:
            path = path * self.gains[1]
        return self.out_act(y + path)


class AnyBlock(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.add_up(x)


def shortcut(plan: BlockPlan, channels: int, out: int, make: Axes) -> nn.Module | None:
    stride = plan.stride if make.axes else 1
    if plan.shortcut == "identity" and stride == 1 and out == channels:
        return None
    if plan.shortcut == "pad" and out >= channels:
        return PadShortcut(stride, out - channels, axes=make.axes)
    if plan.shortcut == "3x3":
        return make.conv(channels, out, 3, stride, 1)
    if "pool" in plan.shortcut and make.axes:
        mean, largest = (getattr(nn, f"{kind}Pool{make.axes}d") for kind in ("Avg", "Max"))
        divided = {"divisor_override": 3} if make.axes == 2 else {}
        pool = mean(stride, stride, ceil_mode=True, count_include_pad=False)
        if plan.shortcut == "odd pool":
            kind = 3 * plan.strided + len(plan.layers)
            pool = (
                mean(1, stride, **divided),
                mean(stride, stride, ceil_mode=True, **divided),
                largest(1, stride),
                mean(3, stride, 1),
                largest(stride, stride, ceil_mode=True),
            )[kind % 5]
        return nn.Sequential(pool, make.conv(channels, out, 1, bias=False), make.norm(out))
    conv = make.conv(channels, out, 1, stride, bias=plan.shortcut == "1x1")
    return nn.Sequential(conv, make.norm(out)) if plan.shortcut == "1x1 norm" else conv


class FunctionalBlock(AnyBlock):
    """Which calls functions where a reader names modules."""

    def forward(self, x: Tensor) -> Tensor:
        read = x
        for module in self.pre:
            read = F.leaky_relu(read, 0.2) if type(module) is nn.LeakyReLU else module(read)
        y = read
        for module in self.branch:
            if type(module) is nn.ReLU:
                y = F.relu(y)
            elif isinstance(module, nn.ZeroPad1d | nn.ZeroPad2d):
                y = F.pad(y, module.padding)
            elif type(module) in (nn.GELU, nn.SiLU, nn.Hardswish):
                y = getattr(F, type(module).__name__.lower())(y)
            else:
                y = module(y)
        if self.gains[0] is not None:
            y = y.mul(self.gains[0])
        path = x if self.shortcut is None else self.shortcut(read)
        y = torch.add(y, path if self.gains[1] is None else path * self.gains[1])
        return F.relu(y, inplace=True) if type(self.out_act) is nn.ReLU else self.out_act(y)


class MixedBlock(AnyBlock):
    """ConvNeXt's: linear layers on the last axis behind the branch, between two changes of axes."""

    def __init__(self, channels: int, plan: BlockPlan, axes: int) -> None:
        super().__init__(channels, plan, axes)
        out = 2 * plan.out or channels
        self.norm = nn.LayerNorm(out)
        self.mlp = nn.Sequential(nn.Linear(out, out + 3), nn.GELU(), nn.Linear(out + 3, out))
        self.scale = nn.Parameter(torch.full((out,), 0.5))
        self.last, self.first = [((0, 1), (0, 1)), ((0, 2, 1), (0, 2, 1)), ((0, 2, 3, 1), (0, 3, 1, 2))][axes]

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for module in self.branch:
            y = module(y)
        y = self.scale * self.mlp(self.norm(y.permute(self.last)))
        y = y.permute(self.first)
        return y + (x if self.shortcut is None else self.shortcut(x))


class ScaledBlock(AnyBlock):
    """Whose branch has a gain that no module tells."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(1.5 * x)


class GainBlock(AnyBlock):
    """With a parameter that its reader does not know."""

    def __init__(self, channels: int, plan: BlockPlan, axes: int) -> None:
        super().__init__(channels, plan, axes)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * super().forward(x)


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


class ViewBlock(AnyBlock):
    """Which changes what it adds through a view."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.flatten(1)[:, ::2].mul_(0.5)
        return y


class InputBlock(AnyBlock):
    """Which changes its input behind the branch's back."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch[0](x)
        for module in self.branch[1:]:
            y = module(y)
        x = x if self.shortcut is None else self.shortcut(x)
        path = x.view(x.shape)
        path += 1
        return self.out_act(y + x)


class FractionBlock(AnyBlock):
    """With a gain by the size of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out_act(super().forward(x) * (8 / x.shape[-1]))


class ConstantBlock(AnyBlock):
    """With a number that is made anew in each call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(0.75)


CLASSES: dict[str, type[AnyBlock]] = {
    "module": AnyBlock, "functional": FunctionalBlock, "scaled": ScaledBlock, "gain": GainBlock, "sized": SizedBlock,
    "keyword": KeywordBlock, "grad": GradBlock, "view": ViewBlock, "input": InputBlock, "fraction": FractionBlock,
    "constant": ConstantBlock,
}  # fmt: skip
# Each with a reader that names the modules, whatever else the block does, and without, so that its code is read.
READ: dict[str, type[Parts]] = {name: type(f"Read{cls.__name__}", (cls,), {}) for name, cls in CLASSES.items()}
WRITTEN = {f"written {name}": cls for name, cls in CLASSES.items()}
BLOCKS: dict[str, type[Parts]] = READ | WRITTEN | {"mixed": MixedBlock, "in the parent": Parts}


@register_reader(*READ.values())
def read_any(block: nn.Module, path: str) -> BlockSpec:
    assert isinstance(block, AnyBlock)
    gains = [None if gain is None else Scale(gain, tuple(gain.shape)) for gain in block.gains]
    shortcut = block.shortcut
    if gains[1] is not None:
        shortcut = nn.Sequential(nn.Identity() if shortcut is None else shortcut, gains[1])
    return BlockSpec(
        path=path,
        branch=(*block.branch, *([] if gains[0] is None else [gains[0]])),
        pre=tuple(block.pre),
        shortcut=shortcut,
        out_act=None if isinstance(block.out_act, nn.Identity) else block.out_act,
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
    "pooled": lambda net, x: net.pool("max", net.stem_act(x), 3, 1, 1),
    "odd pool": lambda net, x: net.pool("avg", net.stem_act(x), 3, 1, 1, *[False, True, -9][: net.axes == 2 and 3]),
    "clamp": lambda net, x: x.clamp(min=0),
    "softplus": lambda net, x: F.softplus(x, beta=-1),
    "view": written(lambda x: x.view(-1)),
    "chunk": written(lambda x: x.chunk(2, 1)[1]),
    "detach": written(lambda x: x.detach()),
    "indexing": written(lambda x: x[:, 1:]),
    "transpose": written(lambda x: x.transpose(1, -1)),
    "reshape": lambda net, x: net.stem_act(x).reshape(len(x), -1).view(x.shape),
    "half": lambda net, x: (x[:, ::2].relu_(), x)[1],
    "grad": lambda net, x: x.relu() if torch.is_grad_enabled() else x,
    "sized": lambda net, x: x.relu() if x.shape[-1] > 8 else x,
    "values": lambda net, x: x.relu() if x.mean() > 0 else x,
    "keyword": lambda net, x: net.rectified(x),
    "long skip": lambda net, x: net.stem_act(x),
}


class AnyNet(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.stem = Axes(plan.axes).conv(3, plan.width, 3, padding=1)
        self.stem_act = ACTS[plan.stem_act]()
        self.axes = plan.axes
        self.between = plan.between
        self.keep_width: list[int] = []  # indices of blocks
        width, blocks = plan.width, []
        for block in plan.blocks:
            blocks.append(BLOCKS[plan.block](width, block, plan.axes))
            if (2 * block.out or width) == width:
                self.keep_width.append(len(blocks) - 1)
            width = 2 * block.out or width
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = BETWEEN[self.between](self, self.stem(x))
        first = x
        for block in self.blocks:
            x = block.add_up(x) if type(block) is Parts else block(x)  # type: ignore[operator]
        if self.between == "long skip" and first.shape == x.shape:
            x = x + first
        return self.fc(x.flatten(2).mean(2) if self.axes else x)

    def pool(self, kind: str, x: Tensor, *settings: object) -> Tensor:
        return getattr(F, f"{kind}_pool{self.axes}d")(x, *settings) if self.axes else x

    def rectified(self, x: Tensor, slope: float = 0.1) -> Tensor:
        return F.leaky_relu(x, slope)


CONVS = (nn.Conv1d, nn.Conv2d, nn.Linear)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


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
    parametrize.register_parametrization(module, "weight", Halved())


def share_activation(network: nn.Module) -> None:
    """All ReLUs are one."""
    acts = [(parent, name) for parent in network.modules() for name, m in parent._modules.items() if type(m) is nn.ReLU]
    for parent, name in acts[1:]:
        parent._modules[name] = acts[0][0]._modules[acts[0][1]]


def same_shape(network: nn.Module, *kinds: type[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Where the modules of these classes stand, those of one making together."""
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for parent in network.modules():
        for name, module in parent._modules.items():
            if isinstance(module, kinds):
                found.setdefault(repr(module), []).append((parent, name))
    return [places for places in found.values() if len(places) > 1]


def share(*kinds: type[nn.Module]) -> Callable[[nn.Module], None]:
    """Two layers of one making become one module."""

    def change(network: nn.Module) -> None:
        for (one, first), (other, second), *_ in same_shape(network, *kinds):
            other._modules[second] = one._modules[first]

    return change


def tie(network: nn.Module) -> None:
    """Two convolutions of one making get one weight."""
    for (one, first), (other, second), *_ in same_shape(network, *CONVS):
        other._modules[second].weight = one._modules[first].weight  # type: ignore[union-attr]


def repeat(network: nn.Module) -> None:
    """The first block that keeps its width runs twice; nothing where a rewritten forward has no list of blocks."""
    for i in network.keep_width[:1] if isinstance(network, AnyNet) else ():
        network.blocks.insert(i, network.blocks[i])


def in_place(network: nn.Module) -> None:
    for module in network.modules():
        if hasattr(module, "inplace"):
            module.inplace = True


# What is done to one module of a network, those to layers with a weight, and those to the network.
TO_ANY: dict[str, Callable[[nn.Module], None]] = {
    "hook": add_hook, "pre-hook": add_pre_hook, "instance forward": set_forward, "subclass": set_class,
    "harmless subclass": set_same_class,
}  # fmt: skip
TO_CONVOLUTION: dict[str, Callable[[nn.Module], object]] = {
    "parametrised": add_parametrization,
    "weight norm": parametrizations.weight_norm,
    "old weight norm": weight_norm,
    "pruned": lambda module: torch_prune.l1_unstructured(module, "weight", 0.5),
}
TO_NETWORK: dict[str, Callable[[nn.Module], object]] = {
    "none": lambda network: None,
    "shared activation": share_activation,
    "shared convolution": share(*CONVS),
    "shared norm": share(*BATCH_NORMS),
    "tied weight": tie,
    "repeated block": repeat,
    "in place": in_place,
    "channels last": lambda network: network.to(memory_format=torch.channels_last),
    "global hook": lambda network: None,
}
TWISTS = TO_ANY | TO_CONVOLUTION | TO_NETWORK

VIEWS = ("view", "chunk", "detach", "indexing", "transpose", "reshape", "half")
WRITES = ("view", "input")
DECISIONS = ("grad", "sized", "values", "keyword", "fraction")
# The kinds that the tests count: what is odd in a network, as (field of the plan, value).
KINDS: dict[str, list[tuple[str, object]]] = {
    "functional calls": [("block", "functional"), ("block", "written functional")]
    + [("between", b) for b in ("functional", "clamp", "softplus")],
    "writes in place": [("between", "in place"), ("twist", "in place")],
    "writes through views": [("between", b) for b in VIEWS] + [("block", b) for b in BLOCKS if b.split()[-1] in WRITES],
    "shared modules": [("twist", t) for t in TO_NETWORK if t.startswith(("shared", "tied", "repeated"))],
    "hooks": [("twist", t) for t in ("hook", "pre-hook", "global hook")],
    "odd pools": [("part", p) for p in PARTS if "pool" in p] + [("between", "pooled"), ("between", "odd pool")],
    "scales": [("block", b) for b in BLOCKS if b.split()[-1] in ("scaled", "gain", "constant")]
    + [("part", p) for p in PARTS if "scale" in p or "gain on" in p or "gains" in p],
    "parametrisations": [("twist", t) for t in TO_CONVOLUTION],
    "forwards of their own": [("twist", "subclass"), ("twist", "instance forward")],
    "subclasses that change nothing": [("twist", "harmless subclass")],
    "decisions": [("block", b) for b in BLOCKS if b.split()[-1] in DECISIONS]
    + [("between", b) for b in DECISIONS if b in BETWEEN],
    "skips outside of blocks": [("between", "long skip")],
    "blocks that no reader knows": [("block", "written module"), ("block", "written functional")],
    "skips in the parent's forward": [("block", "in the parent")],
    "linear layers on the last axis": [("block", "mixed")],
    "series and vectors": [("axes", 1), ("axes", 0)],
    "gates": [("part", "gate")],
    "one-sided padding": [("part", "one-sided padding")],
    "memory formats": [("twist", "channels last")],
    "other norms": [("part", p) for p in PARTS if "norm" in p],
    "other activations": [("part", p) for p in PARTS if p.split()[-1] in ("within", "behind") or p == "gelu before"],
    "other convolutions": [("part", p) for p in ("3x3 projection", "reflection", "dilation")],
}


def kinds(plan: Plan) -> list[str]:
    """'ordinary', or in which ways a network is odd; and whether one of its blocks has a pre-activation."""
    found = [kind for kind, ways in KINDS.items() if any(getattr(plan, field) == value for field, value in ways)]
    pre = ["pre-activation"] if any(block.pre for block in plan.blocks) else []
    return (found or ["ordinary"]) + pre


def twist(network: nn.Module, plan: Plan) -> None:
    """Does what the plan says to the network, or to one of its modules, a different one for each seed."""
    if plan.twist in TO_NETWORK:
        TO_NETWORK[plan.twist](network)
    else:
        wanted = CONVS if plan.twist in TO_CONVOLUTION else nn.Module
        modules = [m for m in network.modules() if isinstance(m, wanted) and not isinstance(m, UNCALLED)]
        TWISTS[plan.twist](modules[plan.seed % len(modules)])
    network.eval()  # parametrisations too


UNCALLED = (nn.ModuleList, nn.ParameterList)


@contextmanager
def circumstances(plan: Plan) -> Iterator[None]:
    """A global hook, if the plan asks for it."""
    if plan.twist != "global hook":
        yield
        return
    kind = CONVS if plan.seed % 2 else BATCH_NORMS
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
            if isinstance(module, BATCH_NORMS):
                if module.running_mean is not None and module.running_var is not None:
                    module.running_mean.normal_(0, 0.3, generator=generator)
                    module.running_var.uniform_(0.3, 2, generator=generator)
                if not module.affine:
                    continue
                module.weight.uniform_(-1.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.3, generator=generator)
            elif isinstance(module, nn.PReLU):
                module.weight.uniform_(-0.5, 0.5, generator=generator)
            elif isinstance(module, CONVS) and plan.seed % 3 == 0:
                module.weight[plan.seed % len(module.weight)] = 0
    sizes = (plan.size[: plan.axes], plan.other_size[: plan.axes])
    return network, [4 * torch.randn(2, 3, *size, generator=generator, dtype=torch.float64) for size in sizes]
