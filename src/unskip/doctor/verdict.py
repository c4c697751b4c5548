"""The verdict: whether a model will train, and if not, in which layer it goes wrong, by what mechanism, and what helps.

Five rules, one function each, compare one quantity of the untrained model with a limit. `severity` puts all five on
one scale: 0 at the limit, 1 where the slack ends, negative if healthy. The most severe rule decides. Limits and slacks
were set on 34 small networks trained on digits with SGD (benchmarks/verdict). They say nothing about how good a network
that trains will be.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import geometric_mean
from typing import Literal

from unskip.measures import Measured
from unskip.methods import method_names

Outcome = Literal["trains", "doubtful", "fails"]
Mechanism = Literal["dissipating", "singularity", "exploding gradient", "vanishing gradient", "saturation"]
FAMILIES = ("activation", "gradient", "dissipation")  # the measures that the rules need
DOUBT = 0.25  # severities this close to 0 are doubtful: a confidence below 62 %
MAX_CONFIDENCE = 0.9  # 21 of 24 networks in the test were judged correctly
MAX_CONFIDENCE_LARGE = 0.75  # for images larger than those behind the limits: 7 of 9 networks known to train
MAX_IMAGE = 64  # px, beyond which images count as large; the limits come from images of at most 32
STEEPNESS = 2.0  # confidence is 1 / (1 + exp(-STEEPNESS |severity|))
MIN_RECOVERY = 0.1  # with a batch of 64, a recovery (R²) below this is within the noise
PARTLY_SATURATED = 0.3  # above this fraction, saturation is the cause of lost inputs and gradients
VANISHED = 8.0  # severity above which a vanishing gradient is the reason why inputs look alike
MEASURE_AGAIN = "Measure it on a batch of at least 16 real inputs, with parameters that require gradients."


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the measures of a model mean."""

    outcome: Outcome
    summary: str  # outcome, layer, mechanism and the first remedy in words
    mechanism: Mechanism | None = None  # what goes wrong, if anything does
    layer: str | None = None  # the first layer where it does, in the direction of the signal or of the gradient
    remedies: tuple[str, ...] = ()  # what would help, the most likely first; full sentences
    confidence: float  # that the outcome is right, 0.5 to MAX_CONFIDENCE


@dataclass(frozen=True)
class Limit:
    """The limit of one rule, and how wide the region of doubt around it is."""

    mechanism: Mechanism
    at: float
    slack: float  # factor from the limit to near certainty; below 1 for quantities that are harmful when small

    def severity(self, value: float) -> float:
        if value <= 0:
            return math.inf if self.slack < 1 else -math.inf
        return math.log(value / self.at) / math.log(self.slack)

    def exceeded(self, value: float) -> bool:
        return self.severity(value) > 0


NOISE_TO_SIGNAL = Limit("dissipating", at=0.65, slack=1.3)
DIFFERENCE = Limit("singularity", at=0.026, slack=0.6)
STEP = Limit("exploding gradient", at=6e-4, slack=0.5)
RELATIVE_GRADIENT = Limit("vanishing gradient", at=6e-3, slack=0.7)
SATURATION = Limit("saturation", at=0.8, slack=1.15)


@dataclass(frozen=True)
class Symptom:
    """The result of one rule."""

    limit: Limit
    value: float
    layer: str | None
    problem: str  # what happens in the model, as a clause that follows the outcome

    @property
    def mechanism(self) -> Mechanism:
        return self.limit.mechanism

    @property
    def severity(self) -> float:
        """0 at the limit, positive beyond it."""
        return self.limit.severity(self.value)


def judge(measured: Measured, *, trained: bool = False) -> Verdict:
    """The verdict on an untrained model, from its measures alone.

    A measure that is missing or not finite disables its rule. If neither the gradient nor the input could be followed
    through the model, the verdict is doubtful at best, unless another rule fails. The limits do not apply to `trained`
    models, and their verdict says so.
    """
    verdict = backward_fails(measured) or not_finite(measured)
    if verdict is not None:
        return verdict
    verdict = apply_rules(measured)
    if not trained:
        return verdict
    caution = "However, its weights are trained, and the limits are for untrained networks: rely on the measures."
    return replace(verdict, summary=f"{verdict.summary} {caution}", confidence=0.5)


def apply_rules(measured: Measured) -> Verdict:
    """The verdict of the most severe rule."""
    if measured.samples == 1:
        return doubtful("A single input is not enough: the rules compare several.", MEASURE_AGAIN)
    rules = (dissipating, singularity, exploding, vanishing, saturation)
    symptoms = {found.mechanism: found for rule in rules if (found := rule(measured)) is not None}
    if not symptoms:
        return doubtful("Neither the signal nor the gradient of this network could be measured.", MEASURE_AGAIN)
    worst = max(symptoms.values(), key=lambda symptom: symptom.severity)
    if worst.severity > -DOUBT:
        return unhealthy(cause(worst, symptoms, measured), worst.severity, symptoms, measured)
    for mechanism, what in (("dissipating", "input"), ("exploding gradient", "gradient")):
        if mechanism not in symptoms:
            hint = MEASURE_AGAIN
            if last_layer_is_zero(measured):
                hint = "Its last layer starts at zero and hides all other gradients: measure it again after an update."
            return doubtful(f"No problem was found, but the {what} could not be followed through this network.", hint)
    ratio, step = symptoms["dissipating"].value, min(symptoms["exploding gradient"].value, 1.0)
    return Verdict(
        outcome="trains",
        summary=f"This network should train: its last hidden layer still tells inputs apart (noise-to-signal ratio "
        f"{ratio:.2g}), and its gradients allow learning rates of up to about {step:.1g}.",
        confidence=confidence(worst.severity, measured),
    )


def doubtful(summary: str, hint: str) -> Verdict:
    """A verdict for want of measures."""
    return Verdict(outcome="doubtful", summary=f"{summary} {hint}", remedies=(hint,), confidence=0.5)


def confidence(severity: float, measured: Measured) -> float:
    """From the distance to the nearest limit."""
    limit = MAX_CONFIDENCE_LARGE if has_large_images(measured) else MAX_CONFIDENCE
    return min(limit, 1 / (1 + math.exp(-STEEPNESS * min(abs(severity), 50.0))))


def has_large_images(measured: Measured) -> bool:
    """Whether the batch is images (B, C, H, W) larger than those that the limits were set on."""
    return measured.shape is not None and len(measured.shape) == 4 and max(measured.shape[2:]) > MAX_IMAGE


def cause(worst: Symptom, symptoms: dict[Mechanism, Symptom], measured: Measured) -> Symptom:
    """The symptom to report. Mechanisms occur together, and one of them causes the others.

    - If the signal shrinks until only biases are left, all inputs look alike: the vanishing gradient is the cause.
    - If small differences grow until the input is lost, gradients explode as well: the lost input is the cause.
    - Either may be caused by saturated activations.
    """
    vanishing, lost = symptoms.get("vanishing gradient"), symptoms.get("dissipating")
    saturated = symptoms.get("saturation")
    if worst.mechanism == "singularity" and vanishing is not None and vanishing.severity > VANISHED:
        worst = vanishing
    if worst.mechanism == "exploding gradient" and lost is not None and lost.severity > 0:
        worst = lost
    if saturated is not None and saturated.value > PARTLY_SATURATED and worst.mechanism != "singularity":
        fractions = saturated_fractions(measured)
        worst = replace(saturated, layer=next(name for name, value in fractions.items() if value > PARTLY_SATURATED))
    return worst


def unhealthy(symptom: Symptom, severity: float, symptoms: dict[Mechanism, Symptom], measured: Measured) -> Verdict:
    """The verdict on a model with a symptom beyond its limit, or so close to it that it is doubtful.

    Small gradients alone, with a signal that gets through, are a problem for SGD only, and the summary says so.
    """
    cures = remedies(symptom, measured)
    unsure = severity < DOUBT
    others = [other for other in symptoms.values() if other is not symptom]
    only_sgd = symptom.mechanism == "vanishing gradient" and not any(other.severity > 0 for other in others)
    opening = "It is doubtful whether this network trains" if unsure else "This network will most likely not train"
    opening += " with SGD" if only_sgd else ""
    caution = " The limits come from smaller images; at 224 px, two of nine known networks were misjudged."
    return Verdict(
        outcome="doubtful" if unsure else "fails",
        summary=f"{opening}: {place(symptom, measured)}{symptom.problem} ({symptom.mechanism}). {cures[0]}"
        f"{caution if has_large_images(measured) else ''}",
        mechanism=symptom.mechanism,
        layer=symptom.layer,
        remedies=cures,
        confidence=confidence(severity, measured),
    )


def place(symptom: Symptom, measured: Measured) -> str:
    """Where a symptom begins, in the direction of the signal or of the gradient."""
    if symptom.layer is None:
        return ""
    names = [layer.name for layer in measured.layers]
    count = f" ({names.index(symptom.layer) + 1} of {len(names)})" if symptom.layer in names else ""
    towards = "back to the input" if symptom.mechanism.endswith("gradient") else "on"
    return f"from layer {symptom.layer!r}{count} {towards}, "


# ---------------------------------------------------------------- failures that need no rule


def backward_fails(measured: Measured) -> Verdict | None:
    """The verdict on a model whose backward pass raises an error."""
    if measured.failure is None:
        return None
    cure = "Run loss.backward() and fix what the error names."
    if "inplace" in measured.failure:
        cure = "Set inplace=False in its activations, and replace x += y by x = x + y where the error occurs."
    return Verdict(
        outcome="fails",
        summary=f"This network can't be trained as it is: its backward pass fails ({measured.failure}). {cure}",
        remedies=(cure,),
        confidence=MAX_CONFIDENCE,
    )


def not_finite(measured: Measured) -> Verdict | None:
    """The verdict on a model whose loss or activations are NaN or infinite."""
    layer = first_not_finite(by_layer(measured, "activation_variance"))
    if layer is None and math.isfinite(measured.numbers.get("loss", 0.0)):
        return None
    symptom = Symptom(STEP, 0.0, layer, "the values are not finite")
    bad = first_not_finite(by_layer(measured, "weight_deviation"))
    cures = remedies(symptom, measured)
    if bad is not None:
        cures = (f"The weights of layer {bad!r} are not finite: initialise or load them again.",)
    where = "" if layer is None else f" from layer {layer!r} on"
    return Verdict(
        outcome="fails",
        summary=f"This network will not train: its values are infinite or NaN{where}. {cures[0]}",
        mechanism=symptom.mechanism,
        layer=layer,
        remedies=cures,
        confidence=confidence(symptom.severity, measured),
    )


# ---------------------------------------------------------------- the five rules


def dissipating(measured: Measured) -> Symptom | None:
    """The noise-to-signal ratio at the last hidden layer: 1 % of noise counts as much as another input.

    Zhang et al. 2024, section 3.1.
    """
    value = measured.numbers.get("input_dissipation", math.nan)
    if not math.isfinite(value):
        return None
    layer = first_beyond(NOISE_TO_SIGNAL, hidden(by_layer(measured, "noise_to_signal")))
    problem = f"1 % of noise moves an input {value:.2f} times as far as another input is away, so the input is lost"
    return Symptom(NOISE_TO_SIGNAL, value, layer, problem)


def singularity(measured: Measured) -> Symptom | None:
    """The part of the last hidden layer's output, before global pooling, that depends on the input is too small.

    Oyedotun et al. 2020, section V.B.
    """
    series = before_pooling(hidden(differences(measured)), measured)
    value = list(series.values())[-1] if series else math.nan
    if not math.isfinite(value):
        return None
    problem = f"all inputs look alike: only a fraction of {value:.1g} of the signal tells them apart"
    return Symptom(DIFFERENCE, value, first_beyond(DIFFERENCE, series), problem)


def differences(measured: Measured) -> dict[str, float]:
    """(1 - cosine_similarity) √recovery by layer: the part of the signal that depends on the input."""
    recovery = finite(by_layer(measured, "recovery"))
    return {
        name: max(0.0, 1 - similarity) * math.sqrt(max(recovery.get(name, 1.0), MIN_RECOVERY))
        for name, similarity in by_layer(measured, "cosine_similarity").items()
    }


def exploding(measured: Measured) -> Symptom | None:
    """Polyak's step, loss / |g|², is small: only very small learning rates are stable (Hu, section 2)."""
    norms = finite(by_layer(measured, "gradient_norm"))
    loss = abs(measured.numbers.get("loss", math.nan))
    total = sum(norm * norm for norm in norms.values())
    if not math.isfinite(loss) or not total > 0 or last_layer_is_zero(measured):
        return None
    squares = accumulate(norm * norm for norm in reversed(norms.values()))  # from the last layer back to each one
    steps = zip(reversed(norms), squares, strict=True)
    layer = next((name for name, square in steps if square > 0 and STEP.exceeded(loss / square)), None)
    step = loss / total
    return Symptom(STEP, step, layer, f"gradients are so large that learning rates above about {step:.0e} are unstable")


def vanishing(measured: Measured) -> Symptom | None:
    """Gradients too small to change the weights: gradient over weight in the first tenth of the trunk's layers.

    These are furthest from the loss. Layers inside a branch do not count if the trunk has weights of its own: a branch
    that starts at zero (zero-initialised norms, layer scale) gets its gradient later, if the trunk carries it.
    """
    sizes = finite(by_layer(measured, "relative_gradient"))
    trunk = {layer.name for layer in measured.layers if layer.trunk}
    sizes = {name: size for name, size in sizes.items() if name in trunk} or sizes
    if not sizes or last_layer_is_zero(measured):
        return None
    first = list(sizes.values())[: max(1, len(sizes) // 10)]
    value = geometric_mean(first) if min(first) > 0 else 0.0
    layer = next((name for name in reversed(sizes) if RELATIVE_GRADIENT.exceeded(sizes[name])), None)
    problem = f"gradients are too small to change the weights ({value:.0e} of their size)"
    return Symptom(RELATIVE_GRADIENT, value, layer, problem)


def last_layer_is_zero(measured: Measured) -> bool:
    """Whether only the last layer has a gradient, since its weights are zero. Others get theirs after an update."""
    norms = list(by_layer(measured, "gradient_norm").values())
    return len(norms) > 1 and norms[-1] > 0 and not any(norms[:-1])


def saturation(measured: Measured) -> Symptom | None:
    """Outputs of an activation that are large and pass no gradient back (Oyedotun et al. 2020, section V.A)."""
    fractions = saturated_fractions(measured)
    if not fractions:
        return None
    value = max(fractions.values())
    layer = next((name for name, fraction in fractions.items() if SATURATION.exceeded(fraction)), None)
    problem = f"{value:.0%} of the outputs are saturated and pass no gradient back"
    return Symptom(SATURATION, value, layer, problem)


def saturated_fractions(measured: Measured) -> dict[str, float]:
    """The smallest possible fraction of outputs that are both blocked and not small, blocked + above - 1, by layer.

    Outputs that are blocked because they are zero, as after a ReLU, do not count.
    """
    above = by_layer(measured, "fraction_above_small")
    blocked = by_layer(measured, "gradient_blocked")
    return finite({name: max(0.0, value + above.get(name, math.nan) - 1) for name, value in blocked.items()})


# ---------------------------------------------------------------- remedies


def remedies(symptom: Symptom, measured: Measured) -> tuple[str, ...]:
    """What helps against a mechanism in this model, the most likely first."""
    kinds = {layer.kind for layer in measured.layers}
    norm = [] if "norm" in kinds else ["Add a BatchNorm or LayerNorm before each activation."]
    skips = "Keep or add a skip connection every two layers."
    tied = ["Initialise each pair of layers as a matrix and its transpose, as unskip's seqnet_mlp does."]
    sizes = "N(0, 2/fan_in) before a ReLU or GELU, orthogonal before a tanh"
    convolutional = "conv" in kinds  # plainify rebuilds convolutional models
    match symptom.mechanism:
        case "saturation":
            cures = ["Initialise the weights smaller, so that the activations are not saturated.", *norm]
        case "dissipating":
            cures = [*(plainify_remedies("pnnh", "seq") if convolutional else tied), *norm]
        case "singularity":
            leaky = "Use a leaky ReLU with slope 0.3: negative outputs keep units and inputs distinct."
            cures = [*norm, leaky, *(plainify_remedies("pnnh") if convolutional else tied)]
        case "exploding gradient":
            smaller = [f"Initialise the weights smaller: {sizes}."] if norm else []
            lower = [f"Train with a learning rate below {symptom.value:.0e}."] if 1e-5 < symptom.value < 1 else []
            cures = [*norm, *smaller, *(plainify_remedies("seq", "pnnh") if convolutional else []), *lower]
        case "vanishing gradient":
            adaptive = "Train it with AdamW, whose steps do not shrink with the gradient."
            larger = f"Initialise the weights larger: {sizes}."
            cures = [larger, *norm, adaptive] if norm else [adaptive, larger]
    return (*cures, skips)


def plainify_remedies(*methods: str) -> list[str]:
    """Remedies that rebuild the model with each of the methods that are registered."""
    known = [method for method in methods if method in method_names()]
    return [f"Rebuild it from its residual form with unskip.plainify(model, method={method!r})." for method in known]


# ---------------------------------------------------------------- series


def by_layer(measured: Measured, name: str) -> dict[str, float]:
    """The values of a series by layer; empty if it was not measured."""
    return measured.series[name].by_layer() if name in measured.series else {}


def finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def first_not_finite(values: dict[str, float]) -> str | None:
    return next((name for name, value in values.items() if not math.isfinite(value)), None)


def hidden(values: dict[str, float]) -> dict[str, float]:
    """The finite values of all but the last layer, the classifier, which may discard information."""
    return finite(dict(list(values.items())[:-1]) if len(values) > 1 else values)


def before_pooling(values: dict[str, float], measured: Measured) -> dict[str, float]:
    """The values of layers before global pooling, if that is in the trunk.

    Averaged over many positions, outputs of a ReLU are similar for all inputs even in networks that train well
    (torchvision's ResNet-18: a cosine of 0.56 before and 0.97 after), and a bias in the classifier subtracts the mean.
    """
    names = [layer.name for layer in measured.layers]
    for index, layer in enumerate(measured.layers):
        if layer.trunk and layer.kind == "pool" and math.prod(layer.shape[2:]) == 1:
            return {name: value for name, value in values.items() if name in names[:index]} or values
    return values


def first_beyond(limit: Limit, values: dict[str, float]) -> str | None:
    """The first layer from which the values exceed the limit in all following layers."""
    first = None
    for name in reversed(values):
        if not limit.exceeded(values[name]):
            break
        first = name
    return first
