"""Method `seq`: SeqNet's blocks, pairs of layers whose second starts as the transpose of the first.

Hu, github.com/hukkai/no-residual-network.

    y = B( M ⊛ σ(W ⊛ x) )       W: d -> k d,   M: k d -> d,   M = Wᵀ at initialisation (section 4.2)

SeqBasic is one such pair with k = 2: a 3x3 and a 1x1 convolution. SeqBottle has a second one with k = 4, both 1x1. Only
the centre of a kernel starts with weights, its other taps start at zero. A block ends in its norm: the ReLU that a
residual block has after the addition goes with the addition.

The layers have the paper's numbers, Conv1 to Conv4 (B.2). What it leaves open is decided in docs/seqnet.md.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._core.layers import layer_with
from unskip.coders import CoderBank
from unskip.methods.inits import Init, pair_weights, tall_weight
from unskip.methods.registry import BlockMethod, register_method
from unskip.methods.spec import NORMS, BlockSpec, Conv, Unsupported, centre_tap, conv_arguments, factory
from unskip.methods.widths import norm_like

Tie = Literal["none", "conv2", "conv4", "both"]
PreReLU = Literal["none", "bias", "norm"]
Position = Literal["first", "second", "third"]

K_SPATIAL = 2  # k of the pair that holds the 3x3 convolution
K_POINTWISE = 4  # k of SeqBottle's pair of 1x1 convolutions


class TiedConv(nn.Module):
    """A pointwise layer whose weight is the transposed centre of its partner's: one parameter for both (Table 5)."""

    def __init__(self, partner: Conv, *, bias: bool = False) -> None:
        super().__init__()
        self._partner = (partner,)  # a tuple, because assigning a module would register it a second time
        self.bias = nn.Parameter(torch.zeros(partner.weight.shape[1], **factory(partner))) if bias else None

    @property
    def weight(self) -> Tensor:
        weight = self._partner[0].weight
        if isinstance(
            self._partner[0], nn.Conv2d
        ):  # a symbolic trace (torch.fx) knows the layer, not the weight's shape
            c = self._partner[0].kernel_size[0] // 2
            weight = weight[:, :, c : c + 1, c : c + 1]
        return weight.transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        # A replica of nn.DataParallel has tensors of its own, but the partner of the first device.
        weight = self.weight.to(x.device) if getattr(self, "_is_replica", False) else self.weight
        convolve = F.conv2d if isinstance(self._partner[0], nn.Conv2d) else F.linear
        return convolve(x, weight, self.bias)

    def to_ordinary(self) -> Conv:
        """The ordinary layer with this weight as its own."""
        return layer_with(self.weight, self.bias)


class SeqBlock(nn.Sequential):
    """One or two pairs in a row, and no skip. Its layers are conv1, act1, conv2, norm2 and, if there are two, so on."""

    skip_free = True


@register_method("seq")
@dataclass(frozen=True, kw_only=True)
class Seq(BlockMethod):
    """SeqBasic in place of two 3x3 convolutions, SeqBottle in place of a bottleneck.

    The options are the paper's ablations (B.2); docs/seqnet.md explains them.
    """

    init: Init = "R"  # Gaussian, orthogonal or looks-linear (Table 3a)
    tie: Tie = "none"  # which pairs share one weight in training too: Conv1 with Conv2, Conv3 with Conv4 (Table 5)
    pre_relu: PreReLU = "none"  # what stands before each ReLU (Table 3b)
    position: Position = "first"  # of the 3x3 among the convolutions (Table 3c)
    seed: int = 0  # of the weights that the end of a bottleneck shares at initialisation with the next one's beginning

    def rebuild(self, spec: BlockSpec, bank: CoderBank) -> "SeqBlock":
        if spec.family not in ("vanilla", "bottleneck"):
            raise Unsupported(
                "seq has blocks for ResNets alone, in place of two k x k convolutions or of 1x1 / k x k / 1x1, and "
                f"this one is of the family {spec.family!r}"
            )
        if any(layer.drop for layer in spec.layers):
            raise Unsupported("it has dropout between its convolutions, where the pairs of seq have no place for it")
        if not isinstance(act := spec.inner_act, nn.ReLU):
            raise Unsupported(f"its activation {type(act).__name__} is not ReLU, which the pairs of seq are made for")
        conv = spec.layers[0 if spec.family == "vanilla" else 1].conv  # k x k; it strides for the whole block
        assert isinstance(conv, nn.Conv2d)
        if conv.groups != 1:
            raise Unsupported(f"its convolution has {conv.groups} groups, and the pairs of seq have dense convolutions")
        spatial = {**conv_arguments(conv), "stride": spec.stride}
        # The block's kind of norm; BatchNorm, the paper's, for a block that has none.
        norms = [module for module in (*spec.pre, *spec.branch) if isinstance(module, NORMS)]
        make = _Maker(self, norms[0] if norms else nn.BatchNorm2d(1), act, factory(conv))
        if spec.family == "vanilla":
            return self._block(make, spec.in_features, spec.out_features, spatial)
        return self._cut_bottle(make, spec, spatial)

    def linear(self, d: int, k: int) -> SeqBlock:
        """The pair d -> k d -> d of fully-connected layers (section 4.2)."""
        self._refuse_basic("a pair of fully-connected layers", positions=("first",))
        make = _Maker(self, nn.BatchNorm1d(d), nn.ReLU(inplace=True), {})
        return SeqBlock(OrderedDict(make.pair(1, d, d, k, linear=True)))

    def _block(self, make: "_Maker", d_in: int, d_out: int, spatial: dict[str, Any]) -> SeqBlock:
        """SeqBasic: 3x3 d -> 2d, ReLU, 1x1 2d -> d, norm."""
        self._refuse_basic("SeqBasic", positions=("first", "second"))
        return SeqBlock(OrderedDict(make.pair(1, d_in, d_out, K_SPATIAL, **self._place(spatial))))

    def _cut_bottle(self, make: "_Maker", spec: BlockSpec, spatial: dict[str, Any]) -> SeqBlock:
        """SeqBottle in place of a bottleneck, whose input and output have the width of Conv3: the same row of layers,
        cut behind Conv3's ReLU. A block begins with the Conv4 that belongs to the block before it.

        The pair that is cut can't be drawn in one place. Its halves start from one draw per width instead, in all
        blocks of that width, so that they fit whatever the neighbour is.
        """
        if self.init == "L" or self.tie in ("conv4", "both") or self.position == "third":
            raise Unsupported(
                "in a bottleneck Conv3 and Conv4 stand in two blocks that follow each other, which "
                f"init={self.init!r}, tie={self.tie!r}, position={self.position!r} do not allow; init 'R' or 'O', tie "
                "'none' or 'conv2' and position 'first' or 'second' do, and the seqnet networks have all of them"
            )
        d_in, d, D = spec.in_features, spec.layers[0].out_features, spec.out_features
        conv4, conv3 = make.layer(d_in, d), make.layer(d, D, bias=self.pre_relu == "bias")
        if not conv4.weight.is_meta:
            set_centre(conv4, self._shared(d_in, d).T)
            set_centre(conv3, self._shared(D, d))
        first: dict[str, nn.Module] = {"conv4": conv4, "norm4": make.norm(d)}
        last: dict[str, nn.Module] = {"conv3": conv3, **make.activation(3, D)}
        middle = make.pair(1, d, d, K_SPATIAL, **self._place(spatial))
        return SeqBlock(OrderedDict(first | middle | last))

    def _shared(self, D: int, d: int) -> Tensor:
        """The first d columns of the one draw for width D."""
        assert self.init != "L"
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        return tall_weight(self.init, D, max(D // 2, d), generator=generator)[:, :d]

    def _place(self, spatial: dict[str, Any]) -> dict[str, Any]:
        return {"narrow" if self.position == "second" else "wide": spatial}

    def _refuse_basic(self, what: str, positions: tuple[Position, ...]) -> None:
        if self.tie in ("conv4", "both"):
            raise Unsupported(f"{what} has no Conv4 to tie, as tie={self.tie!r} asks; tie='conv2' ties Conv2 to Conv1")
        if self.position not in positions:
            raise Unsupported(f"{what} has no place for position={self.position!r}; it has {', '.join(positions)}")


@register_method("seq_bottle")
@dataclass(frozen=True, kw_only=True)
class SeqBottle(Seq):
    """SeqBottle in place of two 3x3 convolutions too: what makes SeqNet50 of ResNet34's layout."""

    def _block(self, make: "_Maker", d_in: int, d_out: int, spatial: dict[str, Any]) -> SeqBlock:
        """SeqBottle: SeqBasic, then 1x1 d -> 4d, ReLU, 1x1 4d -> d, norm; in the other order at position 'third'."""
        if self.position == "third":
            pointwise = make.pair(1, d_in, d_in, K_POINTWISE)
            return SeqBlock(OrderedDict(pointwise | make.pair(3, d_in, d_out, K_SPATIAL, wide=spatial)))
        spatial_pair = make.pair(1, d_in, d_out, K_SPATIAL, **self._place(spatial))
        return SeqBlock(OrderedDict(spatial_pair | make.pair(3, d_out, d_out, K_POINTWISE)))


@dataclass(frozen=True)
class _Maker:
    """Makes the layers of a block: all with the same kind of norm and activation, on one device."""

    options: Seq
    like: nn.Module  # the norm
    act: nn.Module
    factory: dict[str, Any]

    def pair(
        self,
        first: int,  # the number of the first layer of the two
        d_in: int,
        d_out: int,
        k: int,
        *,
        wide: dict[str, Any] | None = None,  # settings of W where it is no pointwise convolution
        narrow: dict[str, Any] | None = None,  # and of M
        linear: bool = False,
    ) -> dict[str, nn.Module]:
        """y = B(M σ(W x)) as named layers, initialised. Only a pair that keeps its width can be tied."""
        D = k * max(d_in, d_out)
        bias = self.options.pre_relu == "bias"
        W = self.layer(d_in, D, bias=bias, linear=linear, **(wide or {}))
        M = self.layer(D, d_out, linear=linear, **(narrow or {}))
        if not W.weight.is_meta:
            w, m = pair_weights(self.options.init, D, d_in, d_out)
            set_centre(W, w)
            set_centre(M, m)
        tied = d_in == d_out and self.options.tie in (f"conv{first + 1}", "both")
        return {
            f"conv{first}": TiedConv(M, bias=bias) if tied and narrow else W,
            **self.activation(first, D),
            f"conv{first + 1}": TiedConv(W) if tied and not narrow else M,
            f"norm{first + 1}": self.norm(d_out),
        }

    def layer(self, d_in: int, d_out: int, *, bias: bool = False, linear: bool = False, **settings: Any) -> Conv:
        layer: Conv
        if linear:
            layer = nn.Linear(d_in, d_out, bias=bias, **self.factory)
        else:
            layer = nn.Conv2d(d_in, d_out, bias=bias, **{"kernel_size": 1, **self.factory, **settings})
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
        return layer

    def activation(self, number: int, width: int) -> dict[str, nn.Module]:
        """The activation behind a layer, with a norm before it where that is asked for."""
        norm = {f"norm{number}": self.norm(width)} if self.options.pre_relu == "norm" else {}
        return {**norm, f"act{number}": copy.deepcopy(self.act)}

    def norm(self, width: int) -> nn.Module:
        return norm_like(self.like, width, **self.factory)


@torch.no_grad()
def set_centre(layer: Conv, weight: Tensor) -> None:
    """Puts a matrix into the centre of a kernel, and zero into its other taps (section 4.2)."""
    layer.weight.zero_()
    centre_tap(layer.weight).copy_(weight)
