"""The verdict: whether a model will train, and if not, in which layer it goes wrong, by what mechanism, and what helps.

The remedies are those that helped in benchmarks/records/2026-11-18_remedies_cpu, and a method is only proposed if it
rebuilds this model.

Six rules, one function each, compare one quantity of the untrained model with a limit. `severity` puts all on one
scale: 0 at the limit, 1 where the slack ends, negative if healthy. The most severe rule decides. Limits and slacks were
set on 34 small networks trained on digits with SGD (benchmarks/verdict), that of rank collapse on small GPTs trained
with AdamW (benchmarks/records/2026-11-19_gpt-start_cpu). They say nothing about how good a network that trains will be.
"""

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import geometric_mean
from typing import Literal

from unskip.doctor.remedies import Mechanism, Rebuilds, always, remedies
from unskip.measures import COLLAPSED, UPDATES, Measured, last_tokens

Outcome = Literal["trains", "doubtful", "fails"]
FAMILIES = ("activation", "gradient", "dissipation", "tokens")  # the measures that the rules need
DOUBT = 0.25  # severities this close to 0 are doubtful: a confidence below 62 %
MAX_CONFIDENCE = 0.9  # 21 of 24 networks in the test were judged correctly
MAX_CONFIDENCE_LARGE = 0.75  # for images larger than those behind the limits: 7 of 9 networks known to train
MAX_IMAGE = 64  # px, beyond which images count as large; the limits come from images of at most 32
STEEPNESS = 2.0  # confidence is 1 / (1 + exp(-STEEPNESS |severity|))
PARTLY_SATURATED = 0.3  # above this fraction, saturation is the cause of lost inputs and gradients
VANISHED = 8.0  # severity above which a vanishing gradient is the reason why inputs look alike
MEASURE_AGAIN = "Measure it on a batch of at least 16 real inputs, with parameters that require gradients."


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the measures of a model mean."""

    outcome: Outcome
    summary: str  # outcome, layer, mechanism and values in words
    mechanism: Mechanism | None = None  # what goes wrong, if anything does
    layer: str | None = None  # the first layer where it does, in the direction of the signal or of the gradient
    remedies: tuple[str, ...] = ()  # what would help, the most likely first; full sentences
    measures: tuple[str, ...] = ()  # the measures that are beyond their limits, the worst first
    confidence: float  # that the outcome is right, 0.5 to MAX_CONFIDENCE


@dataclass(frozen=True)
class Limit:
    """The limit of one rule, and how wide the region of doubt around it is."""

    mechanism: Mechanism
    measure: str  # the series that shows it layer by layer
    at: float
    slack: float  # factor from the limit to near certainty; below 1 for quantities that are harmful when small
    text: str = ".2g"  # format of its values

    def severity(self, value: float) -> float:
        if value <= 0:
            return math.inf if self.slack < 1 else -math.inf
        return math.log(value / self.at) / math.log(self.slack)

    def exceeded(self, value: float) -> bool:
        return self.severity(value) > 0


NOISE_TO_SIGNAL = Limit("dissipating", "noise_to_signal", at=0.65, slack=1.3)
DIFFERENCE = Limit("singularity", "difference", at=0.026, slack=0.6)
STEP = Limit("exploding gradient", "gradient_norm", at=6e-4, slack=0.5, text=".0e")
RELATIVE_GRADIENT = Limit("vanishing gradient", "relative_gradient", at=6e-3, slack=0.7, text=".1g")
SATURATION = Limit("saturation", "gradient_blocked", at=0.8, slack=1.15, text=".0%")
RANK_COLLAPSE = Limit("rank collapse", "token_spread", at=0.5, slack=0.6)  # of a network that answers for each token
RANK_COLLAPSE_CLASSES = Limit("rank collapse", "token_spread", at=1e-4, slack=0.1)  # of one that answers once


@dataclass(frozen=True)
class Symptom:
    """The result of one rule."""

    limit: Limit
    value: float  # what decides
    where: str  # the place of that value, as a phrase
    layer: str | None  # the first layer where the limit is crossed, in the direction of the signal or of the gradient
    there: float  # the value at that layer
    problem: str  # what happens in the model, as a clause that follows the outcome

    @property
    def mechanism(self) -> Mechanism:
        return self.limit.mechanism

    @property
    def severity(self) -> float:
        """0 at the limit, positive beyond it."""
        return self.limit.severity(self.value)

    @property
    def values(self) -> str:
        """The values at the layer and at the end, beside the limit."""
        there, end, at = (format(value, self.limit.text) for value in (self.there, self.value, self.limit.at))
        first = "" if self.layer is None else f"{there} there, "
        return f"{first}{end} {self.where}, limit {at}"


def judge(measured: Measured, *, trained: bool = False, rebuilds: Rebuilds = always) -> Verdict:
    """The verdict on an untrained model, from its measures alone.

    A measure that is missing or not finite disables its rule. If neither the gradient nor the input could be followed
    through the model, the verdict is doubtful at best, unless another rule fails. The limits do not apply to `trained`
    models, and their verdict says so. A method that `rebuilds` says does not take this model is no remedy.
    """
    verdict = backward_fails(measured) or not_finite(measured)
    if verdict is not None:
        return verdict
    verdict = apply_rules(measured, rebuilds)
    if verdict.outcome != "fails":
        verdict = collapses(measured) or verdict
    if not trained:
        return verdict
    caution = "However, its weights are trained, and the limits are for untrained networks: rely on the measures."
    return replace(verdict, summary=f"{verdict.summary} {caution}", confidence=0.5)


def apply_rules(measured: Measured, rebuilds: Rebuilds) -> Verdict:
    """The verdict of the most severe rule."""
    if measured.samples == 1:
        return doubtful("A single input is not enough: the rules compare several.", MEASURE_AGAIN)
    rules = (dissipating, singularity, exploding, vanishing, saturation, rank_collapse)
    symptoms = {found.mechanism: found for rule in rules if (found := rule(measured)) is not None}
    if not symptoms:
        return doubtful("Neither the signal nor the gradient of this network could be measured.", MEASURE_AGAIN)
    worst = max(symptoms.values(), key=lambda symptom: symptom.severity)
    if worst.severity > -DOUBT:
        return unhealthy(cause(worst, symptoms, measured), worst.severity, symptoms, measured, rebuilds)
    for mechanism, what in (("dissipating", "input"), ("exploding gradient", "gradient")):
        if mechanism not in symptoms:
            hint = MEASURE_AGAIN
            if last_layer_is_zero(measured):
                hint = "Measure it again after an update: its last layer starts at zero and hides all other gradients."
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
    return Verdict(outcome="doubtful", summary=summary, remedies=(hint,), confidence=0.5)


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
        layer = next(name for name, value in fractions.items() if value > PARTLY_SATURATED)
        limit = replace(SATURATION, at=PARTLY_SATURATED)
        worst = replace(saturated, limit=limit, layer=layer, there=fractions[layer])
    return worst


def unhealthy(
    symptom: Symptom,
    severity: float,
    symptoms: dict[Mechanism, Symptom],
    measured: Measured,
    rebuilds: Rebuilds,
) -> Verdict:
    """The verdict on a model with a symptom beyond its limit, or so close to it that it is doubtful.

    Small gradients alone, with a signal that gets through, are a problem for SGD only, and the summary says so.
    """
    others = [other for other in symptoms.values() if other.mechanism != symptom.mechanism]
    only_sgd = symptom.mechanism == "vanishing gradient" and not any(other.severity > 0 for other in others)
    cures = remedies(symptom.mechanism, measured, rebuilds, only_sgd=only_sgd)
    unsure = severity < DOUBT
    opening = "It is doubtful whether this network trains" if unsure else "This network will most likely not train"
    opening += " with SGD" if only_sgd else ""
    caution = " The limits come from smaller images." if has_large_images(measured) else ""
    beyond = sorted((s for s in others if s.severity > 0), key=lambda s: -s.severity)
    return Verdict(
        outcome="doubtful" if unsure else "fails",
        summary=f"{opening}: {place(symptom, measured)}{symptom.problem} ({symptom.mechanism}; {symptom.values})."
        f"{caution}",
        mechanism=symptom.mechanism,
        layer=symptom.layer,
        remedies=cures,
        measures=tuple(dict.fromkeys(s.limit.measure for s in (symptom, *beyond))),
        confidence=confidence(severity, measured),
    )


def place(symptom: Symptom, measured: Measured) -> str:
    """Where a symptom begins, in the direction of the signal or of the gradient."""
    if symptom.layer is None:
        return ""
    depth = next((layer.depth for layer in measured.layers if layer.name == symptom.layer), 0)
    count = f" ({depth} of {measured.depth})" if depth else ""
    towards = "back to the input" if symptom.mechanism.endswith("gradient") else "on"
    return f"from layer {symptom.layer!r}{count} {towards}, "


def bands(measured: Measured) -> dict[str, tuple[float | None, float | None]]:
    """The healthy band, lowest and highest value, of each measure that a limit applies to layer by layer.

    The norm of one layer's gradient is too large if it alone brings Polyak's step below its limit.
    """
    found: dict[str, tuple[float | None, float | None]] = {
        NOISE_TO_SIGNAL.measure: (None, NOISE_TO_SIGNAL.at),
        DIFFERENCE.measure: (DIFFERENCE.at, None),
        RELATIVE_GRADIENT.measure: (RELATIVE_GRADIENT.at, None),
        RANK_COLLAPSE.measure: (token_limit(measured).at, None),
    }
    loss = abs(measured.numbers.get("loss", math.nan))
    if math.isfinite(loss) and loss > 0:
        found[STEP.measure] = (None, math.sqrt(loss / STEP.at))
    return found


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
        summary=f"This network can't be trained as it is: its backward pass fails ({measured.failure}).",
        remedies=(cure,),
        confidence=MAX_CONFIDENCE,
    )


def not_finite(measured: Measured) -> Verdict | None:
    """The verdict on a model whose loss or activations are NaN or infinite."""
    layer = first_not_finite(by_layer(measured, "activation_variance"))
    if layer is None and math.isfinite(measured.numbers.get("loss", 0.0)):
        return None
    bad = first_not_finite(by_layer(measured, "weight_deviation"))
    cures = remedies("exploding gradient", measured, always)
    if bad is not None:
        cures = (f"The weights of layer {bad!r} are not finite: initialise or load them again.",)
    where = "" if layer is None else f" from layer {layer!r} on"
    return Verdict(
        outcome="fails",
        summary=f"This network will not train: its values are infinite or NaN{where}.",
        mechanism="exploding gradient",
        layer=layer,
        remedies=cures,
        measures=("activation_variance",),
        confidence=confidence(math.inf, measured),
    )


# ---------------------------------------------------------------- the six rules


def dissipating(measured: Measured) -> Symptom | None:
    """The noise-to-signal ratio at the last hidden layer: 1 % of noise counts as much as another input.

    Zhang et al. 2024, section 3.1.
    """
    value = measured.numbers.get("input_dissipation", math.nan)
    if not math.isfinite(value):
        return None
    series = hidden(by_layer(measured, "noise_to_signal"))
    problem = "1 % of noise moves an input about as far as another input is away, so the input is lost"
    return symptom(
        NOISE_TO_SIGNAL, value, "at the last hidden layer", first_beyond(NOISE_TO_SIGNAL, series), series, problem
    )


def singularity(measured: Measured) -> Symptom | None:
    """The part of the last hidden layer's output, before global pooling, that depends on the input is too small.

    Oyedotun et al. 2020, section V.B.
    """
    series = before_pooling(hidden(by_layer(measured, "difference")), measured)
    value = list(series.values())[-1] if series else math.nan
    if not math.isfinite(value):
        return None
    problem = "all inputs look alike: too small a fraction of the signal tells them apart"
    return symptom(DIFFERENCE, value, "at the last hidden layer", first_beyond(DIFFERENCE, series), series, problem)


def exploding(measured: Measured) -> Symptom | None:
    """Polyak's step, loss / |g|², is small: only very small learning rates are stable (Hu, section 2)."""
    norms = finite(by_layer(measured, "gradient_norm"))
    loss = abs(measured.numbers.get("loss", math.nan))
    total = sum(norm * norm for norm in norms.values())
    if not math.isfinite(loss) or not total > 0 or last_layer_is_zero(measured):
        return None
    squares = accumulate(norm * norm for norm in reversed(norms.values()))  # from the last layer back to each one
    steps = {name: loss / square for name, square in zip(reversed(norms), squares, strict=True) if square > 0}
    layer = next((name for name, step in steps.items() if STEP.exceeded(step)), None)
    problem = "gradients are so large that only tiny learning rates are stable"
    return symptom(STEP, loss / total, "at the first layer", layer, steps, problem)


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
    problem = "gradients are too small, relative to the weights, to change them"
    return symptom(RELATIVE_GRADIENT, value, "in the first layers", layer, sizes, problem)


def collapses(measured: Measured) -> Verdict | None:
    """The verdict on a network whose first updates make its tokens alike, where an optimizer was given."""
    value, layer = measured.numbers.get("token_spread_updated", math.inf), last_tokens(measured)
    if layer is None or not value < COLLAPSED or token_limit(measured) is not RANK_COLLAPSE:
        return None
    factor = measured.numbers.get("starting_rate_factor", math.nan)
    tried: tuple[str, ...] = ()
    if math.isfinite(factor):
        share = "third" if factor > 0.3 else f"{round(1 / factor)}th"
        tried = (f"Lower the learning rate to a {share}, with which the first updates keep tokens apart (tried).",)
    return Verdict(
        outcome="fails",
        summary=f"This network will most likely not start with this optimizer and learning rate: one of its first "
        f"{UPDATES} updates makes the tokens of an input alike (rank collapse; token spread {value:.2g} behind "
        f"{layer!r}, limit {COLLAPSED:g}). Without skips the same change of each layer multiplies.",
        mechanism="rank collapse",
        layer=layer,
        remedies=(*tried, "Train it with Muon, whose updates have a small spectral norm, or with a warm-up."),
        measures=("token_spread",),
        confidence=MAX_CONFIDENCE_LARGE,
    )


def rank_collapse(measured: Measured) -> Symptom | None:
    """The tokens of an input are alike behind the last layer, so that no layer can tell them apart.

    Dong et al. 2021, arXiv:2103.03404. Of layers outside of branches, and only in networks with attention.
    """
    trunk, limit = {layer.name for layer in measured.layers if layer.trunk}, token_limit(measured)
    spread = hidden(by_layer(measured, "token_spread"))
    spread = {name: value for name, value in spread.items() if name in trunk}
    if not spread:
        return None
    value = list(spread.values())[-1]
    problem = "the tokens of an input become alike, since attention without a skip averages them layer by layer"
    return symptom(limit, value, "at the last hidden layer", first_beyond(limit, spread), spread, problem)


def token_limit(measured: Measured) -> Limit:
    """The limit of token spread. A classifier, which tells inputs apart, can do with tokens that differ little."""
    answers = bool(measured.layers) and measured.layers[-1].name in by_layer(measured, "token_spread")
    return RANK_COLLAPSE if answers else RANK_COLLAPSE_CLASSES


def symptom(
    limit: Limit, value: float, where: str, layer: str | None, series: dict[str, float], problem: str
) -> Symptom:
    """The symptom with its value at the layer, from the quantity by layer."""
    return Symptom(limit, value, where, layer, math.nan if layer is None else series[layer], problem)


def last_layer_is_zero(measured: Measured) -> bool:
    """Whether only the last layer has a gradient, since its weights are zero. Others get theirs after an update."""
    norms = list(by_layer(measured, "gradient_norm").values())
    return len(norms) > 1 and norms[-1] > 0 and not any(norms[:-1])


def saturation(measured: Measured) -> Symptom | None:
    """Outputs of an activation that are large and pass no gradient back (Oyedotun et al. 2020, section V.A)."""
    fractions = saturated_fractions(measured)
    if not fractions:
        return None
    layer = next((name for name, fraction in fractions.items() if SATURATION.exceeded(fraction)), None)
    problem = "outputs are saturated and pass no gradient back"
    return symptom(SATURATION, max(fractions.values()), "in the worst layer", layer, fractions, problem)


def saturated_fractions(measured: Measured) -> dict[str, float]:
    """The smallest possible fraction of outputs that are both blocked and not small, blocked + above - 1, by layer.

    Outputs that are blocked because they are zero, as after a ReLU, do not count.
    """
    above = by_layer(measured, "fraction_above_small")
    blocked = by_layer(measured, "gradient_blocked")
    return finite({name: max(0.0, value + above.get(name, math.nan) - 1) for name, value in blocked.items()})


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
