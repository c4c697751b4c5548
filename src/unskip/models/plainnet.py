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

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from unskip.methods.registry import check_number
from unskip.models.named import CIFAR
from unskip.models.registry import register_network
from unskip.models.staged import StagedNet, check_count

Activation = Literal["lrelu", "prelu", "relu"]
Init = Literal["he", "glorot", "uniform", "orthogonal"]

SLOPE = 0.3  # of LReLU (VI.C.2)
UNIFORM = 0.05  # half width of "uniform" in Fig. 9, which names no range; this one is customary

# Table A1: filters and kernel of each convolution; a stage ends where a max-pooling stands.
STAGE_1 = ((16, 3), (16, 1), (16, 3), (32, 1), *4 * ((16, 1), (16, 3), (32, 1)), (48, 1))  # 32 x 32
STAGE_2 = ((48, 1), (64, 3), (64, 1), *5 * ((48, 1), (48, 3), (64, 1)), (80, 3))  # 16 x 16
STAGE_3 = (*4 * ((80, 1), (80, 3), (96, 1)), (96, 3), (128, 3))  # 7 x 7
TABLE_A1 = (STAGE_1, STAGE_2, STAGE_3)


class PlainNet(StagedNet):
    """Stages of layers one after the other, a mean over what is left of the image, and a linear classifier."""

    skip_free = True

    def __init__(
        self,
        stages: Sequence[Sequence[nn.Module]],
        *,
        num_features: int,  # width of the last layer
        num_classes: int,
        in_chans: int,
        drop_rate: float,  # dropout before the classifier
        global_pool: str = "avg",  # '' for unpooled features, without a classifier
        image_shape: tuple[int, int, int] | None = None,  # (C, H, W), where only one will do
        feature_info: list[dict[str, Any]] | None = None,  # timm's: width, reduction and path of each stage
    ) -> None:
        super().__init__()
        self.num_features, self.in_chans = num_features, in_chans
        self.drop_rate, self.image_shape = drop_rate, image_shape
        self.feature_info = feature_info or []
        self.stage_names = tuple(f"stage{i}" for i in range(1, len(stages) + 1))
        for name, layers in zip(self.stage_names, stages, strict=True):
            self.add_module(name, nn.Sequential(*layers))
        self.reset_classifier(num_classes, global_pool)

    def stem(self, x: Tensor) -> Tensor:
        return x if self.image_shape is None else shaped(x, self.image_shape, type(self).__name__)

    def pool(self, x: Tensor) -> Tensor:
        return averaged(x)


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
    transform: nn.Linear | nn.Conv2d,
    *,
    norm: bool = True,
    activation: Activation = "lrelu",
    slope: float = SLOPE,
    first: nn.Module | None = None,
) -> nn.Sequential:
    """One hidden layer, H = f(BN(W H)) of Eq. (2), after `first` (pooling, flattening) where there is one.

    PReLU learns a slope for each unit and starts at `slope`.
    """
    units = len(transform.weight)
    named = OrderedDict[str, nn.Module]() if first is None else OrderedDict(first=first)
    named["transform"] = transform
    if norm:
        named["norm"] = nn.BatchNorm1d(units) if isinstance(transform, nn.Linear) else nn.BatchNorm2d(units)
    if activation == "prelu":
        named["act"] = nn.PReLU(units, init=slope)
    else:
        named["act"] = nn.ReLU(inplace=True) if activation == "relu" else nn.LeakyReLU(slope, inplace=True)
    return nn.Sequential(named)


@torch.no_grad()
def initialise(model: nn.Module, init: Init, a: float) -> None:
    """Weights of linear layers and convolutions; biases 0. With n incoming and m outgoing connections:

        he           uniform, variance 2 / ((1 + a^2) n)          He et al. 2015, Eq. 15
        glorot       uniform, variance 2 / (n + m)
        uniform      uniform in +-0.05
        orthogonal   orthogonal rows or columns, times sqrt(2 / (1 + a^2))
    """  # fmt: skip
    draw: dict[Init, Callable[[Tensor], Tensor]] = {
        "he": partial(nn.init.kaiming_uniform_, a=a, nonlinearity="leaky_relu"),
        "glorot": nn.init.xavier_uniform_,
        "uniform": partial(nn.init.uniform_, a=-UNIFORM, b=UNIFORM),
        "orthogonal": partial(nn.init.orthogonal_, gain=nn.init.calculate_gain("leaky_relu", a)),
    }
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            draw[init](module.weight)
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
        linear, first = nn.Linear(width if i else math.prod(shape), width), None if i else nn.Flatten()
        layers.append(layer(linear, norm=norm, activation=activation, slope=slope, first=first))
    sizes: dict[str, Any] = {"num_features": width, "num_classes": num_classes, "in_chans": in_chans}
    model = PlainNet([layers], **sizes, drop_rate=drop_rate, image_shape=shape)
    initialise(model, init, 0.0 if activation == "relu" else slope)
    return model


def plainnet50(
    *,
    in_chans: int = 3,
    num_classes: int = 10,
    norm: bool = True,  # BatchNorm
    activation: Activation = "lrelu",
    slope: float = SLOPE,  # of LReLU; PReLU's first
    init: Init = "he",
    drop_rate: float = 0.0,
    global_pool: str = "avg",
) -> nn.Module:
    """The 50-layer convolutional PlainNet for CIFAR-10 (Table A1)."""
    _check("plainnet50", activation, slope, init, in_chans=in_chans)
    stages, feature_info = [], []
    chs = in_chans
    for i, (table, pool) in enumerate(zip(TABLE_A1, (None, nn.MaxPool2d(2, 2), nn.MaxPool2d(3, 2)), strict=True)):
        layers: list[nn.Module] = []
        for filters, kernel in table:
            conv = nn.Conv2d(chs, filters, kernel, padding=kernel // 2, bias=not norm)
            first = None if layers else pool
            layers.append(layer(conv, norm=norm, activation=activation, slope=slope, first=first))
            chs = filters
        stages.append(layers)
        feature_info.append({"num_chs": chs, "reduction": 2**i, "module": f"stage{i + 1}"})
    sizes: dict[str, Any] = {"num_features": chs, "num_classes": num_classes, "in_chans": in_chans}
    model = PlainNet(stages, **sizes, drop_rate=drop_rate, global_pool=global_pool, feature_info=feature_info)
    initialise(model, init, 0.0 if activation == "relu" else slope)
    return model


# Networks for USPS, the data set of Table II, that flatten their images.
USPS: dict[str, Any] = {
    "input_size": (1, 16, 16),
    "num_classes": 10,
    "mean": (0.2545,),
    "std": (0.3846,),
    "first_conv": "stage1.0.transform",
    "classifier": "fc",
    "feature_maps": False,
}
OPTIONS = ("norm", "activation", "slope", "init")
MLP_OPTIONS = ("depth", "width", "img_size", *OPTIONS)
register_network("plainnet_mlp", plainnet_mlp, family="plainnet_mlp", options=MLP_OPTIONS, **USPS)
CIFAR_PLAINNET = {**CIFAR, "pool_size": (7, 7), "first_conv": "stage1.0.transform"}
register_network("plainnet50", plainnet50, family="plainnet", paper_params=0.72, options=OPTIONS, **CIFAR_PLAINNET)
