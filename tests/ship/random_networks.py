"""Residual networks of every make: what people write, sensible or not.

Half of them are ordinary. The others are odd in one or two ways, many of which a look at their modules does not show:
a hook, a subclass with a forward of its own, a write through a view, a decision by the size of the input and so on.
`kinds` names what a network has of the kinds that the tests count.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from timm.layers import DropPath, LayerScale2d
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.nn.utils import prune as torch_prune

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
    padding_mode: str = "zeros"
    dilation: int = 1


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    width: int
    stem_act: str
    blocks: list[BlockPlan]
    size: tuple[int, int]
    other_size: tuple[int, int]
    seed: int
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
    **{f"{act} within": of_layers(act=act) for act in ("gelu", "silu", "prelu", "none")},
    **{f"{act} behind": of_block(out_act=act) for act in ("gelu", "tanh", "prelu")},
}


class AnyBlock(nn.Module):
    """y = out_act(shortcut + branch(pre(x))); the shortcut is x, or a projection of pre(x)."""

    def __init__(self, channels: int, plan: BlockPlan) -> None:
        super().__init__()
        out = 2 * plan.out or channels
        norm = [nn.BatchNorm2d(channels)] if plan.pre_norm else []
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
            padding = layer.dilation * (layer.kernel // 2)
            branch.append(nn.Conv2d(width, wide, layer.kernel, stride, padding, bias=layer.bias, **settings))
            if layer.norm in MADE_NORMS:
                branch.append(MADE_NORMS[layer.norm](wide))
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


MADE_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda width: nn.GroupNorm(2, width),
    "bare": lambda width: nn.BatchNorm2d(width, affine=False),
    "untracked": lambda width: nn.BatchNorm2d(width, track_running_stats=False),
    "scale": lambda width: LayerScale2d(width, 0.5),
}


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
        kind = 3 * plan.strided + len(plan.layers)
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


class GainBlock(AnyBlock):
    """With a parameter that its reader does not know."""

    def __init__(self, channels: int, plan: BlockPlan) -> None:
        super().__init__(channels, plan)
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


BLOCKS: dict[str, type[AnyBlock]] = {
    "module": AnyBlock, "functional": FunctionalBlock, "scaled": ScaledBlock, "gain": GainBlock, "sized": SizedBlock,
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
    "long skip": lambda net, x: net.stem_act(x),
}


class AnyNet(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, plan.width, 3, padding=1)
        self.stem_act = ACTS[plan.stem_act]()
        self.between = plan.between
        self.keep_width: list[int] = []  # indices of blocks
        width, blocks = plan.width, []
        for block in plan.blocks:
            blocks.append(BLOCKS[plan.block](width, block))
            if (2 * block.out or width) == width:
                self.keep_width.append(len(blocks) - 1)
            width = 2 * block.out or width
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = BETWEEN[self.between](self, self.stem(x))
        first = x
        for block in self.blocks:
            x = block(x)
        if self.between == "long skip" and first.shape == x.shape:
            x = x + first
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
    for (one, first), (other, second), *_ in same_shape(network, nn.Conv2d):
        other._modules[second].weight = one._modules[first].weight  # type: ignore[union-attr]


def repeat(network: nn.Module) -> None:
    """The first block that keeps its width runs twice."""
    assert isinstance(network, AnyNet)
    for i in network.keep_width[:1]:
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
    "shared convolution": share(nn.Conv2d),
    "shared norm": share(nn.BatchNorm2d),
    "tied weight": tie,
    "repeated block": repeat,
    "in place": in_place,
    "channels last": lambda network: network.to(memory_format=torch.channels_last),
    "global hook": lambda network: None,
}
TWISTS = TO_ANY | TO_CONVOLUTION | TO_NETWORK

VIEWS = ("view", "chunk", "detach", "indexing", "transpose", "reshape", "half")
DECISIONS = ("grad", "sized", "values", "keyword")
# The kinds that the tests count: what is odd in a network, as (field of the plan, value).
KINDS: dict[str, list[tuple[str, str]]] = {
    "functional calls": [("block", "functional")] + [("between", b) for b in ("functional", "clamp", "softplus")],
    "writes in place": [("between", "in place"), ("twist", "in place")],
    "writes through views": [("between", b) for b in VIEWS],
    "shared modules": [("twist", t) for t in TO_NETWORK if t.startswith(("shared", "tied", "repeated"))],
    "hooks": [("twist", t) for t in ("hook", "pre-hook", "global hook")],
    "odd pools": [("part", p) for p in PARTS if "pool" in p] + [("between", "pooled"), ("between", "odd pool")],
    "scales": [("block", "scaled"), ("block", "gain"), ("part", "layer scale")],
    "parametrisations": [("twist", t) for t in TO_CONVOLUTION],
    "forwards of their own": [("twist", "subclass"), ("twist", "instance forward")],
    "subclasses that change nothing": [("twist", "harmless subclass")],
    "decisions": [("block", b) for b in DECISIONS if b in BLOCKS] + [("between", b) for b in DECISIONS],
    "skips outside of blocks": [("between", "long skip")],
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
        return
    wanted = nn.Conv2d if plan.twist in TO_CONVOLUTION else nn.Module
    modules = [m for m in network.modules() if isinstance(m, wanted) and not isinstance(m, nn.ModuleList)]
    TWISTS[plan.twist](modules[plan.seed % len(modules)])


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
                if module.running_mean is not None and module.running_var is not None:
                    module.running_mean.normal_(0, 0.3, generator=generator)
                    module.running_var.uniform_(0.3, 2, generator=generator)
                if not module.affine:
                    continue
                module.weight.uniform_(-1.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.3, generator=generator)
            elif isinstance(module, nn.PReLU):
                module.weight.uniform_(-0.5, 0.5, generator=generator)
            elif isinstance(module, nn.Conv2d) and plan.seed % 3 == 0:
                module.weight[plan.seed % len(module.weight)] = 0
    sizes = (plan.size, plan.other_size)
    return network, [4 * torch.randn(2, 3, *size, generator=generator, dtype=torch.float64) for size in sizes]
