"""PlainNet (Oyedotun et al. 2020): 100-layer MLPs and a 50-layer convolutional net of BatchNorm and leaky ReLU (0.3).

The third component of the paper, max-norm 3 on the incoming weights of every hidden unit, constrains training and not
the network: recipes say it (`max_norm`, `unskip.train.MaxNorm`).

What the paper leaves open, decided once:

- The depth of an MLP counts its hidden layers. Table I follows with 1,024 inputs, 20 classes, biases and BatchNorm (six
  of its seven counts to the digit; depth 50 has 4.768 M, printed as 4.78 M).
- Table A1 has no row for Conv_49. With 96 filters of 3 x 3 there the network has 50 convolutions and the printed 0.72 M
  parameters; without that row it has 0.64 M. Convolutions have no bias where a BatchNorm follows.
- BatchNorm stands before the non-linearity. "Initialized from a uniform distribution as in [28]" is He's variance for
  the slope in use, 2 / ((1 + a^2) n), drawn uniformly.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from timm.models import checkpoint_seq
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.methods.registry import check_number
from unskip.models.cifar import check_count
from unskip.models.named import CIFAR
from unskip.models.registry import network

default_cfgs: dict[str, dict[str, Any]] = {}

Activation = Literal["lrelu", "prelu", "relu"]
Init = Literal["he", "glorot", "uniform", "orthogonal"]

SLOPE = 0.3  # of LReLU (VI.C.2)
UNIFORM = 0.05  # half width of "uniform" in Fig. 9, which names no range; this one is customary

# Table A1: filters and kernel of each convolution; a stage ends where a max-pooling stands.
STAGE_1 = ((16, 3), (16, 1), (16, 3), (32, 1), *4 * ((16, 1), (16, 3), (32, 1)), (48, 1))  # 32 x 32
STAGE_2 = ((48, 1), (64, 3), (64, 1), *5 * ((48, 1), (48, 3), (64, 1)), (80, 3))  # 16 x 16
STAGE_3 = (*4 * ((80, 1), (80, 3), (96, 1)), (96, 3), (128, 3))  # 7 x 7
TABLE_A1 = (STAGE_1, STAGE_2, STAGE_3)


class PlainNet(nn.Module):
    """Stages of layers one after the other, a mean over what is left of the image, and a linear classifier."""

    skip_free = True

    def __init__(
        self,
        stages: Sequence[Sequence[nn.Module]],
        *,
        num_features: int,  # width of the last layer
        num_classes: int,
        drop_rate: float,  # dropout before the classifier
        image_shape: tuple[int, int, int] | None = None,  # (C, H, W), where only one will do
        feature_info: list[dict[str, Any]] | None = None,  # timm's: width, reduction and path of each stage
    ) -> None:
        super().__init__()
        self.num_features = self.head_hidden_size = num_features
        self.num_classes, self.drop_rate, self.image_shape = num_classes, drop_rate, image_shape
        self.feature_info = feature_info or []
        self.grad_checkpointing = False
        self.stage_names = [f"stage{i}" for i in range(1, len(stages) + 1)]
        for name, layers in zip(self.stage_names, stages, strict=True):
            self.add_module(name, nn.Sequential(*layers))
        self.fc = nn.Linear(num_features, num_classes) if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.fc

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool not in (None, "avg"):
            raise ValueError(f"PlainNet: global_pool={global_pool!r} must be 'avg', the only one there is.")
        self.num_classes = num_classes
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        if self.image_shape is not None:
            x = shaped(x, self.image_shape, type(self).__name__)
        for name in self.stage_names:
            stage = getattr(self, name)
            x = checkpoint_seq(stage, x) if self.grad_checkpointing and self.training else stage(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = averaged(x)
        if self.drop_rate:
            x = F.dropout(x, self.drop_rate, self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


# A symbolic trace (torch.fx) knows no shapes: these two are one node of it each.
torch.fx.wrap("averaged")
torch.fx.wrap("shaped")


def averaged(x: Tensor) -> Tensor:
    """Feature maps as their means; features of an MLP as they are."""
    return x.flatten(2).mean(2) if x.ndim > 2 else x


def shaped(x: Tensor, shape: tuple[int, ...], network: str) -> Tensor:
    """x, if its images have this shape."""
    if tuple(x.shape[1:]) != shape:
        raise ValueError(
            f"{network}: images of shape {tuple(x.shape[1:])} (C, H, W) came, but the network was built for {shape}. "
            "Build it with in_chans and img_size of your images."
        )
    return x


def layer(
    transform: nn.Module, units: int, norm: Callable[[int], nn.Module] | None, act: nn.Module, first: nn.Module | None
) -> nn.Sequential:
    """One hidden layer: H = f(BN(W H)) of Eq. (2), after `first` (pooling, flattening) where there is one."""
    named = OrderedDict[str, nn.Module]()
    if first is not None:
        named["first"] = first
    named["transform"] = transform
    if norm is not None:
        named["norm"] = norm(units)
    named["act"] = act
    return nn.Sequential(named)


def activation_of(name: Activation, slope: float, units: int) -> nn.Module:
    """f of Eq. (2). PReLU learns a slope for each unit and starts at `slope`."""
    if name == "prelu":
        return nn.PReLU(units, init=slope)
    return nn.ReLU(inplace=True) if name == "relu" else nn.LeakyReLU(slope, inplace=True)


@torch.no_grad()
def initialise(network: nn.Module, init: Init, a: float) -> None:
    """Weights of linear layers and convolutions; biases 0. With n incoming and m outgoing connections:

        he           uniform, variance 2 / ((1 + a^2) n)          He et al. 2015, Eq. 15
        glorot       uniform, variance 2 / (n + m)
        uniform      uniform in +-0.05
        orthogonal   orthogonal rows or columns, times sqrt(2 / (1 + a^2))
    """  # fmt: skip
    for module in network.modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        if init == "he":
            nn.init.kaiming_uniform_(module.weight, a=a, nonlinearity="leaky_relu")
        elif init == "glorot":
            nn.init.xavier_uniform_(module.weight)
        elif init == "uniform":
            nn.init.uniform_(module.weight, -UNIFORM, UNIFORM)
        else:
            nn.init.orthogonal_(module.weight, gain=nn.init.calculate_gain("leaky_relu", a))
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _check(name: str, activation: str, slope: float, init: str, **counts: int) -> None:
    for field, value, known in (("activation", activation, Activation), ("init", init, Init)):
        if value not in get_args(known):
            raise ValueError(f"{name}: {field}={value!r} must be one of {', '.join(map(repr, get_args(known)))}.")
    check_number(name, "slope", slope)
    if not 0 <= slope < 1:
        raise ValueError(f"{name}: slope={slope} must be at least 0 and below 1; 0 is a ReLU, the paper's is 0.3.")
    for field, count in counts.items():
        check_count(name, field, count)


# The data set of Table II, and what a network for it says of itself.
USPS: dict[str, Any] = {"input_size": (1, 16, 16), "num_classes": 10, "mean": (0.2545,), "std": (0.3846,)}


@network(
    family="plainnet_mlp",
    **USPS,
    first_conv="stage1.0.transform",
    classifier="fc",
    feature_maps=False,
    options=("depth", "width", "img_size", "norm", "activation", "slope", "init"),
)
def plainnet_mlp(
    *,
    depth: int = 100,  # hidden layers
    width: int = 300,  # units of a hidden layer (IV.B)
    img_size: int = 16,  # px of a side; the image is flattened
    in_chans: int = 1,
    num_classes: int = 10,
    norm: bool = True,  # BatchNorm
    activation: Activation = "lrelu",
    slope: float = SLOPE,  # of LReLU; PReLU's first
    init: Init = "he",
    drop_rate: float = 0.0,
) -> nn.Module:
    """The fully connected PlainNet (section VI)."""
    _check("plainnet_mlp", activation, slope, init, depth=depth, width=width, img_size=img_size, in_chans=in_chans)
    shape = (in_chans, img_size, img_size)
    layers = []
    for i in range(depth):
        units = width if i else in_chans * img_size**2
        first = None if i else nn.Flatten()
        act = activation_of(activation, slope, width)
        layers.append(layer(nn.Linear(units, width), width, nn.BatchNorm1d if norm else None, act, first))
    net = PlainNet([layers], num_features=width, num_classes=num_classes, drop_rate=drop_rate, image_shape=shape)
    initialise(net, init, 0.0 if activation == "relu" else slope)
    return net


@network(
    family="plainnet",
    paper=0.72,
    options=("norm", "activation", "slope", "init"),
    **{**CIFAR, "first_conv": "stage1.0.transform"},
)
def plainnet50(
    *,
    in_chans: int = 3,
    num_classes: int = 10,
    norm: bool = True,  # BatchNorm
    activation: Activation = "lrelu",
    slope: float = SLOPE,  # of LReLU; PReLU's first
    init: Init = "he",
    drop_rate: float = 0.0,
) -> nn.Module:
    """The 50-layer convolutional PlainNet for CIFAR-10 (Table A1)."""
    _check("plainnet50", activation, slope, init, in_chans=in_chans)
    pools = (None, nn.MaxPool2d(2, 2), nn.MaxPool2d(3, 2))
    stages, feature_info = [], []
    chs = in_chans
    for i, table in enumerate(TABLE_A1):
        layers: list[nn.Module] = []
        for filters, kernel in table:
            conv = nn.Conv2d(chs, filters, kernel, padding=kernel // 2, bias=not norm)
            act = activation_of(activation, slope, filters)
            first = None if layers else pools[i]
            layers.append(layer(conv, filters, nn.BatchNorm2d if norm else None, act, first))
            chs = filters
        stages.append(layers)
        feature_info.append({"num_chs": chs, "reduction": 2**i, "module": f"stage{i + 1}"})
    net = PlainNet(stages, num_features=chs, num_classes=num_classes, drop_rate=drop_rate, feature_info=feature_info)
    initialise(net, init, 0.0 if activation == "relu" else slope)
    return net
