"""The papers' formulas as pure functions of numbers, in float64, each tested against simulation."""

from unskip.theory.conditioning import condition_number, relative_change_bound
from unskip.theory.dominance import (
    dominance_ratio,
    expected_dominance_plain,
    expected_dominance_residual,
    probability_larger,
    probability_larger_logistic,
)
from unskip.theory.normal import ActivationMoments, activation_moments
from unskip.theory.scaling import (
    FixedPoint,
    Scaling,
    activation,
    batch_norm,
    growth_rate,
    linear,
    max_pool,
    residual,
    two_layer,
    unnormalised,
)
from unskip.theory.survival import (
    Response,
    activation_cosine,
    collapsing_depth,
    linear_fidelity,
    minimum_collapsing_depth,
    relu_cosine,
    response,
    survival_bound,
    surviving_fraction,
    unit_statistics,
)
from unskip.theory.updates import common_growth

__all__ = [
    "ActivationMoments",
    "FixedPoint",
    "Response",
    "Scaling",
    "activation",
    "activation_cosine",
    "activation_moments",
    "batch_norm",
    "collapsing_depth",
    "common_growth",
    "condition_number",
    "dominance_ratio",
    "expected_dominance_plain",
    "expected_dominance_residual",
    "growth_rate",
    "linear",
    "linear_fidelity",
    "max_pool",
    "minimum_collapsing_depth",
    "probability_larger",
    "probability_larger_logistic",
    "relative_change_bound",
    "relu_cosine",
    "residual",
    "response",
    "survival_bound",
    "surviving_fraction",
    "two_layer",
    "unit_statistics",
    "unnormalised",
]
