"""What the functions of this room ask of their arguments, and the sentences that say so."""

import math


def positive(function: str, **values: float) -> None:
    """Refuses what is not finite and above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{function}: {name}={value} must be finite and above 0.")


def not_negative(function: str, **values: float) -> None:
    """Refuses what is not finite and at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{function}: {name}={value} must be finite and at least 0.")


def probability(function: str, **values: float) -> None:
    """Refuses what is not in 0 to 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{function}: {name}={value} must be a probability, 0 to 1.")


def at_least(function: str, least: int, **values: int) -> None:
    """Refuses whole numbers below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{function}: {name}={value} must be at least {least}.")
