"""Method `pnnh`: a trained learner of half the width beside a frozen, shared coder.

Zhang et al. 2024, arXiv:2402.08645, section 4.

    y = σ( learner(x) + coder(x) )          coder(x) = W_dec ⊛ σ(W_enc ⊛ x)
    learner(x) = W_2 ⊛ σ(norm(W_1 ⊛ x))     hidden width H - C_B, no norm after W_2 (Appendix D)

Both read the same tensor and use the block's own activation, so side by side they are one ordinary block: [W_1; W_enc]
above [W_2, W_dec] (`unskip.methods.stack`). That is why the network is plain.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn

from unskip._core.layers import fast_form
from unskip.coders import FORMS, PRETEXTS, CoderBank, CoderSpec, act_name, odd_part_is_identity
from unskip.kernels import use_fast_layers
from unskip.kernels.depthwise import JoinedSequential
from unskip.methods import fused
from unskip.methods.gated import build_gated, is_gated
from unskip.methods.inits import orthogonal_like
from unskip.methods.lean import LeanInverted, LeanSequential
from unskip.methods.partial import PartialConv2d
from unskip.methods.plain import Plain, PlainBlock
from unskip.methods.registry import check_options, register_method
from unskip.methods.spec import (
    NORMS,
    RECTIFIERS,
    BlockSpec,
    Conv,
    Stage,
    Unsupported,
    check_keeps_shape,
    describe,
    factory,
)
from unskip.methods.stack import stacked_layers
from unskip.methods.widths import conv_like, fresh, norm_like

Hidden = Mapping[int, int] | float | None
Norm = Literal["first", "both"]
Transition = Literal["coded", "whole"]
Signed = Literal["rectify", "paired"]
Fitting = Literal["adam", "sgd"]
Uncarried = Literal["kxk", "1x1"]
BlockForm = Literal["auto", "plain", "fast", "lean"]
ALIGNED = 8  # channels that tensor cores take at once


class LearnerBlock(nn.Module):
    """Base of blocks with a learner beside a second path. `pre` comes before both, `act` after their sum."""

    def __init__(
        self,
        pre: nn.Sequential,
        learner: nn.Sequential,
        drop_path: float,
        act: nn.Module | None,
        **path: nn.Module | None,
    ) -> None:
        super().__init__()
        self.pre = pre
        self.learner = learner
        for name, module in path.items():  # before the activation, so that modules stand in the order in which they run
            setattr(self, name, module)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.act = nn.Identity() if act is None else act


class PNNHBlock(LearnerBlock):
    """y = σ(learner(x) + coder(x)), of x through `pre` where the block has one.

    The network's last block may have a norm behind it, `head_norm`: nothing else normalises the sum that the learners
    build up. It goes into the classifier when the network is folded.
    """

    skip_free = True
    coder: nn.Module | None

    def __init__(
        self,
        *,
        pre: nn.Sequential,
        learner: nn.Sequential,
        coder: nn.Module | None,
        drop_path: float = 0.0,
        act: nn.Module | None = None,
    ) -> None:
        super().__init__(pre, learner, drop_path, act, coder=coder)
        self.head_norm: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self._response(x)
        return y if self.head_norm is None else self.head_norm(y)

    def _response(self, x: Tensor) -> Tensor:
        layers = fused.supports(self, x)
        if layers is not None:
            return fused.run(layers, x)
        x = self.pre(x)
        response = self.drop_path(self.learner(x))
        if self.coder is not None:
            response = response + self.coder(x)
        return self.act(response)

    def to_ordinary(self) -> nn.Sequential:
        """The block in its stacked form: pre, convolution, activation, (convolution, activation,) convolution, act."""
        return nn.Sequential(*self.pre, *self._joined(), *self._behind())

    def _behind(self) -> list[nn.Module]:
        return [self.act] if self.head_norm is None else [self.act, self.head_norm]

    def to_fast(self) -> nn.Module | None:
        """The learner beside a coder without matrices, or None where the ordinary form is as fast.

        Without such a coder an inverted bottleneck is stacked, its hidden channels filled up to a multiple of 8.
        """
        coder = None if self.coder is None else fast_form(self.coder)
        if coder is not None:
            block = PNNHBlock(pre=self.pre, learner=self.learner, coder=coder, act=self.act)
            block.drop_path, block.head_norm = self.drop_path, self.head_norm
            return block
        if isinstance(self.learner, JoinedSequential):
            return JoinedSequential(*self.pre, *self._joined(ALIGNED), *self._behind())
        return None

    def _joined(self, multiple: int = 1) -> list[nn.Module]:
        if self.training:
            raise Unsupported("is in training mode, where BatchNorm depends on the batch; call .eval() first.")
        return stacked_layers(self.learner, self.coder, multiple)


@register_method("pnnh")
@dataclass(frozen=True, kw_only=True)
class PNNH:
    """y = σ(learner(x) + coder(x)): a trained learner of half the width beside a frozen coder that carries the input.

    docs/pnnh.md explains the defaults, with their measurements; `pnnh_paper` has the paper's literal setting.
    """

    ratio: float = 0.5  # C_B / C (C_B / C_low in bottlenecks), above 0 and at most 1/2
    pretext: str = "auto"  # what the coder is; auto: group_average, in MLPs fitted, or identity by skip-free attention
    norm: Norm = "first"  # norms of the learner: after W_1 only (Appendix D), or after the last convolution too
    scale: float = 0.3  # of the last layer at initialisation, relative to He's
    transition: Transition = "coded"  # transitions with a coder of their own, or whole without one
    signed: Signed = "paired"  # blocks with linear output (MobileNet-V2): carry x+ and x-, or put σ after the sum
    uncarried: Uncarried = "kxk"  # taps for the channels that pretext="identity" does not carry: all, or the centre
    linear_start: bool | None = None  # MLP learners first pass on what is not carried; None: beside skip-free attention
    hidden: Hidden = None  # width of the learner by that of the block, {48: 8}, or over it, 2.5; None: H - C_B
    head_norm: bool | None = None  # a norm before pooling; None: unless a norm follows the last block anyway
    block: BlockForm = "auto"  # plain: the formula; fast: no matrices; lean: less memory; auto: fast (MobileNet: lean)
    seed: int = 0  # of fitted and random coders
    fit: Fitting = "adam"  # of fitted coders: Adam to the floor, or plain SGD from N(0, 0.01) as in Algorithm 1

    keeps_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self, pretext=("auto", *PRETEXTS, "none"))
        if not 0 < self.ratio <= 0.5:
            raise ValueError(
                f"pnnh: ratio={self.ratio} must be above 0 and at most 0.5. A coder as wide as the block is a residual "
                "connection; it has its own method, 'residual_half'."
            )
        if self.uncarried == "1x1" and self.pretext != "identity":
            raise ValueError(
                f"pnnh: uncarried='1x1' needs pretext='identity', the coder whose carried channels are the first "
                f"ones, and not pretext={self.pretext!r}; uncarried='kxk' goes with any."
            )
        if self.hidden is not None:
            object.__setattr__(self, "hidden", check_hidden(self.hidden))
        if not self.scale >= 0:
            raise ValueError(f"pnnh: scale={self.scale} must not be negative; 1 is He's initialisation.")

    def build(self, spec: BlockSpec, bank: CoderBank) -> nn.Module | None:
        if is_gated(spec):
            carried = self.code_of(spec.branch[0].fc1_x.in_features)  # type: ignore[union-attr, arg-type]
            return build_gated(spec, carried, self.scale, self.hidden_width)
        if not spec.skip and not self._expressible(spec):
            return self._whole(spec, bank)
        if self.transition == "whole" and spec.transition:
            return self._whole(spec, bank)
        spec, enter, leave = spec.framed()
        act = self._activation(spec)
        target = self._coder_spec(spec, act)
        first = spec.stages[0]
        make = {**factory(first.conv), "dense": self.block == "plain"}
        coder: nn.Module | None = None
        code = target.code
        stride = math.prod(stage.stride for stage in spec.stages)
        inputs, outputs = first.in_features, spec.stages[-1].out_features
        if self.pretext != "none" and (stride != 1 or inputs != outputs):
            check_strides(spec)
            limit = min(stage.out_features for stage in _shrinking(spec)) // 2
            if limit < (2 if target.paired else 1):
                raise _too_narrow(spec)
            make |= {"in_channels": inputs, "limit": limit, "stride": stride}
            coder, code = bank.take_transition(target, act, **make)
        elif self.pretext != "none":
            coder = bank.take(target, act, **make)
        if coder is not None and isinstance(first.conv, nn.Conv1d):
            coder = SeriesCoder(coder, stride)
        out_act = self._out_act(spec)
        return PNNHBlock(
            pre=nn.Sequential(*spec.pre, *enter),
            learner=self.learner(spec, code),
            coder=coder,
            drop_path=spec.drop_path,
            act=nn.Sequential(*leave, *([] if out_act is None else [out_act])) if leave else out_act,
        )

    def finish(self, model: nn.Module) -> None:
        """A norm before pooling, where the model has a place for one, and a faster stem, where it has one."""
        set_head_norm("pnnh", model, self.head_norm)
        if self.block != "plain":
            use_fast_layers(model, depthwise=False)

    def _whole(self, spec: BlockSpec, bank: CoderBank) -> nn.Module | None:
        """A transition without its shortcut, with a rectified output where the next coder needs that."""
        rectified = self._out_act(spec) if spec.out_act is None else None
        if rectified is not None:
            return PlainBlock(*spec.pre, *[m for m in spec.branch if not isinstance(m, DropPath)], rectified)
        return Plain().build(spec, bank)

    def code_of(self, base: int) -> int:
        """C_B, the share `ratio` of `base` channels, rounded but never more than half of them."""
        return min(round(self.ratio * base), base // 2)

    def hidden_width(self, width: int, otherwise: int) -> int:
        """The learner's width in a block of this width; `otherwise` where `hidden` is None."""
        if self.hidden is None:
            return otherwise
        if not isinstance(self.hidden, Mapping):
            return round(self.hidden * width)
        if width not in self.hidden:
            raise Unsupported(
                f"hidden={dict(self.hidden)} says nothing about blocks of width {width}; add it, or leave hidden out"
            )
        return self.hidden[width]

    def _expressible(self, spec: BlockSpec) -> bool:
        """Whether a block that has no skip can get a coder. One that can't stays as it is, and loses nothing."""
        try:
            self._coder_spec(spec, self._activation(spec))
            check_strides(spec)
        except Unsupported:
            return False
        return True

    def _family(self, spec: BlockSpec) -> str:
        """The family of the block, 'mlp' or 'other' where it has none but its branch is a row of layers."""
        try:
            return spec.family
        except Unsupported:
            if not spec.skip:
                raise
        for stage in spec.stages:
            conv = stage.conv
            if not isinstance(conv, nn.Linear) and not stage.pad and not keeps_size(conv):
                raise Unsupported(f"{describe(conv)} is not a convolution with an odd kernel and 'same' zero padding")
        return "mlp" if all(isinstance(stage.conv, nn.Linear) for stage in spec.stages) else "other"

    def _activation(self, spec: BlockSpec) -> nn.Module:
        """The one activation inside the block, which learner and coder share."""
        family = self._family(spec)
        stages = spec.stages
        # A depthwise convolution at the beginning may have none (ConvNeXt).
        ahead = family == "other" and len(stages) > 2 and stages[0].depthwise and stages[0].act is None
        inner = [stage.act for stage in stages[ahead:-1]]
        act = inner[0] if inner else None
        if act is None or None in inner or stages[-1].act is not None:
            raise Unsupported("its branch does not have one activation between each two convolutions")
        if len({act_name(act) for act in inner if act is not None}) > 1:
            raise Unsupported("its activations differ from each other, so learner and coder can't be one block")
        if any(True for _ in act.parameters()):
            raise Unsupported(f"its activation {type(act).__name__} is trained, and a coder is frozen")
        return act

    def _linear_output(self, spec: BlockSpec) -> bool:
        return spec.out_act is None and not spec.pre

    def _out_act(self, spec: BlockSpec) -> nn.Module | None:
        if self.signed == "rectify" and self._linear_output(spec):
            return copy.deepcopy(spec.inner_act)
        return spec.out_act

    def _coder_spec(self, spec: BlockSpec, act: nn.Module) -> CoderSpec:
        family, stages = self._family(spec), spec.stages
        first = stages[0]
        channels = stages[-1].out_features
        signed = spec.reads_signed and not (self.signed == "rectify" and self._linear_output(spec))
        depth = sum(stage.act is not None for stage in stages[:-1])
        pretext = self.pretext
        if pretext == "auto":
            # LayerNorm brings the inputs of an MLP to the distribution that a coder can be fitted on. In a CNN they
            # have any scale, and a closed form passes on any.
            pretext = "normal" if family == "mlp" and not isinstance(act, RECTIFIERS) else "group_average"
            if spec.attention is not None and odd_part_is_identity(act, depth):  # an exact one, however deep
                pretext = "identity"
        paired = signed and pretext in FORMS
        if paired and not odd_part_is_identity(act, depth):
            raise Unsupported(
                f"it reads both signs, and {type(act).__name__}, {depth} in a row, does not let a closed form carry "
                "them; a fitted coder, for instance pretext='normal', can try"
            )
        if pretext in FORMS and not paired and not passes_positive(act):
            raise Unsupported(f"{type(act).__name__} changes positive values, so pretext={pretext!r} carries nothing")
        base = channels
        if family in ("vanilla", "bottleneck"):
            base = first.out_features
        elif family == "other":
            base = min(channels, *(stage.out_features for stage in _shrinking(spec)))
        code = max(2 if paired else 1, self.code_of(base))
        room = min(stage.out_features for stage in _shrinking(spec))
        if paired and family == "mlp" and 2 * self.code_of(base) < room:
            code = 2 * self.code_of(base)  # both signs of C_B channels
        elif code >= channels:
            raise Unsupported(
                f"its coder would carry {code} channels, not fewer than its {channels}; a smaller ratio does"
            )
        convs = [stage.conv for stage in stages]
        dilated = any(isinstance(conv, nn.Conv2d) and conv.dilation != (1, 1) for conv in convs)
        return CoderSpec(
            channels=channels,
            code=code - code % 2 if paired else code,
            pretext="identity" if pretext == "none" else pretext,
            act=act_name(act),
            # Closed forms are pointwise; a fitted coder has the kernel of the block's own convolutions.
            kernel=first.kernel if family == "vanilla" and not dilated and pretext not in FORMS else 1,
            depth=depth,
            paired=paired,
            linear=family == "mlp",
            seed=self.seed,
            fit=self.fit,
        )

    def learner(self, spec: BlockSpec, code: int | None = None) -> nn.Sequential:
        """The block's layers, freshly initialised, at the hidden width beside a coder of `code` channels."""
        family, stages = self._family(spec), spec.stages
        width = stages[-1].out_features
        code = self._coder_spec(spec, self._activation(spec)).code if code is None else code
        if self.uncarried == "1x1" and family != "vanilla":
            raise Unsupported(f"uncarried='1x1' is for blocks of two k x k convolutions, and it is {family}")
        learner = self._sequence(family == "inverted")
        last = len(stages) - 1
        fan_in, shrinking = stages[0].in_features, _shrinking(spec)
        for i, stage in enumerate(stages):
            fan_out = stage.out_features
            if i != last and stage in shrinking:
                fan_out = self.hidden_width(width, learner_width(family, stage.out_features, code))
                if fan_out < 1:
                    raise _too_narrow(spec)
            conv = conv_like(stage, fan_in, fan_out)
            scale = self.scale if i == last else 1.0
            if self.uncarried == "1x1":
                assert isinstance(conv, nn.Conv2d)
                carried = max(1, round(self.ratio * (fan_out if i == last else fan_in)))
                conv = PartialConv2d(conv, carried, side="writes" if i == last else "reads", scale=scale)
            else:
                initialise(conv, scale)
            learner.add_module(f"conv{i + 1}", conv)
            for number, module in enumerate(stage.behind):
                check_keeps_shape(module, stage)
                keep = i != last or self.norm == "both" or not isinstance(module, NORMS)
                for name, new in fresh(module, stage.out_features, fan_out, **factory(stage.conv)) if keep else ():
                    taken = f"{name}{i + 1}" in dict(learner.named_children())
                    learner.add_module(f"{name}{i + 1}_{number}" if taken else f"{name}{i + 1}", new)
            fan_in = fan_out
        if self.linear_start or (self.linear_start is None and spec.attention is not None):
            start_linear(learner, self._coder_spec(spec, self._activation(spec)))
        return learner

    def _sequence(self, inverted: bool) -> nn.Sequential:
        """An empty nn.Sequential for the learner, of the class that `block` asks for."""
        if self.block == "lean":
            return LeanSequential()
        if inverted and self.block != "plain":
            return LeanInverted() if self.block == "auto" else JoinedSequential()
        return nn.Sequential()


@torch.no_grad()
def start_linear(learner: nn.Sequential, coder: CoderSpec) -> None:
    """Lets the learner of an MLP start as x ↦ x on the channels that the coder does not carry.

        Qᵀ (σ(Q x) - σ(-Q x)) = x, where σ(z) - σ(-z) = z      Q orthogonal

    A start as in Looks Linear networks (Balduzzi et al. 2017, arXiv:1702.08591, section 4.1), all of it trained.
    Without it random features of width C - C_B follow each other, layer by layer, and each loses a part of the tokens.
    """
    first, last = learner.get_submodule("conv1"), learner.get_submodule("conv2")
    if not (coder.paired and coder.pretext == "identity" and isinstance(first, nn.Linear)):
        raise Unsupported("linear_start is for MLPs whose coder is the identity of both signs; leave it out")
    assert isinstance(last, nn.Linear)
    carried = coder.code // 2
    n = min(coder.channels - carried, first.out_features // 2)
    Q = orthogonal_like(first.weight[:n, carried : carried + n])
    for part in (first.weight[: 2 * n], last.weight[:, : 2 * n]):
        part.zero_()
    first.weight[: 2 * n, carried : carried + n] = torch.cat([Q, -Q])
    last.weight[carried : carried + n, : 2 * n] = torch.cat([Q, -Q]).T


@register_method("pnnh_paper")
@dataclass(frozen=True, kw_only=True)
class PNNHPaper(PNNH):
    """The paper's literal setting: a fitted coder, whole transitions, the last convolution at He's scale."""

    pretext: str = "rectified_normal"
    scale: float = 1.0
    transition: Transition = "whole"
    signed: Signed = "rectify"
    head_norm: bool | None = False


def _shrinking(spec: BlockSpec) -> list[Stage]:
    """The hidden layers that become narrower by the coder: all but a depthwise convolution of the input."""
    inner = [stage for i, stage in enumerate(spec.stages[:-1]) if i > 0 or not stage.depthwise]
    return inner or [*spec.stages[:-1]]


def _too_narrow(spec: BlockSpec) -> Unsupported:
    width = min(stage.out_features for stage in _shrinking(spec))
    return Unsupported(f"its narrowest layer writes {width} channels, too few for coder and learner")


def learner_width(family: str, width: int, code: int) -> int:
    """H - C_B, the width of a learner beside its coder.

    In an inverted bottleneck, where C_B is a small part of H, it is rounded down to a multiple of 8, as MobileNet's own
    widths are: other widths run on slower kernels.
    """
    width -= code
    down = width - width % ALIGNED
    return down if family == "inverted" and down >= 0.9 * width else width


def keeps_size(conv: nn.Conv1d | nn.Conv2d) -> bool:
    """An odd kernel with the zero padding that keeps the size at stride 1."""
    same = tuple(d * (k - 1) // 2 for k, d in zip(conv.kernel_size, conv.dilation, strict=True))
    odd = all(k % 2 for k in conv.kernel_size)
    return odd and conv.padding_mode == "zeros" and conv.padding in (same, "same") and len({*conv.stride}) == 1


class SeriesCoder(nn.Module):
    """A coder of images applied to a series, which it reads as an image of `stride` equal rows."""

    def __init__(self, coder: nn.Module, stride: int) -> None:
        super().__init__()
        self.coder = coder
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.coder(x.unsqueeze(2).expand(-1, -1, self.stride, -1))
        return y.squeeze(2)


def set_head_norm(where: str, model: nn.Module, wanted: bool | None) -> None:
    """Puts a norm before the pooling: where the network itself has a place for it, else behind its last block.

    False leaves the network as it is, and so does None where a norm follows the last block anyway, as in MobileNet-V2,
    pre-activation networks and transformers.
    """
    place = getattr(model, "add_head_norm", None)
    if wanted is False:
        return
    if place is not None:
        place()
        return
    blocks = [module for module in model.modules() if isinstance(module, PNNHBlock)]
    norms = [module for module in model.modules() if isinstance(module, NORMS)]
    inside = [module for module in blocks[-1].modules() if isinstance(module, NORMS)] if blocks else []
    convs = [module for module in blocks[-1].learner if isinstance(module, nn.Conv2d)] if blocks else []
    if wanted and not (inside and convs):
        raise ValueError(
            f"{where}: head_norm=True, but the last block of {type(model).__name__} has no convolutions with norms; "
            "leave head_norm out."
        )
    if inside and convs and (wanted or norms[-1] is inside[-1]):
        blocks[-1].head_norm = norm_like(inside[-1], convs[-1].out_channels, **factory(convs[-1]))
        blocks[-1].register_load_state_dict_post_hook(_name_head_norm)


def _name_head_norm(block: nn.Module, keys: Any) -> None:
    """Explains missing keys of the norm before pooling: how to build a network that has none."""
    found = [key for key in keys.missing_keys if ".head_norm." in key]
    if found:
        path = found[0].rpartition(".")[0]
        others = [key for key in keys.missing_keys if key not in found]
        keys.missing_keys[:] = [*others, f"{path}, a norm before pooling: build the network with head_norm=False"]


def check_hidden(hidden: object) -> dict[int, int] | float:
    """The option `hidden`, checked: a multiple of the block's width as a float, or the learner's width by the block's.

    Keys of a mapping are text in TOML and JSON.
    """
    if isinstance(hidden, float) and 0 < hidden < math.inf:  # an int may be meant as channels
        return hidden
    try:
        widths = {int(width): int(value) for width, value in hidden.items()}  # type: ignore[attr-defined]
        if all(value >= 1 and value == given for value, given in zip(widths.values(), hidden.values(), strict=True)):  # type: ignore[attr-defined]
            return widths
    except (AttributeError, TypeError, ValueError):
        pass
    raise ValueError(
        f"pnnh: hidden={hidden!r} must give the learner's width for each width of a block, for instance "
        "{48: 8, 96: 12, 192: 19}, or a multiple of the block's width as a float, such as 2.5."
    )


def check_strides(spec: BlockSpec) -> None:
    """A coded transition pools with the taps of one convolution that reaches over its stride."""
    strides = [stage.stride for stage in spec.stages]
    stride = math.prod(strides)
    pooling = [stage for stage in spec.stages if stage.stride == stride]
    dilated = any(not isinstance(s.conv, nn.Linear) and {*s.conv.dilation} != {1} for s in pooling)
    reaches = bool(pooling) and pooling[0].kernel >= 3 and not dilated
    if stride > 2 or (stride == 2 and not reaches):
        raise Unsupported(
            f"its strides {strides} with kernels {[stage.kernel for stage in spec.stages]}"
            f"{', dilated,' if dilated else ''} leave no convolution to pool in; transition='whole' works"
        )


def passes_positive(act: nn.Module) -> bool:
    """Whether σ(z) = z for positive z (of ordinary size), so that a closed form carries what is positive."""
    z = torch.linspace(0.01, 5, 50, dtype=torch.float64, device="cpu")
    return bool(torch.allclose(copy.deepcopy(act)(z.clone()), z))


def initialise(conv: Conv, scale: float) -> None:
    """He's normal over the fan-in (Eq. 1), times the scale."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_in", nonlinearity="relu")
    with torch.no_grad():
        conv.weight.mul_(scale)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
