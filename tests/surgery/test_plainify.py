"""plainify as a user meets it: what it takes, what it leaves alone, and what it says when it can't."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import unskip
from unskip.methods import PNNH, BlockSpec, PlainBlock, PNNHBlock, register_method
from unskip.methods.registry import _METHODS
from unskip.methods.spec import parts
from unskip.models.cifar import cifar_resnet
from unskip.surgery import cost, known_families, register_reader
from unskip.surgery.reading import _READERS

TIMM = ["resnet18", "resnet26", "resnet26d", "resnext50_32x4d", "wide_resnet50_2", "mobilenetv2_050"]
TORCHVISION = ["resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "mobilenet_v2"]


def families() -> list:
    networks = [pytest.param(lambda n=n: timm.create_model(n), id=f"timm-{n}") for n in TIMM]
    networks += [pytest.param(lambda n=n: getattr(torchvision.models, n)(), id=f"torchvision-{n}") for n in TORCHVISION]
    return networks


@pytest.mark.parametrize("method", ["plain", "pnnh"])
@pytest.mark.parametrize("build", families())
@torch.no_grad()
def test_families_of_timm_and_torchvision(build: object, method: str) -> None:
    residual = build()
    before = copy.deepcopy(residual.state_dict())
    network = unskip.plainify(residual, method).eval()
    assert network(torch.randn(1, 3, 64, 64)).shape == (1, 1000)
    assert network.surgery.replaced
    assert not network.surgery.left
    assert not network.surgery.kept
    after = residual.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before), "the given network stays untouched"
    for path in network.surgery.replaced:
        assert isinstance(network.get_submodule(path), PlainBlock | PNNHBlock)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("method", ["plain", "pnnh"])
@torch.no_grad()
def test_transformers_lose_the_skip_of_their_mlp(name: str, method: str) -> None:
    size = {"img_size": 32} if name.startswith("vit") else {"img_size": 64, "depths": (1, 1, 2, 1)}
    residual = timm.create_model(name, **size).eval()
    network = unskip.plainify(residual, method, **({"pretext": "group_average"} if method == "pnnh" else {}))
    count = len(network.surgery.replaced)
    assert network.surgery.kept == {"attention": count}
    assert network(torch.randn(1, 3, size["img_size"], size["img_size"])).shape == (1, 1000)
    block = network.get_submodule(network.surgery.replaced[0])
    old = residual.get_submodule(network.surgery.replaced[0])
    shape = (2, 4, 192) if name.startswith("vit") else (2, 16, 16, 96)
    x = torch.randn(shape)
    attended = x + (old.attn(old.norm1(x)) if name.startswith("vit") else old._attn(old.norm1(x)))
    if method == "plain":
        torch.testing.assert_close(block(x), old.mlp(old.norm2(attended)))
    else:
        torch.testing.assert_close(block(x), block.mlp(attended))


def test_trained_weights_that_are_lost_are_counted() -> None:
    residual = cifar_resnet(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unskip.plainify(residual)  # a fresh network loses nothing
    residual(torch.randn(8, 3, 16, 16))  # BatchNorm has seen data now
    blocks = sum(p.numel() for name, p in residual.named_parameters() if name.startswith("layer"))
    with pytest.warns(UserWarning, match=f"{blocks:,} trained weights in 3 blocks are discarded"):
        unskip.plainify(residual)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unskip.plainify(residual, "plain")  # keeps them all
    projected = cifar_resnet(8, shortcut="B")
    projected(torch.randn(8, 3, 16, 16))
    lost = sum(p.numel() for name, p in projected.named_parameters() if "shortcut" in name)
    with pytest.warns(UserWarning, match=f"{lost:,} trained weights in 2 blocks are discarded"):
        unskip.plainify(projected, "plain")  # but for the projections


def test_stem_and_head_keep_their_weights() -> None:
    residual = timm.create_model("resnet18")
    network = unskip.plainify(residual)
    assert torch.equal(network.conv1.weight, residual.conv1.weight)
    assert torch.equal(network.fc.weight, residual.fc.weight)


def test_mode_dtype_and_device_are_kept() -> None:
    residual = cifar_resnet(8).double().eval()
    network = unskip.plainify(residual)
    assert not any(module.training for module in network.modules())
    assert {t.dtype for t in network.state_dict().values() if t.is_floating_point()} == {torch.float64}
    with torch.device("meta"):
        meta = unskip.plainify(cifar_resnet(8), pretext="rectified_normal")
    assert all(t.is_meta for t in meta.state_dict().values())


def on_meta(build: Callable[..., nn.Module], **options: object) -> nn.Module:
    """A large network without its weights, where they do not matter."""
    with torch.device("meta"):
        return build(**options)


@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        (
            lambda: timm.create_model("resnet26", aa_layer=timm.layers.BlurPool2d),
            {},
            r"block 'layer2.0' of ResNet .* its branch holds",
        ),
        (
            lambda: timm.create_model("res2net50_26w_4s"),
            {},
            r"block 'layer1.0' .* 'split' \(res2net.py:\d+\), which does not keep the shape",
        ),
        (lambda: torchvision.models.densenet121(), {}, "DenseNet has no residual connection that can be removed"),
        (lambda: timm.create_model("resnet50", act_layer="silu"), {}, "SiLU, 2 in a row, does not let a closed form"),
        (lambda: timm.create_model("resnet18", act_layer="tanh"), {}, "reads both signs, and Tanh"),
        (lambda: timm.create_model("resnet18", act_layer="prelu"), {}, "PReLU is trained, and a coder is frozen"),
        (
            lambda: on_meta(torchvision.models.resnet50, width_per_group=512),
            {},
            "would carry 256 channels, not fewer than its 256",
        ),
        (
            lambda: nn.Sequential(timm.models.resnet.BasicBlock(8, 8, stride=2, dilation=2, downsample=nn.Identity())),
            {},
            r"strides \[2, 1\] with kernels \[3, 3\], dilated, leave no convolution",
        ),
        (lambda: cifar_resnet(8), {"method": PNNH}, "is neither a name"),
        (
            lambda: on_meta(torchvision.models.vgg11),
            {},
            "VGG has no residual connection that can be removed: it is plain already",
        ),
        (lambda: unskip.plainify(cifar_resnet(8)), {}, "it is plain already"),
        (lambda: unskip.plainify(cifar_resnet(8), "plain"), {}, "it is plain already"),
        (lambda: torchvision.models.resnext50_32x4d(), {"ratio": 0.45}, "32 groups can't be cut"),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, mlp_layer=timm.layers.GluMlp), {}, "GluMlp"),
        (lambda: cifar_resnet(8), {"ratoi": 0.5}, r"has no option 'ratoi'. Did you mean 'ratio'\?"),
        (lambda: cifar_resnet(8), {"method": "pnhh"}, r"method='pnhh' is not known. Did you mean 'pnnh'\?"),
        (lambda: cifar_resnet(8), {"method": 3}, "method=3 is neither a name"),
        (lambda: cifar_resnet(8), {"method": PNNH(), "ratio": 0.25}, "beside a ready method object"),
        (lambda: "resnet18", {}, "model='resnet18' is not an nn.Module"),
    ],
)
def test_what_can_not_be_done_is_a_sentence(build: object, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        unskip.plainify(build(), **options)


def test_not_strict_leaves_a_block_alone_and_says_so() -> None:
    residual = timm.create_model("resnet18")
    residual.layer3[1] = timm.create_model("resnet18", act_layer="tanh").layer3[1]
    with pytest.warns(
        UserWarning, match=r"can't make block 'layer3.1' of ResNet skip-free: it reads both signs, and Tanh"
    ):
        network = unskip.plainify(residual, strict=False)
    assert network.surgery.left == cost(residual, "pnnh", strict=False).left == ("layer3.1",)
    assert len(network.surgery.replaced) == 7
    assert isinstance(network.layer3[1], timm.models.resnet.BasicBlock)
    with pytest.warns(UserWarning, match="it is plain already"):
        unskip.plainify(on_meta(torchvision.models.vgg11), strict=False)


class StrangersBlock(nn.Module):
    """A residual block that unskip has never seen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.second(self.first(x).relu())).relu()


def test_a_stranger_adds_a_reader_and_a_method() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), StrangersBlock(8), StrangersBlock(8))
    assert unskip.plainify(network).surgery.replaced == ("2", "3")  # which needs no reader
    try:

        @register_reader(StrangersBlock)
        def read(block: StrangersBlock, path: str) -> BlockSpec:
            return BlockSpec(path=path, branch=parts(block, "first act second"), out_act=block.act)

        @register_method("zero")
        @dataclass(frozen=True)
        class Zero:
            factor: float = 0.0
            keeps_weights: ClassVar[bool] = True

            def build(self, spec: BlockSpec, bank: object) -> nn.Module:
                return nn.Threshold(-1e9, self.factor)

        assert any("StrangersBlock" in family for family in known_families())
        plain = unskip.plainify(network)
        assert plain(torch.randn(1, 3, 4, 4)).shape == (1, 8, 4, 4)
        assert plain[3].coder.coder is plain[2].coder
        assert isinstance(unskip.plainify(network, "zero", factor=1.0)[2], nn.Threshold)
        with pytest.raises(ValueError, match="the name 'zero' is taken"):
            register_method("zero")(Zero)
    finally:
        _READERS.pop(StrangersBlock, None)
        _METHODS.pop("zero", None)


def test_a_block_used_twice_and_a_block_alone() -> None:
    block = timm.models.resnet.BasicBlock(8, 8)
    network = unskip.plainify(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), block, block))
    assert network[2] is network[3]
    assert isinstance(network[3], PNNHBlock)
    assert network.surgery.replaced == ("2", "3")
    assert isinstance(unskip.plainify(block), PNNHBlock)


@pytest.mark.parametrize("act", ["leaky_relu", "gelu", "silu", "hard_swish"])
@torch.no_grad()
def test_other_activations_keep_the_scale(act: str) -> None:
    """56 layers at initialisation: what goes in with deviation 1 comes out of the last block neither tiny nor huge."""
    residual = cifar_resnet(56)
    layer = timm.layers.create_act_layer(act)
    for path, module in list(residual.named_modules()):
        if isinstance(module, nn.ReLU):
            residual.set_submodule(path, copy.deepcopy(layer))
    network = unskip.plainify(residual).train()
    features = network.forward_features(torch.randn(8, 3, 16, 16))
    assert 0.02 < features.std() < 20


def test_stochastic_depth_stays_where_it_was_applied() -> None:
    """timm's MobileNet-V2 builds it into blocks without a skip and never runs it there."""
    network = unskip.plainify(timm.create_model("mobilenetv2_050", drop_path_rate=0.9), signed="rectify")
    rates = [getattr(m.drop_path, "drop_prob", 0) for m in network.modules() if isinstance(m, PNNHBlock)]
    assert 0 < sum(rate > 0 for rate in rates) == 10
    half = unskip.plainify(timm.create_model("resnet18", drop_path_rate=0.4), "residual_half")
    assert half.layer4[1].drop_path.drop_prob == pytest.approx(0.4)
    assert half.surgery.kept == {"block": 8}


def test_readers_and_methods_that_give_nonsense_are_named() -> None:
    try:

        @register_reader(StrangersBlock)
        def read(block: nn.Module, path: str) -> None:
            return None

        with pytest.raises(ValueError, match=r"the reader of .*StrangersBlock gave None"):
            unskip.plainify(nn.Sequential(StrangersBlock(4), StrangersBlock(4)))
        with pytest.raises(ValueError, match="must be a dataclass"):
            register_method("function")(lambda: None)
    finally:
        _READERS.pop(StrangersBlock, None)


def test_a_subclass_with_a_forward_of_its_own_is_not_read() -> None:
    class Odd(timm.models.resnet.BasicBlock):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x + super().forward(x)

    network = timm.create_model("resnet18")
    network.layer1[0].__class__ = Odd
    with pytest.raises(ValueError, match=r"block 'layer1.0' .* adds tensors itself"):
        unskip.plainify(network)
