"""Argument checks of the theory functions."""

import math


def positive(function: str, **values: float) -> None:
    """Raises ValueError unless all values are finite and above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{function}: {name}={value} must be finite and above 0.")


def at_least(function: str, minimum: float, **values: float) -> None:
    """Raises ValueError unless all values are finite and at least `minimum`."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= minimum):
            raise ValueError(f"{function}: {name}={value} must be finite and at least {minimum}.")


def probability(function: str, **values: float) -> None:
    """Raises ValueError unless all values are between 0 and 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{function}: {name}={value} must be a probability, 0 to 1.")


def one_of(function: str, choices: tuple[str, ...], **values: str) -> None:
    """Raises ValueError unless all values are among `choices`."""
    for name, value in values.items():
        if value not in choices:
            raise ValueError(f"{function}: {name}={value!r} must be one of {', '.join(map(repr, choices))}.")
