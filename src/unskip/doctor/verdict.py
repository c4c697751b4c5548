"""The verdict: will a network train, and if not, which layer is to blame, by what mechanism, and what would help.

Five rules, one per mechanism. Each compares one quantity of the untrained network with a limit:

- dissipating: near/far at the last hidden layer is too large (Zhang et al. 2024, section 3.1).
- singularity: (1 - cosine_similarity) √recovery there, what differs between inputs, is too small
  (Oyedotun et al. 2020, V.B); where positions are averaged away, before that.
- exploding gradient: Polyak's step, loss / |gradient|², a learning rate that fits, is too small (Hu, 2).
- vanishing gradient: gradient over weight, in the first tenth of the trunk's layers, is too small.
- saturation: too many outputs of an activation are large and pass no gradient back (Oyedotun et al. 2020, V.A).

`severity` puts all five on one scale: 0 at the limit, 1 where the slack ends, negative where it is healthy. The worst
decides the fate. Limits and slacks were set on 34 small networks trained on digits with SGD (benchmarks/verdict); they
say nothing about how good a network that trains will be.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from unskip.measures import Measured
from unskip.methods import method_names

Fate = Literal["trains", "doubtful", "fails"]
Mechanism = Literal["dissipating", "singularity", "exploding gradient", "vanishing gradient", "saturation"]
NAN = float("nan")
FAMILIES = ("activation", "gradient", "dissipation")  # the measures that the rules read
DOUBT = 0.25  # severities this close to 0 are doubtful: less than 62 % sure
SUREST = 0.9  # no more is claimed: 21 of the 24 networks that it was scored on were right
SUREST_FAR = 0.75  # on larger images than the limits come from: 7 of 9 networks that are known to train were right
LARGE = 64  # px; the limits come from images of at most 32
STEEP = 2.0  # confidence is 1 / (1 + exp(-STEEP |severity|))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the measures of a network mean."""

    fate: Fate
    sentence: str  # the verdict in words: fate, layer, mechanism and the first remedy
    mechanism: Mechanism | None  # what kills the signal; None where nothing does
    layer: str | None  # the first layer, on the way of the signal or of the gradient, where it does
    remedies: tuple[str, ...]  # what would help, the likeliest first; whole sentences
    confidence: float  # that the fate is right, 0.5 to SUREST


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What one rule found."""

    mechanism: Mechanism
    value: float
    limit: float
    severity: float  # 0 at the limit, positive past it
    layer: str | None
    clause: str  # what happens in the network, to follow the fate in a sentence
    healthy: str  # the same for a network in which it does not happen


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Where a quantity becomes fatal, and how wide the region of doubt around that is."""

    at: float
    slack: float  # factor from the limit to where it is as good as certain; below 1 for quantities that kill when small

    def severity(self, value: float) -> float:
        if value <= 0:
            return math.inf if self.slack < 1 else -math.inf
        return math.log(value / self.at) / math.log(self.slack)

    def passed(self, value: float) -> bool:
        return self.severity(value) > 0


NEAR_FAR = Limit(at=0.65, slack=1.3)
DIFFERENCE = Limit(at=0.026, slack=0.6)
STEP = Limit(at=6e-4, slack=0.5)
RELATIVE = Limit(at=6e-3, slack=0.7)
SATURATED = Limit(at=0.8, slack=1.15)
NOISE_FLOOR = 0.1  # a recovery (R²) below this says no more than that it is small, with a batch of 64
PARTLY_SATURATED = 0.3  # past this share, saturation is what lies behind lost inputs and gradients
AGAIN = "Measure it on a batch of at least 16 real inputs, with parameters that take gradients."
SHRUNK = 8.0  # severity of a vanishing gradient past which it is what makes inputs look alike


def judge(measured: Measured, *, trained: bool = False) -> Verdict:
    """The verdict on a freshly built network, from its measures alone.

    A measure that is missing or not a number leaves its rule out; where the gradient or the input could not be followed
    at all, the verdict is no better than doubtful unless another rule condemns the network. The limits say nothing
    about a `trained` one, and its verdict says so.
    """
    broken = cannot_run(measured) or not_finite(measured)
    if broken is not None:
        return broken
    verdict = by_rules(measured)
    if not trained:
        return verdict
    caution = "Its weights are trained, though, and the limits are those of untrained networks: go by the measures."
    return replace(verdict, sentence=f"{verdict.sentence} {caution}", confidence=0.5)


def by_rules(measured: Measured) -> Verdict:
    """The verdict of the worst sign."""
    if measured.samples == 1:
        return undecided("Nothing can be said from a single input: layers are judged by comparing several.", AGAIN)
    rules: tuple[Callable[[Measured], Sign | None], ...] = (dissipating, singularity, exploding, vanishing, saturation)
    signs = [sign for rule in rules if (sign := rule(measured)) is not None]
    if not signs:
        return undecided("Nothing can be said: neither signal nor gradient of this network could be measured.", AGAIN)
    worst = max(signs, key=lambda sign: sign.severity)
    if worst.severity > -DOUBT:
        return condemned(cause(worst, signs, measured), worst.severity, measured, signs)
    followed = {sign.mechanism for sign in signs}
    if not {"dissipating", "exploding gradient"} <= followed:
        what = "the input" if "dissipating" not in followed else "the gradient"
        hint = AGAIN
        if starts_at_zero(measured):
            hint = "Its last layer starts at zero and hides all other gradients: measure it again after an update."
        return undecided(f"Nothing speaks against this network, but {what} could not be followed through it.", hint)
    healthy = {sign.mechanism: sign.healthy for sign in signs}
    return Verdict(
        fate="trains",
        sentence=f"This network should train: {healthy['dissipating']}, and {healthy['exploding gradient']}.",
        mechanism=None,
        layer=None,
        remedies=(),
        confidence=confidence(worst.severity, measured),
    )


def undecided(sentence: str, hint: str) -> Verdict:
    return Verdict(
        fate="doubtful", sentence=f"{sentence} {hint}", mechanism=None, layer=None, remedies=(hint,), confidence=0.5
    )


def confidence(severity: float, measured: Measured) -> float:
    surest = SUREST_FAR if large(measured) else SUREST
    return min(surest, 1 / (1 + math.exp(-STEEP * min(abs(severity), 50.0))))


def large(measured: Measured) -> bool:
    """Whether the network was shown images (B, C, H, W) beyond those that the limits were set on."""
    return measured.shape is not None and len(measured.shape) == 4 and max(measured.shape[2:]) > LARGE


def cause(worst: Sign, signs: list[Sign], measured: Measured) -> Sign:
    """The sign to name: mechanisms come together, and one of them is what brings the others about.

    - A signal that shrinks until only biases are left makes all inputs look alike: the vanishing gradient is named.
    - Where small differences grow until the input is lost, gradients explode as well: the lost input is named.
    - Behind either may be activations at their ends.
    """
    found = {sign.mechanism: sign for sign in signs}
    named = worst
    shrinking, lost, ends = (found.get(name) for name in ("vanishing gradient", "dissipating", "saturation"))
    if named.mechanism == "singularity" and shrinking is not None and shrinking.severity > SHRUNK:
        named = shrinking
    if named.mechanism == "exploding gradient" and lost is not None and lost.severity > 0:
        named = lost
    if ends is not None and ends.value > PARTLY_SATURATED and named.mechanism != "singularity":
        shares = saturated_shares(measured)
        named = replace(ends, layer=next(name for name, share in shares.items() if share > PARTLY_SATURATED))
    return named


def condemned(sign: Sign, severity: float, measured: Measured, signs: list[Sign]) -> Verdict:
    """The verdict on a network with a sign past its limit, or so close to it that it is doubtful.

    Small gradients alone, with a signal that gets through, are an obstacle to SGD; the sentence says no more than that.
    """
    cures = remedies(sign, measured)
    doubtful = severity < DOUBT
    alone = sign.mechanism == "vanishing gradient" and not any(s.severity > 0 for s in signs if s is not sign)
    opening = "It is doubtful whether this network trains" if doubtful else "This network will most likely not train"
    opening += " with SGD" if alone else ""
    where = "" if sign.layer is None else f" {place(sign, measured)}"
    caution = " The limits come from smaller images, and of nine known networks two were misjudged on 224 px."
    return Verdict(
        fate="doubtful" if doubtful else "fails",
        sentence=f"{opening}:{where} {sign.clause} ({sign.mechanism}). {cures[0]}{caution if large(measured) else ''}",
        mechanism=sign.mechanism,
        layer=sign.layer,
        remedies=cures,
        confidence=confidence(severity, measured),
    )


def place(sign: Sign, measured: Measured) -> str:
    """Where a sign begins, on the way of the signal or on the way back of the gradient."""
    names = [layer.name for layer in measured.layers]
    count = f" ({names.index(sign.layer) + 1} of {len(names)})" if sign.layer in names else ""
    back = sign.mechanism in ("exploding gradient", "vanishing gradient")
    return f"from layer {sign.layer!r}{count} {'back to the input' if back else 'on'},"


# ---------------------------------------------------------------- the five rules


def cannot_run(measured: Measured) -> Verdict | None:
    """A backward pass that fails: no rule is needed."""
    if measured.failure is None:
        return None
    cure = "Run loss.backward() on it, and mend what the error names."
    if "inplace" in measured.failure:
        cure = "Give its non-linearities inplace=False, and write x = x + y for x += y where the error comes from."
    return Verdict(
        fate="fails",
        sentence=f"This network can't be trained as it is: its backward pass fails ({measured.failure}). {cure}",
        mechanism=None,
        layer=None,
        remedies=(cure,),
        confidence=SUREST,
    )


def not_finite(measured: Measured) -> Verdict | None:
    """A loss or an activation that is NaN or infinite: no rule is needed."""
    variance = by_layer(measured, "activation_variance")
    layer = next((name for name, value in variance.items() if not math.isfinite(value)), None)
    if layer is None and math.isfinite(measured.numbers.get("loss", 0.0)):
        return None
    sign = Sign(
        mechanism="exploding gradient",
        value=math.inf,
        limit=NAN,
        severity=math.inf,
        layer=layer,
        clause="the numbers are not finite",
        healthy="",
    )
    verdict = condemned(sign, sign.severity, measured, [sign])
    where = "" if layer is None else f" from layer {layer!r} on"
    sizes = by_layer(measured, "weight_deviation")
    bad = next((name for name, size in sizes.items() if not math.isfinite(size)), None)
    if bad is not None:
        verdict = replace(verdict, remedies=(f"The weights of layer {bad!r} are not finite: make or load them again.",))
    sentence = f"This network will not train: its numbers are infinite or NaN{where}. {verdict.remedies[0]}"
    return replace(verdict, sentence=sentence)


def dissipating(measured: Measured) -> Sign | None:
    """The input gets lost: noise of 1 % moves a hidden layer as far as another input would."""
    value = measured.numbers.get("input_dissipation", NAN)
    if not math.isfinite(value):
        return None
    return Sign(
        mechanism="dissipating",
        value=value,
        limit=NEAR_FAR.at,
        severity=NEAR_FAR.severity(value),
        layer=first_past(hidden(by_layer(measured, "noise_to_signal")), NEAR_FAR),
        clause=f"1 % of noise moves an input {value:.2f} times as far as another input would be, so the input is lost",
        healthy=f"its last hidden layer still tells inputs apart (near/far {value:.2g})",
    )


def differences(measured: Measured) -> dict[str, float]:
    """(1 - cosine_similarity) √recovery by layer: what differs between inputs and depends on them."""
    recovery = by_layer(measured, "recovery")
    known = {name: max(value, NOISE_FLOOR) for name, value in finite(recovery).items()}
    alike = by_layer(measured, "cosine_similarity")
    return {name: max(0.0, 1 - value) * math.sqrt(known.get(name, 1.0)) for name, value in alike.items()}


def singularity(measured: Measured) -> Sign | None:
    """All inputs look alike: what differs between them is a small share of a layer that is no help to read them."""
    series = before_pooling(hidden(differences(measured)), measured)
    value = list(series.values())[-1] if series else NAN
    if not math.isfinite(value):
        return None
    return Sign(
        mechanism="singularity",
        value=value,
        limit=DIFFERENCE.at,
        severity=DIFFERENCE.severity(value),
        layer=first_past(series, DIFFERENCE),
        clause=f"all inputs look alike: what tells them apart is {value:.1g} of the signal",
        healthy=f"inputs differ by {value:.2g} of the signal",
    )


def exploding(measured: Measured) -> Sign | None:
    """Gradients so large that only learning rates far below the usual ones are stable: Polyak's step, loss / |g|²."""
    norms = finite(by_layer(measured, "gradient_norm"))
    loss = measured.numbers.get("loss", NAN)
    total = sum(norm * norm for norm in norms.values())
    if not norms or not math.isfinite(loss) or not total > 0 or starts_at_zero(measured):
        return None
    step = abs(loss) / total
    so_far, layer = 0.0, None
    for name in reversed(norms):
        so_far += norms[name] ** 2
        if STEP.passed(abs(loss) / so_far):
            layer = name
            break
    return Sign(
        mechanism="exploding gradient",
        value=step,
        limit=STEP.at,
        severity=STEP.severity(step),
        layer=layer,
        clause=f"gradients are so large that learning rates above about {step:.0e} are unstable",
        healthy=f"its gradients allow learning rates of up to about {min(step, 1.0):.1g}",
    )


def vanishing(measured: Measured) -> Sign | None:
    """Gradients too small to move the weights: gradient over weight in the first tenth of the trunk's layers.

    There the gradient has come furthest. Layers inside a branch do not count where the trunk has weights of its own: a
    branch that starts at zero (zero-initialised norms, layer scale) gets its gradient later, if the trunk carries it.
    """
    sizes = finite(by_layer(measured, "relative_gradient"))
    trunk = {layer.name for layer in measured.layers if layer.trunk}
    sizes = {name: size for name, size in sizes.items() if name in trunk} or sizes
    if not sizes or starts_at_zero(measured):
        return None
    value = geometric_mean(list(sizes.values())[: max(1, len(sizes) // 10)])
    return Sign(
        mechanism="vanishing gradient",
        value=value,
        limit=RELATIVE.at,
        severity=RELATIVE.severity(value),
        layer=next((name for name in reversed(sizes) if RELATIVE.passed(sizes[name])), None),
        clause=f"gradients are too small to move the weights ({value:.0e} of their size)",
        healthy=f"gradients reach the first layers ({value:.1g} of the weights' size)",
    )


def starts_at_zero(measured: Measured) -> bool:
    """Whether the last layer's weights are zero: it alone has a gradient, and the others get theirs after an update."""
    norms = list(by_layer(measured, "gradient_norm").values())
    return len(norms) > 1 and norms[-1] > 0 and not any(norms[:-1])


def saturation(measured: Measured) -> Sign | None:
    """Activations at their ends: outputs that are large and let no gradient through.

    blocked + above - 1 is the least share of outputs that are both; what is blocked because it is zero, as behind a
    ReLU, does not count.
    """
    shares = saturated_shares(measured)
    if not shares:
        return None
    value = max(shares.values())
    return Sign(
        mechanism="saturation",
        value=value,
        limit=SATURATED.at,
        severity=SATURATED.severity(value),
        layer=next((name for name, share in shares.items() if SATURATED.passed(share)), None),
        clause=f"{value:.0%} of the outputs are at the end of their non-linearity and pass no gradient back",
        healthy="no non-linearity is saturated",
    )


def saturated_shares(measured: Measured) -> dict[str, float]:
    above = by_layer(measured, "share_above_small")
    blocked = by_layer(measured, "gradient_blocked")
    return finite({name: max(0.0, share + above.get(name, NAN) - 1) for name, share in blocked.items()})


# ---------------------------------------------------------------- what would help


def remedies(sign: Sign, measured: Measured) -> tuple[str, ...]:
    """What helps against a mechanism in this network, the likeliest first."""
    kinds = {layer.kind for layer in measured.layers}
    norm = () if "norm" in kinds else ("Put a BatchNorm or LayerNorm before each non-linearity.",)
    skips = "Keep or add a skip connection every two layers."
    tied = "Start each pair of layers as a matrix and its transpose, as unskip's seqnet_mlp does."
    sizes = "N(0, 2/fan_in) before a ReLU or GELU, orthogonal before a tanh"
    convolutional = "conv" in kinds  # what plainify reads
    if sign.mechanism == "saturation":
        smaller = "Initialise the weights smaller, so that the non-linearities are not saturated."
        return (smaller, *norm, skips)
    if sign.mechanism == "dissipating":
        return (*(rebuilt("pnnh", "seq") if convolutional else (tied,)), *norm, skips)
    if sign.mechanism == "singularity":
        leaky = "Use a leaky ReLU with slope 0.3: negative outputs keep units and inputs apart."
        return (*norm, leaky, *(rebuilt("pnnh") if convolutional else (tied,)), skips)
    if sign.mechanism == "exploding gradient":
        lower = (f"Train with a learning rate below {sign.value:.0e}.",) if 1e-5 < sign.value < 1 else ()
        smaller = f"Initialise the weights smaller: {sizes}."
        return (*norm, *([smaller] if norm else []), *(rebuilt("seq", "pnnh") if convolutional else ()), *lower, skips)
    adaptive = "Train it with AdamW, whose steps do not shrink with the gradient."
    larger = f"Initialise the weights larger: {sizes}."
    return (*((larger, *norm, adaptive) if norm else (adaptive, larger)), skips)


def rebuilt(*methods: str) -> tuple[str, ...]:
    """The methods of ours that exist, as remedies."""
    known = method_names()
    return tuple(
        f"Rebuild it from its residual form with unskip.plainify(network, method={method!r})."
        for method in methods
        if method in known
    )


# ---------------------------------------------------------------- series


def by_layer(measured: Measured, name: str) -> dict[str, float]:
    """A series as layer -> value; empty where it was not measured."""
    series = measured.series.get(name)
    return {} if series is None else dict(zip(series.layers, series.values, strict=True))


def finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def hidden(values: dict[str, float]) -> dict[str, float]:
    """All but the last layer, the classifier, which may forget; finite values only."""
    return finite(dict(list(values.items())[:-1]) if len(values) > 1 else values)


def before_pooling(values: dict[str, float], measured: Measured) -> dict[str, float]:
    """What stands before the positions of a convolutional network are averaged away, if that is in the trunk.

    A mean over many positions of a ReLU's outputs is much the same for all inputs in networks that train well too
    (torchvision's ResNet-18: a cosine of 0.56 before and 0.97 behind), and a bias in the classifier takes it off.
    """
    for layer in measured.layers:
        if layer.trunk and layer.kind == "pool" and math.prod(layer.shape[2:]) == 1:
            names = [each.name for each in measured.layers]
            before = set(names[: names.index(layer.name)])
            return {name: value for name, value in values.items() if name in before} or values
    return values


def first_past(values: dict[str, float], limit: Limit) -> str | None:
    """The first layer from which on a quantity is past its limit to the end."""
    first = None
    for name in reversed(values):
        if not limit.passed(values[name]):
            break
        first = name
    return first


def geometric_mean(values: list[float]) -> float:
    return 0.0 if min(values) <= 0 else math.exp(sum(map(math.log, values)) / len(values))
