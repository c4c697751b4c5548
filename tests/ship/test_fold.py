"""A folded network is the same function, of layers, activations and pooling alone; what has no such form is refused."""

import copy
from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import prune

import unskip
from unskip.coders import ClosedFormCoder, ClosedFormTransition
from unskip.kernels.depthwise import JoinedSequential
from unskip.methods import PNNHBlock
from unskip.models import ENTRIES, dominant_paths
from unskip.models.about import skips_left
from unskip.models.cifar import cifar_resnet, wide_resnet
from unskip.models.seqnet import layout
from unskip.models.simplified import simplified_net

# Of an exported graph. SReLU, max(x, b), is `maximum` with its b as `view`; hardtanh is ReLU6.
GRAPH = {
    "conv2d", "linear", "relu", "relu_", "leaky_relu", "leaky_relu_", "prelu", "tanh", "hardtanh", "hardtanh_",
    "maximum", "max_pool2d", "adaptive_avg_pool2d", "mean", "flatten", "reshape", "view",
}  # fmt: skip


def trained(network: nn.Module, seed: int = 0) -> nn.Module:
    """As after training: statistics, gains and biases that are not those of a fresh norm, trained activations too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_(0, 0.2, generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)
                if module.affine:
                    module.weight.uniform_(-1.5, 1.5, generator=generator)
                    module.bias.normal_(0, 0.2, generator=generator)
            elif isinstance(module, nn.Conv2d | nn.Linear):
                if module.bias is not None:
                    module.bias.normal_(0, 0.1, generator=generator)
                for name in ("a", "b"):  # Dirac
                    if name in module._parameters:
                        module._parameters[name].uniform_(0.2, 1, generator=generator)
            elif type(module).__name__ == "SReLU":
                module.b.uniform_(-1, 0.1, generator=generator)
    return network.eval()


def error(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    """max |a(x) - b(x)| / max |a(x)|, by hand rather than by `verify`."""
    with torch.no_grad():
        y_a, y_b = copy.deepcopy(a)(x.clone()), copy.deepcopy(b)(x.clone())
    assert torch.isfinite(y_a).all()
    assert y_a.abs().max() > 0
    return ((y_a - y_b).abs().max() / y_a.abs().max()).item()


def functions(network: nn.Module, x: Tensor) -> set[str]:
    program = torch.export.export(network, (x,))
    return {str(n.target).split(".")[1] for n in program.graph.nodes if n.op == "call_function"}


def smaller(method: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: unskip.plainify(cifar_resnet(8), method, **options)


def mobilenet(method: str, **options: object) -> nn.Module:
    return unskip.plainify(timm.create_model("mobilenetv2_035", num_classes=10), method, **options)


CNNS: dict[str, Callable[[], nn.Module]] = {
    "plain": smaller("plain"),
    "pnnh": smaller("pnnh"),
    "pnnh, whole transitions": smaller("pnnh", transition="whole"),
    "pnnh, quarter": smaller("pnnh", ratio=0.25),
    "pnnh, second norm": smaller("pnnh", norm="both"),
    "pnnh_paper": smaller("pnnh_paper"),
    "pnnh, identity": smaller("pnnh", pretext="identity"),
    "seq": smaller("seq"),
    "seq, tied": smaller("seq", tie="conv2", pre_relu="norm"),
    "seq, tied at the other end": smaller("seq", tie="conv2", position="second", pre_relu="bias"),
    "dirac": smaller("dirac"),
    "iso": smaller("iso"),
    "delta_tanh": smaller("delta_tanh"),
    "looks_linear": smaller("looks_linear"),
    "wrn, plain": lambda: unskip.plainify(wide_resnet(10, 1), "plain"),
    "wrn, pnnh": lambda: unskip.plainify(wide_resnet(10, 1), "pnnh"),
    "wrn, looks_linear": lambda: unskip.plainify(wide_resnet(10, 1), "looks_linear"),
    "wrn, iso": lambda: unskip.plainify(wide_resnet(10, 1), "iso"),
    "bottleneck, pnnh": lambda: unskip.plainify(timm.create_model("resnet26", num_classes=10), "pnnh"),
    "torchvision, plain": lambda: unskip.plainify(torchvision.models.resnet18(num_classes=10), "plain"),
    "mobilenet, plain": lambda: mobilenet("plain"),
    "mobilenet, pnnh": lambda: mobilenet("pnnh"),
    "mobilenet, dirac": lambda: mobilenet("dirac"),
    "seqnet, bottles": lambda: unskip.plainify(layout(1, 1, 1, 1, num_classes=10), "seq_bottle", tie="both"),
    "simplified": lambda: simplified_net(8, residual=False),
    "dominant": lambda: dominant_paths(simplified_net(8, residual=False)),
    "dominant, dense": lambda: dominant_paths(simplified_net(8, residual=False), lower="dense"),
    "with dropout": lambda: unskip.plainify(cifar_resnet(8, drop_rate=0.3, drop_path_rate=0.3), "pnnh"),
}


QUICK = {
    ("plain", "dense"), ("pnnh", "dense"), ("pnnh", "fast"), ("seq, tied", "dense"), ("dirac", "dense"),
    ("iso", "dense"), ("looks_linear", "dense"), ("wrn, pnnh", "fast"), ("wrn, plain", "dense"),
    ("dominant, dense", "dense"),
}  # fmt: skip
CASES = [
    pytest.param(name, form, marks=[] if (name, form) in QUICK else [pytest.mark.full])
    for name in CNNS
    for form in ("dense", "fast")
    if form == "dense" or "pnnh" in name
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_folded_cnn_is_the_same_function_of_layers_and_activations(name: str, form: str) -> None:
    network = trained(CNNS[name]())
    folded = unskip.fold(network, form)
    double, folded_double = copy.deepcopy(network).double(), unskip.fold(copy.deepcopy(network).double(), form)
    for height, width in ((17, 16), (20, 13)):  # odd and even, of which fold has seen neither
        x = torch.randn(2, 3, height, width)
        assert error(double, folded_double, x.double()) <= 1e-9
        assert error(network, folded, x) <= 1e-4
        assert error(folded, torch.fx.symbolic_trace(folded), x) == 0
    assert next(folded.parameters()).dtype == torch.float32
    assert folded.folding.exact <= 1e-9
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in folded.modules())
    if form == "dense":
        assert functions(folded, torch.randn(2, 3, 16, 16)) <= GRAPH


@pytest.mark.parametrize("name", ["plainnet_mlp", "seqnet_mlp"])
def test_a_folded_mlp_is_linear_layers_and_activations(name: str) -> None:
    options = {"depth": 8, "width": 20}
    if name == "seqnet_mlp":
        options |= {"tie": "conv2", "pre_relu": "norm"}
    else:
        options |= {"activation": "prelu"}
    network = trained(unskip.create_model(name, **options)).double()
    folded = unskip.fold(network)
    x = torch.randn(4, 1, 16, 16, dtype=torch.float64)
    assert error(network, folded, x) <= 1e-9
    assert functions(folded, x) <= GRAPH


def vit(**options: object) -> nn.Module:
    network = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10, embed_dim=48, depth=3, num_heads=3)
    return unskip.plainify(network, **options)


def swin(**options: object) -> nn.Module:
    widths = {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2), "window_size": 4}
    network = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, num_classes=10, **widths)
    return unskip.plainify(network, **options)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (vit, {"method": "pnnh", "pretext": "group_average"}),
        (vit, {"method": "pnnh", "pretext": "random"}),
        (vit, {"method": "looks_linear"}),
        (swin, {"method": "pnnh", "pretext": "group_average"}),
        (swin, {"method": "dirac"}),
    ],
)
@pytest.mark.parametrize("form", ["dense", "fast"])
def test_in_a_transformer_learner_and_coder_are_stacked_and_the_rest_stays(
    build: Callable[..., nn.Module], options: dict, form: str
) -> None:
    network = trained(build(**options)).double()
    folded = unskip.fold(network, form)
    assert error(network, folded, torch.randn(2, 3, 32, 32, dtype=torch.float64)) <= 1e-9

    def count(kind: type[nn.Module], of: nn.Module) -> int:
        return sum(isinstance(module, kind) for module in of.modules())

    assert count(nn.LayerNorm, folded) == count(nn.LayerNorm, network) > 0
    closed = options.get("pretext") == "group_average" and form == "fast"
    assert count(PNNHBlock, folded) == (count(PNNHBlock, network) if closed else 0)


def test_fast_fills_the_hidden_channels_of_stacked_inverted_bottlenecks_up_to_a_multiple_of_8() -> None:
    network = trained(mobilenet("pnnh"))
    fast, dense = unskip.fold(network, "fast"), unskip.fold(network, "dense")
    filled = 0
    for path, block in fast.named_modules():
        if type(block) is not JoinedSequential:  # that of a learner has a class of its own
            continue
        first, middle, last = (module for module in block if isinstance(module, nn.Conv2d))
        before = [module for module in dense.get_submodule(path) if isinstance(module, nn.Conv2d)]
        width = before[1].groups
        assert middle.groups == first.out_channels == last.in_channels == width + -width % 8
        assert torch.equal(first.weight[:width], before[0].weight)
        for spare in (first.weight[width:], first.bias[width:], middle.weight[width:], middle.bias[width:]):
            assert not spare.any()
        assert not last.weight[:, width:].any()
        filled += middle.groups > width
    assert filled == 3


def test_fast_keeps_a_closed_form_as_sums_of_channels() -> None:
    network = trained(unskip.plainify(cifar_resnet(14), "pnnh"))
    folded = unskip.fold(network, "fast")
    blocks = [m for m in folded.modules() if isinstance(m, PNNHBlock)]
    assert [type(block.coder) for block in blocks] == [
        ClosedFormCoder, ClosedFormCoder, ClosedFormTransition, ClosedFormCoder, ClosedFormTransition, ClosedFormCoder,
    ]  # fmt: skip
    assert not list(folded.buffers())
    # A fitted coder is no cheap operation.
    fitted = unskip.fold(trained(unskip.plainify(cifar_resnet(8), "pnnh", pretext="random")), "fast")
    assert not any(isinstance(m, PNNHBlock) for m in fitted.modules())


class Behind(nn.Module):
    """BatchNorm behind an activation, before a convolution or, through a mean, before a classifier."""

    def __init__(self, padding: int = 0, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 6, 3, padding=padding, groups=groups, bias=groups > 1)
        self.norm2 = nn.BatchNorm2d(6, affine=groups > 1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.norm1(self.conv1(x).relu()))
        return self.fc(self.norm2(x.relu_()).mean((2, 3)))


@pytest.mark.parametrize("options", [{}, {"groups": 2}])
def test_a_norm_behind_an_activation_goes_into_the_layer_after_it(options: dict) -> None:
    network = trained(Behind(**options)).double()
    folded = unskip.fold(network)
    assert error(network, folded, torch.randn(2, 3, 9, 8, dtype=torch.float64)) <= 1e-12
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())


def test_a_norm_before_zero_padding_is_refused_with_its_path() -> None:
    with pytest.raises(
        ValueError, match=r"fold: 'norm1' \(BatchNorm2d\) reads the relu .* the conv2d of 'conv2' reads it"
    ):
        unskip.fold(trained(Behind(padding=1)))


class Twice(nn.Module):
    """A layer whose output is read by its norm and by somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return torch.cat([self.last(self.norm(x).relu()), x], 1)


def groups() -> nn.Module:
    network = cifar_resnet(8)
    network.bn1 = nn.GroupNorm(4, 16)
    return unskip.plainify(network, "plain").eval()


def residual_half() -> nn.Module:
    return unskip.plainify(cifar_resnet(8), "residual_half").eval()


def training() -> nn.Module:
    network = unskip.plainify(cifar_resnet(8), "plain").eval()
    network.layer2[0][1].train()
    return network


class Squeeze(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (training, r"fold: 'layer2\.0\.1' is in training mode"),
        (lambda: cifar_resnet(8).eval(), r"fold: 'layer1\.0' \(CifarBlock\) keeps its skip connection"),
        (lambda: timm.create_model("resnet18").eval(), r"fold: 'layer1\.0' \(BasicBlock\) keeps its skip"),
        (lambda: timm.create_model("vit_tiny_patch16_224").eval(), r"fold: 'blocks\.0' \(Block\) keeps its skip"),
        (lambda: simplified_net(8, residual=True).eval(), r"'layer1\.0' .*keeps .* unskip\.models\.to_plain"),
        (residual_half, r"fold: 'layer1\.0' \(ResidualHalfBlock\) keeps its skip connection"),
        (groups, r"fold: 'bn1' \(GroupNorm\) depends on its input"),
        (lambda: trained(Twice()), r"fold: 'norm' \(BatchNorm2d\) reads the conv2d of 'conv'"),
        (lambda: Squeeze(nn.Conv2d(3, 3, 1)).eval(), r"fold: 'Squeeze' .* calls 'mul'"),
        (lambda: nn.Conv2d(3, 3, 1, device="meta").eval(), "the network is on the meta device"),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1).double()).eval(), "are of several kinds"),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 99)).eval(), "give it as example="),
        (lambda: "resnet20", "model='resnet20' is not an nn.Module"),
    ],
)
def test_what_has_no_exact_form_is_refused_with_a_sentence(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unskip.fold(build())


@pytest.mark.parametrize("form", ["dense", "fast"])
def test_a_fast_form_can_be_folded_again(form: str) -> None:
    network = trained(unskip.plainify(cifar_resnet(8), "pnnh")).double()
    again = unskip.fold(unskip.fold(network, "fast"), form)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert error(network, again, x) <= 1e-9
    assert any(isinstance(m, PNNHBlock) for m in again.modules()) == (form == "fast")


def test_fast_has_no_matrices_of_a_network_that_computes_with_them() -> None:
    network = trained(unskip.plainify(cifar_resnet(8), "pnnh", block="plain")).double()
    folded = unskip.fold(network, "fast")
    assert list(network.buffers())
    assert not list(folded.buffers())
    assert error(network, folded, torch.randn(2, 3, 16, 16, dtype=torch.float64)) <= 1e-9


class Gained(nn.Conv2d):
    """A layer of another package: a convolution with a gain for each output channel, W' = g W."""

    def __init__(self, *args: int, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.gain = nn.Parameter(torch.rand(self.out_channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.gain.view(-1, 1, 1, 1), self.bias)

    def to_ordinary(self) -> nn.Conv2d:
        made = nn.Conv2d(self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding,
                         bias=self.bias is not None).to(self.weight)  # fmt: skip
        made.load_state_dict({**self.state_dict(), "weight": self.weight * self.gain.view(-1, 1, 1, 1)}, strict=False)
        return made


class Pair(nn.Module):
    """A block of another package: a sum of two convolutions, which is one. It is faster than that if asked."""

    def __init__(self, one: nn.Conv2d, two: nn.Conv2d, fast: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.fast = one, two, fast

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)

    def to_ordinary(self) -> nn.Module:
        made = copy.deepcopy(self.one)
        made.weight.data += self.two.weight.data
        return made

    def to_fast(self) -> nn.Module | None:
        return self if self.fast else None


def test_a_layer_of_another_package_folds() -> None:
    """By itself with a norm behind it, and inside of a PNNH block, where learner and coder become one layer."""
    network = unskip.plainify(cifar_resnet(8), "pnnh")
    network.conv1 = Gained(3, 16, 3, padding=1, bias=False)
    network.layer1[0].learner.conv1 = Gained(16, 8, 3, padding=1, bias=False)
    network = trained(network).double()
    for form in ("dense", "fast"):
        folded = unskip.fold(network, form)
        assert error(network, folded, torch.randn(2, 3, 16, 16, dtype=torch.float64)) <= 1e-9
        assert not any(isinstance(m, Gained | nn.BatchNorm2d) for m in folded.modules())


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_a_block_of_another_package_may_stay_in_form_fast(fast: bool, normed: bool) -> None:
    """But where a norm reads its sum, which has no other layer to go to."""
    pair = Pair(*(nn.Conv2d(3, 4, 3, bias=False) for _ in range(2)), fast=fast)
    network = nn.Sequential(pair, nn.BatchNorm2d(4) if normed else nn.Identity(), nn.ReLU(), nn.Conv2d(4, 4, 3))
    network = trained(network).double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for form in ("dense", "fast"):
        folded = unskip.fold(network, form)
        assert error(network, folded, x) <= 1e-9
        assert isinstance(folded[0], Pair) == (form == "fast" and fast and not normed)


def test_a_wrong_form_and_a_wrong_example_get_a_sentence() -> None:
    network = unskip.plainify(cifar_resnet(8), "plain").eval()
    with pytest.raises(ValueError, match="form='sparse' must be 'dense' or 'fast'"):
        unskip.fold(network, "sparse")
    with pytest.raises(ValueError, match="example='x' must be a batch"):
        unskip.fold(network, example="x")
    with pytest.raises(ValueError, match="fold: example=a ndarray must be a batch"):
        unskip.fold(network, example=torch.randn(2, 3, 8, 8).numpy())
    with pytest.raises(ValueError, match=r"fold: CifarResNet can't run on an example of shape \(2, 1, 8, 8\): "):
        unskip.fold(network, example=torch.randn(2, 1, 8, 8))
    with pytest.raises(ValueError, match="example has numbers that are not finite"):
        unskip.fold(network, example=torch.full((2, 3, 8, 8), float("nan")))
    network.fc.bias.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="the output is not finite"):
        unskip.fold(network)


@pytest.mark.parametrize("form", ["dense", "fast"])
@pytest.mark.parametrize("name", ["pnnh_resnet20", "plain_resnet20", "seqnet_mlp"])
def test_a_folded_network_trains_on_with_all_of_its_weights(name: str, form: str) -> None:
    folded = unskip.fold(trained(unskip.create_model(name)), form)
    assert [path for path, parameter in folded.named_parameters() if not parameter.requires_grad] == []


def test_frozen_layers_stay_frozen_when_they_absorb_a_norm() -> None:
    network = trained(unskip.create_model("plain_resnet20"))
    network.conv1.requires_grad_(False)
    folded = unskip.fold(network)
    assert {path for path, p in folded.named_parameters() if not p.requires_grad} == {"conv1.weight", "conv1.bias"}


def test_the_network_itself_stays_as_it_was() -> None:
    network = trained(unskip.plainify(cifar_resnet(8), "pnnh"))
    state = copy.deepcopy(network.state_dict())
    x = torch.randn(2, 3, 16, 16)
    before = network(x)
    unskip.fold(network, example=x)
    assert torch.equal(network(x), before)
    assert list(network.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_a_block_that_stands_in_two_places_is_folded_in_both() -> None:
    network = unskip.plainify(cifar_resnet(14), "pnnh")
    network.layer3[1] = network.layer3[1]
    network.layer3.append(network.layer3[1])
    folded = unskip.fold(trained(network).double())
    assert folded.layer3[1] is folded.layer3[2]
    assert error(network, folded, torch.randn(2, 3, 16, 16, dtype=torch.float64)) <= 1e-9


@pytest.mark.parametrize("method", ["plain", "pnnh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fold_in_half_precision_comes_back_in_half_precision(method: str, dtype: torch.dtype) -> None:
    network = trained(unskip.plainify(cifar_resnet(8), method)).to(dtype)
    folded = unskip.fold(network)
    assert {p.dtype for p in folded.parameters()} == {dtype}
    assert folded.folding.exact <= 1e-9
    assert folded.folding.exact <= 1e-9


@pytest.mark.full
@pytest.mark.parametrize("name", ENTRIES)
def test_every_name_is_folded_or_refused_for_its_skips(name: str) -> None:
    """fold itself has compared the two by `verify`; its errors are what we ask for."""
    entry = ENTRIES[name]
    options = {"img_size": 64} if entry.family == "swin" else {"img_size": 32} if entry.family == "vit" else {}
    torch.manual_seed(0)
    network = trained(unskip.create_model(name, **options))
    if skips_left(network) == "all" or "block" in skips_left(network):
        with pytest.raises(ValueError, match=r"fold: '\S+' .*keeps its skip connection"):
            unskip.fold(network)
        return
    side = 8 if entry.input_size[-1] == 32 else 32
    small = entry.feature_maps and entry.family not in ("swin", "vit")
    folding = unskip.fold(network, example=torch.randn(1, 3, side + 1, side) if small else None).folding
    assert folding.exact <= 1e-9
    assert folding.check.worst("float32") <= 1e-4


def test_a_pruned_network_is_named() -> None:
    """A pruned weight is made by a hook, and after training it belongs to a graph."""
    network = unskip.plainify(cifar_resnet(8), "pnnh")
    prune.l1_unstructured(network.fc, "weight", 0.5)
    network(torch.randn(2, 3, 8, 8)).sum().backward()
    with pytest.raises(ValueError, match=r"^fold: 'fc' \(Linear\) has a forward hook.*torch\.nn\.utils\.prune\.remove"):
        unskip.fold(network.eval())
    prune.remove(network.fc, "weight")
    assert unskip.fold(network).folding.exact < 1e-9
