"""The networks that the verdict is set on (TUNE) and scored on (SCORE, SECOND), with fates guessed before training.

All read digits of 1 x 8 x 8 and return 10 logits. README.md has the same lists as prose.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import timm
import torch
from timm.models.mlp_mixer import MixerBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

import unskip
from unskip.models.cifar import cifar_resnet, wide_resnet

Guess = Literal["trains", "fails"]
Init = Literal["torch", "normal", "orthogonal", "tied"]
HE = math.sqrt(2)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A network of the lists."""

    name: str
    guess: Guess  # its fate, guessed before anything was trained
    build: Callable[[], nn.Module]
    optimizer: str = "sgd"
    rates: tuple[float, ...] = (0.05, 0.01, 0.002)  # learning rates, tried in this order
    limit: float = 20.0  # percent test error below which it trains


def initialise(layer: nn.Linear | nn.Conv2d, init: Init, gain: float) -> None:
    """normal: N(0, gain^2 / fan_in). orthogonal: of that gain, in a convolution at the kernel's centre only."""
    if init == "torch":
        return
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias.zero_()
        if init == "normal":
            layer.weight.normal_(0, gain / math.sqrt(layer.weight[0].numel()))
        elif isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain)
        else:
            layer.weight.zero_()
            centre = torch.empty(layer.weight.shape[:2])
            layer.weight[:, :, layer.kernel_size[0] // 2, layer.kernel_size[1] // 2] = nn.init.orthogonal_(centre, gain)


class Residual(nn.Sequential):
    """x + f(x)."""

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


def mlp(
    depth: int,  # hidden layers
    act: Callable[[], nn.Module] = nn.ReLU,
    *,
    norm: Callable[[int], nn.Module] | None = None,
    init: Init = "normal",
    gain: float = HE,
    residual: bool = False,  # x + layer(act(norm(x)))
    width: int = 64,
) -> nn.Module:
    """Hidden layers of one width: linear, norm, activation. `tied` makes pairs y = norm(Wᵀ act(W x)), as SeqNet's."""
    layers: list[nn.Module] = [nn.Flatten()]
    if init == "tied":
        for _ in range(depth // 2):
            up, down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
            nn.init.normal_(up.weight, 0, math.sqrt(2 / (2 * width)))
            down.weight.data.copy_(up.weight.T)
            layers += [up, act(), down, *([norm(width)] if norm else [])]
        return nn.Sequential(*layers, nn.Linear(width, 10))
    for _ in range(depth):
        linear = nn.Linear(width, width)
        initialise(linear, init, gain)
        if residual:
            layers.append(Residual(*([norm(width)] if norm else []), act(), linear))
        else:
            layers += [linear, *([norm(width)] if norm else []), act()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def conv(
    depth: int,
    act: Callable[[], nn.Module] = nn.ReLU,
    *,
    norm: Callable[[int], nn.Module] | None = None,
    init: Init = "normal",
    gain: float = HE,
    width: int = 24,
) -> nn.Module:
    """3 x 3 convolutions of one width on 8 x 8 px, then 4 x 4 px in the second half; no skip connections."""
    layers: list[nn.Module] = []
    for i in range(depth):
        layer = nn.Conv2d(width if i else 1, width, 3, stride=2 if i == depth // 2 else 1, padding=1)
        initialise(layer, init if i else "normal", gain)
        layers += [layer, *([norm(width)] if norm else []), act()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class SkiplessBlock(Block):
    """timm's transformer block with both of its skip connections cut."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.mlp(self.norm2(self.attn(self.norm1(x))))


class SkiplessMixerBlock(MixerBlock):
    """timm's mixer block with both of its skip connections cut."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return self.mlp_channels(self.norm2(x))


def vit(depth: int, width: int = 48, std: float | None = None, **options: Any) -> nn.Module:
    """timm's vision transformer on 16 patches of 2 x 2 px. `std`: of every linear layer's weights."""
    network = timm.models.VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=width, depth=depth, num_heads=4, **options
    )
    for module in network.modules():
        if std is not None and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, std)
    return network


def mixer(depth: int, **options: Any) -> nn.Module:
    return timm.models.MlpMixer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=48, num_blocks=depth, **options
    )


def resnet(depth: int, method: str | None = None, **options: Any) -> nn.Module:
    """He's CIFAR ResNet on one grey channel, skip-free by `method`."""
    network = cifar_resnet(depth, in_chans=1)
    return network if method is None else unskip.plainify(network, method, **options)


def wrn(depth: int, method: str | None = None, **options: Any) -> nn.Module:
    """WRN-depth-1: pre-activation blocks."""
    network = wide_resnet(depth, 1, in_chans=1)
    return network if method is None else unskip.plainify(network, method, **options)


def with_skips(network: nn.Module, unit: int) -> nn.Module:
    """The same layers with a skip around every two units (weight, norm, activation): y = act(x + unit(unit(x))).

    `unit` is the number of modules in a unit. Pairs whose input and output differ in shape stay as they are.
    """
    assert isinstance(network, nn.Sequential)
    start = next(i for i, module in enumerate(network) if isinstance(module, nn.Linear | nn.Conv2d))
    parts, end = list(network), len(network) - 1  # before the classifier
    layers = parts[:start]
    while start + 2 * unit <= end:
        pair, weights = parts[start : start + 2 * unit], [parts[start], parts[start + unit]]
        if not all(isinstance(weight, nn.Linear | nn.Conv2d) for weight in weights):
            break
        shapes = {(weight.weight.shape, getattr(weight, "stride", (1,))[0]) for weight in weights}
        if len(shapes) == 1 and weights[0].weight.shape[0] == weights[0].weight.shape[1]:
            layers += [Residual(*pair[:-1]), pair[-1]]
            start += 2 * unit
        else:
            layers += parts[start : start + unit]
            start += unit
    return nn.Sequential(*layers, *parts[start:])


def leaky(slope: float) -> Callable[[], nn.Module]:
    return lambda: nn.LeakyReLU(slope)


def _candidates(*rows: tuple[str, Guess, Callable[[], nn.Module]]) -> dict[str, Candidate]:
    return {name: Candidate(name=name, guess=guess, build=build) for name, guess, build in rows}


TUNE = _candidates(
    ("mlp4 relu torch", "trains", lambda: mlp(4, init="torch")),
    ("mlp20 relu torch", "fails", lambda: mlp(20, init="torch")),
    ("mlp30 relu he", "trains", lambda: mlp(30)),
    ("mlp100 relu he", "fails", lambda: mlp(100)),
    ("mlp40 relu gain 2.4", "fails", lambda: mlp(40, gain=2.4)),
    ("mlp10 tanh torch", "trains", lambda: mlp(10, nn.Tanh, init="torch")),
    ("mlp40 tanh gain 0.7", "fails", lambda: mlp(40, nn.Tanh, gain=0.7)),
    ("mlp40 tanh orthogonal", "trains", lambda: mlp(40, nn.Tanh, init="orthogonal", gain=1)),
    ("mlp40 tanh gain 4", "fails", lambda: mlp(40, nn.Tanh, gain=4)),
    ("mlp12 sigmoid gain 1", "fails", lambda: mlp(12, nn.Sigmoid, gain=1)),
    ("mlp30 gelu torch", "fails", lambda: mlp(30, nn.GELU, init="torch")),
    ("mlp100 selu lecun", "trains", lambda: mlp(100, nn.SELU, gain=1)),
    ("mlp16 relu batchnorm", "trains", lambda: mlp(16, norm=nn.BatchNorm1d)),
    ("mlp60 relu batchnorm", "fails", lambda: mlp(60, norm=nn.BatchNorm1d)),
    ("mlp60 leaky 0.3 batchnorm", "trains", lambda: mlp(60, leaky(0.3), norm=nn.BatchNorm1d)),
    ("mlp60 tanh batchnorm", "trains", lambda: mlp(60, nn.Tanh, norm=nn.BatchNorm1d, gain=1)),
    ("mlp60 relu layernorm", "fails", lambda: mlp(60, norm=nn.LayerNorm)),
    ("mlp60 relu layernorm residual", "trains", lambda: mlp(60, norm=nn.LayerNorm, residual=True)),
    ("mlp60 seqnet", "trains", lambda: mlp(60, init="tied", norm=nn.BatchNorm1d)),
    ("resnet20", "trains", lambda: resnet(20)),
    ("resnet56", "trains", lambda: resnet(56)),
    ("plain20", "trains", lambda: resnet(20, "plain")),
    ("plain32", "fails", lambda: resnet(32, "plain")),
    ("plain56", "fails", lambda: resnet(56, "plain")),
    ("plain110", "fails", lambda: resnet(110, "plain")),
    ("pnnh20", "trains", lambda: resnet(20, "pnnh")),
    ("pnnh110", "trains", lambda: resnet(110, "pnnh")),
    ("conv40 relu he", "fails", lambda: conv(40)),
    ("conv40 tanh delta-orthogonal", "trains", lambda: conv(40, nn.Tanh, init="orthogonal", gain=1)),
    ("vit6", "trains", lambda: vit(6)),
    ("vit16", "trains", lambda: vit(16)),
    ("vit12 without skips", "fails", lambda: vit(12, block_fn=SkiplessBlock)),
    ("vit12 std 0.5", "fails", lambda: vit(12, std=0.5)),
    ("vit8 pnnh", "trains", lambda: unskip.plainify(vit(8), "pnnh")),
)

SCORE = _candidates(
    ("mlp24 elu torch", "fails", lambda: mlp(24, nn.ELU, init="torch")),
    ("mlp80 hardtanh orthogonal", "trains", lambda: mlp(80, nn.Hardtanh, init="orthogonal", gain=1)),
    ("mlp30 silu layernorm", "fails", lambda: mlp(30, nn.SiLU, norm=nn.LayerNorm)),
    ("mlp36 sigmoid batchnorm", "fails", lambda: mlp(36, nn.Sigmoid, norm=nn.BatchNorm1d, gain=1)),
    ("mlp200 gelu layernorm residual", "trains", lambda: mlp(200, nn.GELU, norm=nn.LayerNorm, residual=True, width=64)),
    ("wrn16", "trains", lambda: wrn(16)),
    ("wrn40 plain", "fails", lambda: wrn(40, "plain")),
    ("wrn28 pnnh", "trains", lambda: wrn(28, "pnnh")),
    ("conv50 leaky 0.2 batchnorm", "fails", lambda: conv(50, leaky(0.2), norm=nn.BatchNorm2d)),
    ("vit18 layer scale", "trains", lambda: vit(18, 32, init_values=1e-3)),
    ("mixer12 without skips", "fails", lambda: mixer(12, block_layer=SkiplessMixerBlock)),
    ("seqnet44", "trains", lambda: resnet(44, "seq")),
)

# Added after the rules were committed and before any of these was trained or measured: 10 of the 12 networks in SCORE
# train, so a verdict that always says "trains" would have scored 10.
SECOND = _candidates(
    ("mlp50 mish he", "fails", lambda: mlp(50, nn.Mish)),
    ("mlp24 tanh xavier", "trains", lambda: mlp(24, nn.Tanh, gain=1)),
    ("mlp40 elu batchnorm", "trains", lambda: mlp(40, nn.ELU, norm=nn.BatchNorm1d)),
    ("mlp15 softplus torch", "fails", lambda: mlp(15, nn.Softplus, init="torch")),
    ("mlp30 relu torch batchnorm", "trains", lambda: mlp(30, norm=nn.BatchNorm1d, init="torch")),
    ("mlp40 relu groupnorm", "fails", lambda: mlp(40, norm=lambda width: nn.GroupNorm(8, width))),
    ("mlp12 tanh gain 6", "fails", lambda: mlp(12, nn.Tanh, gain=6)),
    ("mlp30 leaky 0.1 orthogonal", "trains", lambda: mlp(30, leaky(0.1), init="orthogonal")),
    ("mlp80 relu residual, gain 0.3", "trains", lambda: mlp(80, gain=0.3, residual=True)),
    ("conv16 relu he", "fails", lambda: conv(16)),
    ("conv24 silu batchnorm", "trains", lambda: conv(24, nn.SiLU, norm=nn.BatchNorm2d)),
    ("conv12 gelu torch", "fails", lambda: conv(12, nn.GELU, init="torch")),
)

# Failing networks of the lists above and one that is deeper, each with one change that the doctor may propose.
ADAMW: dict[str, Any] = {"optimizer": "adamw", "rates": (3e-3, 1e-3, 3e-4)}
LOW: dict[str, Any] = {"rates": (1e-3, 1e-4, 1e-5)}
BN, BN2, LN = nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm


def _remedies() -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}

    def add(name: str, base: Callable[..., nn.Module], unit: int = 2, **changes: dict[str, Any]) -> None:
        """The network, and one for each change: other arguments for `base`, or what to train it with."""
        found[name] = Candidate(name=name, guess="fails", build=base)
        found[f"{name} + adamw"] = Candidate(name=f"{name} + adamw", guess="trains", build=base, **ADAMW)
        skips = partial(_skipped, base, unit)
        found[f"{name} + skips"] = Candidate(name=f"{name} + skips", guess="trains", build=skips)
        for change, arguments in changes.items():
            if change == "skips_batchnorm":  # a norm in the units that the skips go around
                normed = partial(_skipped, partial(base, **arguments), unit + 1)
                found[f"{name} + skips, batchnorm"] = Candidate(
                    name=f"{name} + skips, batchnorm", guess="trains", build=normed
                )
                continue
            with_change = base if "rates" in arguments else partial(base, **arguments)
            training = arguments if "rates" in arguments else {}
            label = f"{name} + {change.replace('_', ' ')}"
            found[label] = Candidate(name=label, guess="trains", build=with_change, **training)

    norms, norms2 = ({"batchnorm": {"norm": norm}, "skips_batchnorm": {"norm": norm}} for norm in (BN, BN2))
    he: dict[str, Any] = {"init": "normal", "gain": HE}
    orthogonal: dict[str, Any] = {"init": "orthogonal", "gain": 1}
    leaky_he: dict[str, Any] = {"act": leaky(0.3), "gain": math.sqrt(2 / 1.09)}
    # vanishing gradient
    default: dict[str, Any] = {"init": "torch"}
    add("mlp20 relu torch", partial(mlp, 20, **default), he=he, **norms, layernorm={"norm": LN},
        he_batchnorm={**he, "norm": BN})  # fmt: skip
    add("mlp12 sigmoid gain 1", partial(mlp, 12, act=nn.Sigmoid, gain=1), gain_4={"gain": 4}, **norms,
        relu_he={**he, "act": nn.ReLU})  # fmt: skip
    add(
        "mlp40 tanh gain 0.7",
        partial(mlp, 40, act=nn.Tanh, gain=0.7),
        orthogonal=orthogonal,
        skips_batchnorm={"norm": BN},
        batchnorm={"norm": BN},
    )
    add("mlp30 gelu torch", partial(mlp, 30, act=nn.GELU, **default), he=he, **norms,
        layernorm={"norm": LN})  # fmt: skip
    add(
        "conv12 gelu torch",
        partial(conv, 12, act=nn.GELU, **default),
        he=he,
        skips_batchnorm={"norm": BN2},
        batchnorm={"norm": BN2},
    )
    add("conv60 relu torch", partial(conv, 60, **default), he=he, **norms2,
        leaky_batchnorm={**leaky_he, "init": "normal", "norm": BN2})  # fmt: skip
    found["vit6 + adamw"] = Candidate(name="vit6 + adamw", guess="trains", build=lambda: vit(6), **ADAMW)
    # singularity
    add("mlp100 relu he", partial(mlp, 100), **norms, layernorm={"norm": LN}, leaky=leaky_he,
        orthogonal={"init": "orthogonal", "gain": HE}, tied={"init": "tied"},
        tied_batchnorm={"init": "tied", "norm": BN}, leaky_batchnorm={**leaky_he, "norm": BN})  # fmt: skip
    add(
        "mlp30 relu he",
        partial(mlp, 30),
        skips_batchnorm={"norm": BN},
        batchnorm={"norm": BN},
        layernorm={"norm": LN},
        leaky=leaky_he,
    )
    add(
        "mlp10 tanh torch",
        partial(mlp, 10, act=nn.Tanh, **default),
        orthogonal=orthogonal,
        skips_batchnorm={"norm": BN},
        batchnorm={"norm": BN},
    )
    add("conv40 relu he", partial(conv, 40), **norms2, leaky=leaky_he,
        leaky_batchnorm={**leaky_he, "norm": BN2})  # fmt: skip
    # dissipating
    add("mlp60 relu batchnorm", partial(mlp, 60, norm=BN), 3, layernorm={"norm": LN}, tied={"init": "tied"},
        leaky={"act": leaky(0.3)})  # fmt: skip
    add("mlp60 tanh batchnorm", partial(mlp, 60, act=nn.Tanh, norm=BN, gain=1), 3,
        orthogonal_no_norm={**orthogonal, "norm": None}, layernorm={"norm": LN})  # fmt: skip
    for method in ("pnnh", "seq", "iso"):
        name = f"plain56 + {method}"
        found[name] = Candidate(name=name, guess="trains", build=partial(resnet, 56, method))
    found["plain56 + adamw"] = Candidate(
        name="plain56 + adamw", guess="trains", build=lambda: resnet(56, "plain"), **ADAMW
    )
    # exploding gradient
    add(
        "mlp40 relu gain 2.4",
        partial(mlp, 40, gain=2.4),
        he=he,
        skips_batchnorm={"norm": BN},
        batchnorm={"norm": BN},
        low_rate=LOW,
    )
    add("mlp100 selu lecun", partial(mlp, 100, act=nn.SELU, gain=1), **norms, orthogonal=orthogonal,
        low_rate=LOW)  # fmt: skip
    add("mlp30 relu torch batchnorm", partial(mlp, 30, norm=BN, **default), 3, he=he, low_rate=LOW,
        tied={"init": "tied"})  # fmt: skip
    # saturation
    add("mlp40 tanh gain 4", partial(mlp, 40, act=nn.Tanh, gain=4), orthogonal=orthogonal, gain_1={"gain": 1},
        **norms)  # fmt: skip
    add("mlp12 tanh gain 6", partial(mlp, 12, act=nn.Tanh, gain=6), orthogonal=orthogonal, gain_1={"gain": 1},
        **norms)  # fmt: skip
    return found


def _skipped(base: Callable[[], nn.Module], unit: int) -> nn.Module:
    return with_skips(base(), unit)


REMEDIES = _remedies()
VIT_ADAMW: dict[str, Any] = {"optimizer": "adamw", "rates": (1e-3,), "limit": 70.0}


def _transformers(*depths: int) -> dict[str, Candidate]:
    """ViTs with and without their skips, trained with AdamW: for the rule of tokens that become alike."""
    found = {}
    for depth in depths:
        found[f"vit{depth}"] = Candidate(name=f"vit{depth}", guess="trains", build=partial(vit, depth), **VIT_ADAMW)
        for method, attention in (
            ("plain", "plain"), ("plain", "cut"), ("pnnh", "espa"), ("pnnh", "shaped"), ("pnnh", "value_skipinit"),
        ):  # fmt: skip
            name = f"vit{depth} {attention}"
            guess: Guess = "trains" if attention in ("shaped", "value_skipinit") else "fails"
            build = partial(_skip_free, depth, method, attention)
            found[name] = Candidate(name=name, guess=guess, build=build, **VIT_ADAMW)
    return found


def _skip_free(depth: int, method: str, attention: str) -> nn.Module:
    return unskip.plainify(vit(depth), method, attention=attention)


LISTS = {
    "tune": TUNE,
    "score": SCORE,
    "second": SECOND,
    "remedies": REMEDIES,
    "vit-tune": _transformers(4),
    "vit-score": _transformers(8),
}
