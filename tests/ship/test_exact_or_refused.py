"""plainify with rm, convert, fold and prune keep the function or refuse it with a sentence, in networks that deceive.

The judge is `differs`, which shares no code with the library: float64, three sizes, both signs, with and without grad.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, DropPath
from timm.layers.norm_act import SyncBatchNormAct
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, parametrize, weight_norm
from torch.nn.utils import prune as torch_prune
from torchvision.models.mobilenetv2 import InvertedResidual

import unskip
from tests.ship.test_fold import trained
from unskip.methods import BlockSpec
from unskip.methods.pieces import PadShortcut
from unskip.models.cifar import cifar_resnet
from unskip.ship import convert, prune
from unskip.surgery import register_reader
from unskip.surgery.reading import _READERS

SIZES = [(8, 8), (13, 12), (20, 24)]


def differs(one: nn.Module, other: nn.Module) -> bool:
    """Where `one` runs; autograd forbids some writes through views."""
    found = []
    for seed, size in enumerate(SIZES):
        x = 3 * torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for signed in (x, -x, x.abs(), -x.abs()):
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    try:
                        a = one(signed.clone()).detach()
                    except RuntimeError:
                        assert grad
                        continue
                    b = other(signed.clone()).detach()
                found.append(((a - b).abs().max() > 1e-9 * a.abs().max().clamp_min(1e-3)).item())
    return any(found)


def exact_or_refused(command: Callable[..., nn.Module], network: nn.Module, **options: Any) -> str:
    """'' if the function stayed, else the sentence of the refusal."""
    network = trained(network).double()
    try:
        result = command(network, **options)
    except ValueError as refusal:
        text = str(refusal)
    else:
        assert not differs(network, result)
        return ""
    assert text.startswith(("plainify: ", "fold: ", "prune: ")), text
    assert text.split("\n")[0].endswith("."), text
    return text


def without_skips(network: nn.Module, **options: Any) -> nn.Module:
    return unskip.plainify(network, "rm", limit=float("inf"), **options)


def converted(network: nn.Module, **options: Any) -> nn.Module:
    return convert(network, "rm", limit=float("inf"), **options)


# ---------------------------------------------------------------- residual networks, for rm


class Block(nn.Module):
    def __init__(self, **parts: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
        self.conv2, self.bn2, self.drop = nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Identity()
        self.shortcut, self.act2 = None, nn.ReLU()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x))))))
        return self.act2(y + (x if self.shortcut is None else self.shortcut(x)))


class Net(nn.Module):
    """A stem, whatever `before` makes of it, two blocks and a head."""

    def __init__(self, *blocks: nn.Module, before: Callable[["Net", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.stem, self.relu, self.before = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), before
        self.blocks, self.head = nn.Sequential(*blocks), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.relu(x) if self.before is None else self.before(self, x)
        return self.head(self.blocks(x)).mean((2, 3))


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    @register_reader(Block)
    def read(block: Block, path: str) -> BlockSpec:
        branch = (block.conv1, block.bn1, block.act1, block.conv2, block.bn2, block.drop)
        return BlockSpec(path=path, branch=branch, shortcut=block.shortcut, out_act=block.act2)

    yield
    _READERS.pop(Block)


def shifted(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward does a little more."""
    return type(f"Odd{kind.__name__}", (kind,), {"forward": lambda self, x: kind.forward(self, x) * 1.25 - 0.5})


def with_method(kind: type[nn.Module], **methods: Callable) -> type[nn.Module]:
    return type(f"Odd{kind.__name__}", (kind,), methods)


def strided(shortcut: nn.Module) -> nn.Module:
    return Block(conv1=nn.Conv2d(4, 6, 3, 2, 1), shortcut=shortcut)


def on_instance(module: nn.Module, name: str = "forward") -> nn.Module:
    forward = type(module).forward
    object.__setattr__(module, name, lambda x: forward(module, x) * 1.25)
    return module


def hooked(module: nn.Module, *, before: bool = False) -> nn.Module:
    if before:
        module.register_forward_pre_hook(lambda module, args: (args[0] - 0.5,))
    else:
        module.register_forward_hook(lambda module, args, y: y - 0.5)
    return module


def half(tensor: Tensor) -> Tensor:
    return tensor.chunk(2, 1)[0]


def written(view: Callable[[Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    def before(net: Net, x: Tensor) -> Tensor:
        x = net.relu(x)
        view(x).sub_(1)
        return x

    return before


def written_by_iadd(net: Net, x: Tensor) -> Tensor:
    y = x = net.relu(x)
    y -= 1
    return x


def rectified_half(net: Net, x: Tensor) -> Tensor:
    half(x).relu_()
    return x


def with_grad_only(net: Net, x: Tensor) -> Tensor:
    return net.relu(x) if torch.is_grad_enabled() else x


def without_grad_only(net: Net, x: Tensor) -> Tensor:
    return x if torch.is_grad_enabled() else net.relu(x)


class OfSize(Block):
    """Which reads itself differently on small inputs."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.act1(self.bn1(self.conv1(x))))
        return self.act2((self.bn2(y) if x.shape[-1] > 10 else y) + x)


class Keyword(Block):
    def forward(self, x: Tensor, gain: float = 2.0) -> Tensor:
        return self.act2(gain * self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x))))) + x)


class OfGrad(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        return self.act2(y + (x if torch.is_grad_enabled() else 2 * x))


class KeywordNet(Net):
    """The sign of what its blocks read depends on an argument."""

    def forward(self, x: Tensor, rectify: bool = True) -> Tensor:
        x = self.stem(x)
        return self.head(self.blocks(self.relu(x) if rectify else x)).mean((2, 3))


def read_as_block(kind: type[Block]) -> nn.Module:
    register_reader(kind)(_READERS[Block].read)
    return Net(kind(), kind())


def sync(norm: nn.Module) -> nn.Module:
    made = SyncBatchNormAct(6)
    made.act, made.drop = norm, nn.Identity()
    return made


def inverted(kind: type[nn.Module]) -> nn.Module:
    block = InvertedResidual(4, 4, 1, 2)
    block.conv[0].__class__ = kind
    return block


RESIDUAL: dict[str, Callable[[], nn.Module]] = {
    "divisor": lambda: Net(strided(nn.Sequential(nn.AvgPool2d(1, 2, divisor_override=3), nn.Conv2d(4, 4, 1)))),
    "negative divisor": lambda: Net(Block(), before=lambda n, x: nn.AvgPool2d(2, divisor_override=-4)(n.relu(x))),
    "odd BatchNorm2d": lambda: Net(Block(bn1=shifted(nn.BatchNorm2d)(6)), Block()),
    "odd BatchNorm2d before the sum": lambda: Net(Block(bn2=shifted(nn.BatchNorm2d)(4)), Block()),
    "odd BatchNorm2d in the shortcut": lambda: Net(
        Block(shortcut=nn.Sequential(nn.Conv2d(4, 4, 1), shifted(nn.BatchNorm2d)(4)))
    ),
    "odd Identity": lambda: Net(Block(drop=shifted(nn.Identity)())),
    "odd Identity in the shortcut": lambda: Net(Block(shortcut=shifted(nn.Identity)())),
    "odd Dropout": lambda: Net(Block(drop=shifted(nn.Dropout)())),
    "odd DropPath": lambda: Net(Block(drop=shifted(DropPath)())),
    "odd ReLU": lambda: Net(Block(act1=shifted(nn.ReLU)())),
    "odd ReLU behind the sum": lambda: Net(Block(act2=shifted(nn.ReLU)()), Block()),
    "odd ReLU before": lambda: Net(Block(), before=lambda net, x: net.odd(x)),
    "odd Sequential": lambda: Net(Block(shortcut=shifted(nn.Sequential)(nn.Conv2d(4, 4, 1)))),
    "odd Sequential in a MobileNet": lambda: Net(inverted(shifted(type(InvertedResidual(4, 4, 1, 2).conv[0])))),
    "odd PadShortcut": lambda: Net(strided(shifted(PadShortcut)(2, 0))),
    "odd _conv_forward": lambda: Net(
        Block(conv1=with_method(nn.Conv2d, _conv_forward=lambda s, x, w, b: 2 * nn.Conv2d._conv_forward(s, x, w, b))(
            4, 6, 3, padding=1))
    ),
    "odd __call__": lambda: Net(
        Block(bn1=with_method(nn.BatchNorm2d, __call__=lambda s, x: nn.Module.__call__(s, x) - 1)(6))
    ),
    "SyncBatchNormAct": lambda: Net(Block(bn1=sync(nn.ReLU()), act1=nn.Identity())),
    "forward on a norm": lambda: Net(Block(bn1=on_instance(nn.BatchNorm2d(6)))),
    "forward on an activation": lambda: Net(Block(act2=on_instance(nn.ReLU()))),
    "forward on a convolution": lambda: Net(Block(conv2=on_instance(nn.Conv2d(6, 4, 3, padding=1)))),
    "forward on a block": lambda: Net(on_instance(Block()), Block()),
    "call on a norm": lambda: Net(Block(bn1=on_instance(nn.BatchNorm2d(6), "_call_impl"))),
    "hook on a norm": lambda: Net(Block(bn1=hooked(nn.BatchNorm2d(6)))),
    "hook before a block": lambda: Net(hooked(Block(), before=True)),
    "hook on the stem's ReLU": lambda: Net(Block(), before=lambda net, x: net.hooked(net.relu(x))),
    "view": lambda: Net(Block(), before=written(lambda x: x.view(-1))),
    "reshape": lambda: Net(Block(), before=written(lambda x: x.reshape(2, -1))),
    "detach": lambda: Net(Block(), before=written(lambda x: x.detach())),
    "data": lambda: Net(Block(), before=written(lambda x: x.data)),
    "chunk": lambda: Net(Block(), before=written(half)),
    "split": lambda: Net(Block(), before=written(lambda x: x.split(2, 1)[1])),
    "indexing": lambda: Net(Block(), before=written(lambda x: x[:, 1:3])),
    "transpose": lambda: Net(Block(), before=written(lambda x: x.transpose(2, 3))),
    "flatten": lambda: Net(Block(), before=written(lambda x: x.flatten(1))),
    "unbind": lambda: Net(Block(), before=written(lambda x: x.unbind(1)[2])),
    "iadd": lambda: Net(Block(), before=written_by_iadd),
    "half a relu_": lambda: Net(Block(), before=rectified_half),
    "softplus": lambda: Net(Block(), before=lambda net, x: nn.Softplus(beta=-1)(x)),
    "softplus with a threshold": lambda: Net(Block(), before=lambda net, x: nn.Softplus(threshold=-3)(x)),
    "hardtanh": lambda: Net(Block(), before=lambda net, x: nn.Hardtanh(-1, 1)(x)),
    "grad": lambda: Net(Block(), before=with_grad_only),
    "no grad": lambda: Net(Block(), before=without_grad_only),
    "size": lambda: Net(Block(), before=lambda net, x: net.relu(x) if x.shape[-1] > 10 else x),
    "values": lambda: Net(Block(), before=lambda net, x: net.relu(x) if x.sum() > 0 else x),
    "a block by size": lambda: read_as_block(OfSize),
    "a block by keyword": lambda: read_as_block(Keyword),
    "a block by grad": lambda: read_as_block(OfGrad),
    "a network by keyword": lambda: KeywordNet(Block()),
}  # fmt: skip


@pytest.mark.parametrize("command", [without_skips, converted])
@pytest.mark.parametrize("name", RESIDUAL)
def test_rm_keeps_the_function_or_refuses(name: str, command: Callable) -> None:
    network = RESIDUAL[name]()
    network.odd, network.hooked = shifted(nn.ReLU)(), hooked(nn.Identity()) if "stem" in name else nn.Identity()
    refused = exact_or_refused(command, network)
    if name in ("a block by size", "a block by grad", "a block by keyword") or ("odd" in name and "before" not in name):
        assert refused, "nothing but a refusal can be right"
    if isinstance(network, KeywordNet):
        plain = command(trained(network).double())
        for value in (True, False):
            x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
            torch.testing.assert_close(plain(x, rectify=value), network(x, rectify=value))


@pytest.mark.parametrize("command", [without_skips, converted])
def test_what_is_refused_is_named(command: Callable) -> None:
    for network, says in (
        (Net(Block(bn1=shifted(nn.BatchNorm2d)(6))), r"'blocks.0.bn1' .*OddBatchNorm2d.* of its own"),
        (Net(Block(bn1=hooked(nn.BatchNorm2d(6)))), r"'blocks.0.bn1' .* forward hook"),
        (Net(Block(act1=on_instance(nn.ReLU()))), r"'blocks.0.act1' .*'forward'.* instance"),
        (Net(Block(conv1=parametrizations.weight_norm(nn.Conv2d(4, 6, 3, padding=1)))), "ParametrizedConv2d"),
    ):
        with pytest.raises(ValueError, match=says):
            command(trained(network))


@pytest.fixture
def everywhere() -> Iterator[Callable[[bool], None]]:
    """A hook on all modules of the process."""
    handles = []

    def register(before: bool) -> None:
        if before:
            handles.append(
                global_hooks.register_module_forward_pre_hook(
                    lambda module, args: (args[0] - 0.5,) if isinstance(module, nn.Conv2d) else None
                )
            )
        else:
            handles.append(
                global_hooks.register_module_forward_hook(
                    lambda module, args, y: 1.25 * y if isinstance(module, nn.BatchNorm2d) else None
                )
            )

    yield register
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("command", [without_skips, converted, unskip.fold, prune])
def test_a_global_hook_is_refused(command: Callable, before: bool, everywhere: Callable[[bool], None]) -> None:
    network = Net(Block()) if command in (without_skips, converted) else Plain()
    everywhere(before)
    assert "global forward hook" in exact_or_refused(command, network)


def test_known_layers_in_other_clothes_keep_working() -> None:
    """SyncBatchNorm, timm's BatchNormAct2d and subclasses that change nothing."""

    class Named(nn.BatchNorm2d):
        def extra_repr(self) -> str:
            return "mine"

    class Other(nn.ReLU):
        """Nothing new."""

    class Convolution(nn.Conv2d):
        """Nothing new."""

    class Shortcut(nn.Sequential):
        """Nothing new."""

    for norm in (nn.SyncBatchNorm(6), BatchNormAct2d(6, apply_act=False), Named(6)):
        assert not exact_or_refused(without_skips, Net(Block(bn1=norm), Block(act2=Other())))
        plain = nn.Sequential(nn.Conv2d(3, 6, 3), norm, Other(), nn.Conv2d(6, 4, 1))
        assert not exact_or_refused(unskip.fold, plain)
    assert not exact_or_refused(without_skips, Net(Block(bn1=BatchNormAct2d(6), act1=nn.Identity())))
    block = Block(conv1=Convolution(4, 6, 3, padding=1), act1=Other(), shortcut=Shortcut(Convolution(4, 4, 1)))
    network = Net(block)
    assert not exact_or_refused(without_skips, network)
    assert not exact_or_refused(unskip.fold, without_skips(network))


def test_what_rm_gave_folds_after_more_training() -> None:
    """Whatever training makes of its weights, of the biases beside carried channels too."""
    plain = without_skips(trained(Net(Block(), Block())))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    assert not exact_or_refused(unskip.fold, plain)


def test_the_proof_is_as_good_as_before() -> None:
    """What is right is still seen: one sign is carried behind a ReLU, through pooling and views."""
    for before in (
        None,
        lambda net, x: nn.functional.max_pool2d(net.relu(x), 2),
        lambda net, x: net.relu(x).view(x.shape).detach(),
        lambda net, x: x.clamp(min=0),
        lambda net, x: torch.nn.functional.softplus(x),
        lambda net, x: torch.nn.functional.relu6(x),
        lambda net, x: x.relu_(),
    ):
        plain = without_skips(trained(Net(Block(), Block(), before=before)))
        assert [block.conv1.out_channels for block in plain.blocks] == [6 + 4, 6 + 4]


# ---------------------------------------------------------------- plain networks, for fold and prune


class Plain(nn.Module):
    """Convolutions with a norm between them and dead channels; `between` does something to what stands there."""

    def __init__(self, between: Callable[["Plain", Tensor], Tensor] | None = None, **parts: nn.Module) -> None:
        super().__init__()
        self.conv1, self.norm, self.act = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
        self.drop, self.conv2, self.between = nn.Dropout(), nn.Conv2d(6, 4, 3, padding=1), between
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = x if self.between is None else self.between(self, x)
        return self.fc(self.pool(self.conv2(self.drop(self.act(self.norm(x)))).relu()).flatten(1))


def view_written(net: nn.Module, x: Tensor) -> Tensor:
    x.view(-1).sub_(1)
    return x


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "odd BatchNorm2d": lambda: Plain(norm=shifted(nn.BatchNorm2d)(6)),
    "odd ReLU": lambda: Plain(act=shifted(nn.ReLU)()),
    "odd Dropout": lambda: Plain(drop=shifted(nn.Dropout)()),
    "odd DropPath": lambda: Plain(drop=shifted(DropPath)()),
    "odd Identity": lambda: Plain(drop=shifted(nn.Identity)()),
    "odd Conv2d": lambda: Plain(conv1=shifted(nn.Conv2d)(3, 6, 3, padding=1)),
    "odd Linear": lambda: Plain(fc=shifted(nn.Linear)(4, 3)),
    "SyncBatchNormAct": lambda: Plain(norm=sync(nn.ReLU()), act=nn.Identity()),
    "forward on a norm": lambda: Plain(norm=on_instance(nn.BatchNorm2d(6))),
    "forward on a ReLU": lambda: Plain(act=on_instance(nn.ReLU())),
    "forward on a convolution": lambda: Plain(conv2=on_instance(nn.Conv2d(6, 4, 3, padding=1))),
    "hook on a norm": lambda: Plain(norm=hooked(nn.BatchNorm2d(6))),
    "hook on a ReLU": lambda: Plain(act=hooked(nn.ReLU())),
    "hook on a convolution": lambda: Plain(conv1=hooked(nn.Conv2d(3, 6, 3, padding=1))),
    "hook on a classifier": lambda: Plain(fc=hooked(nn.Linear(4, 3), before=True)),
    "view": lambda: Plain(view_written),
    "chunk": lambda: Plain(lambda net, x: (half(x).sub_(1), x)[1]),
    "detach": lambda: Plain(lambda net, x: (x.detach().sub_(1), x)[1]),
    "data": lambda: Plain(lambda net, x: (x.data.sub_(1), x)[1]),
    "small": lambda: Plain(lambda net, x: x.relu() if x.shape[-1] < 10 else x),
    "large": lambda: Plain(lambda net, x: x.relu() if x.shape[-1] > 10 else x),
    "grad": lambda: Plain(lambda net, x: x.relu() if torch.is_grad_enabled() else x),
    "no grad": lambda: Plain(lambda net, x: x if torch.is_grad_enabled() else x.relu()),
    "values": lambda: Plain(lambda net, x: x.relu() if x.mean() > 0.1 else x),
}


@pytest.mark.parametrize("given", [False, True], ids=["no example", "example"])
@pytest.mark.parametrize("command", [unskip.fold, prune])
@pytest.mark.parametrize("name", PLAIN)
def test_fold_and_prune_keep_the_function_or_refuse(name: str, command: Callable, given: bool) -> None:
    network = trained(PLAIN[name]())
    with torch.no_grad():
        for layer in (network.conv1, network.conv2):
            layer.weight[0], layer.bias[0] = 0, -1
        if command is prune:  # which looks between layers, where norms end the search
            network.norm = nn.Identity() if type(network.norm) is nn.BatchNorm2d else network.norm
    example = {"example": torch.randn(2, 3, *SIZES[0])} if given else {}
    exact_or_refused(command, network, **example)


# ---------------------------------------------------------------- modules that can't be copied or seen


class Locked(nn.Module):
    def __init__(self, thing: object, inner: nn.Module) -> None:
        super().__init__()
        self.thing, self.inner = thing, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def scripted_inside() -> nn.Module:
    network = cifar_resnet(8).eval()
    network.layer1[0] = torch.jit.script(network.layer1[0])
    return network


def grown(network: nn.Module) -> nn.Module:
    """Whose weights belong to a graph."""
    network.train()
    network(torch.randn(2, 3, 8, 8)).sum().backward()
    return network.eval()


def pruned(network: nn.Module) -> nn.Module:
    torch_prune.l1_unstructured(network.layer1[0].conv1, "weight", 0.5)
    return network


def normed(network: nn.Module, new: bool) -> nn.Module:
    (parametrizations.weight_norm if new else weight_norm)(network.layer1[0].conv1)
    return network


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrised(network: nn.Module) -> nn.Module:
    parametrize.register_parametrization(network.conv1, "weight", Twice())
    return network


ODD: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.trace(cifar_resnet(8).eval(), torch.randn(2, 3, 8, 8)),
    "a scripted block": scripted_inside,
    "a lock": lambda: Locked(threading.Lock(), cifar_resnet(8)).eval(),
    "a generator": lambda: Locked((i for i in range(3)), cifar_resnet(8)).eval(),
    "a torch generator": lambda: Locked(torch.Generator(), cifar_resnet(8)).eval(),
    "an open file": lambda: Locked(open(__file__), cifar_resnet(8)).eval(),  # noqa: SIM115
    "pruned": lambda: pruned(cifar_resnet(8).eval()),
    "pruned and trained": lambda: grown(pruned(cifar_resnet(8))),
    "weight norm": lambda: normed(cifar_resnet(8).eval(), True),
    "weight norm of old": lambda: grown(normed(cifar_resnet(8), False)),
    "parametrised": lambda: parametrised(cifar_resnet(8).eval()),
}
COMMANDS: dict[str, Callable[[nn.Module], object]] = {
    "plainify": lambda net: unskip.plainify(net, "plain"),
    "plainify rm": without_skips,
    "convert": converted,
    "fold": unskip.fold,
    "prune": prune,
    "verify": lambda net: unskip.verify(net, net, torch.randn(2, 3, 8, 8)),
    "cost": lambda net: unskip.surgery.cost(net, "rm"),
}


@pytest.mark.filterwarnings("ignore:plainify", "ignore::FutureWarning")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ODD)
def test_odd_modules_get_a_result_or_a_sentence(name: str, command: str) -> None:
    try:
        COMMANDS[command](ODD[name]())
    except ValueError as refusal:
        text = str(refusal)
        assert text.startswith(f"{command.split()[0]}: ") or command in ("convert", "cost"), text
        assert text.split("\n")[0].endswith("."), text
    else:
        assert "lock" not in name
        assert "file" not in name


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ODD)
def test_odd_modules_are_exported_or_refused(name: str, tmp_path: Any) -> None:
    network, x = ODD[name](), torch.randn(2, 3, 8, 8)
    try:
        unskip.export(network, tmp_path / "net.pt2", example=x)
    except ValueError as refusal:
        text = str(refusal)
    else:
        again = torch.export.load(str(tmp_path / "net.pt2")).module()
        torch.testing.assert_close(again(x), network(x), atol=1e-5, rtol=1e-5)
        return
    assert text.startswith("export: ")
    assert text.endswith(".")


# ---------------------------------------------------------------- what stays is said


@pytest.mark.filterwarnings("ignore:plainify")
def test_additions_outside_of_blocks_are_named() -> None:
    """HRNet adds its branches in the forward of its stages, 20 times, and in that of its head, 3 times."""
    network = timm.create_model("hrnet_w18_small", num_classes=10)
    with pytest.raises(
        ValueError, match=r"adds tensors outside of its blocks, 23 times: .*'stage2.0 \(hrnet.py:\d+\)'.* strict=False"
    ):
        unskip.plainify(network, "plain")
    left = unskip.plainify(network, "plain", strict=False).surgery.left
    assert len(left) == 23
    assert [path.split(" ")[0] for path in left].count("stage3.0") == 6
    assert left[0].startswith("stage2.0 ")
