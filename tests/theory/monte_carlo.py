"""Comparing a formula with simulation."""

import numpy as np

SIGMAS = 4.5  # standard errors that a true formula may be off by: once in 150,000 comparisons


def assert_mean(samples: np.ndarray, formula: float, *, slack: float = 0.0) -> None:
    """The mean of independent samples is the formula's, to within their standard error (and `slack`, for limits)."""
    samples = np.asarray(samples, dtype=np.float64)
    error = samples.std(ddof=1) / np.sqrt(len(samples))
    assert error < 0.1 * abs(formula) + 0.02, f"too few samples to tell anything: {formula} against ± {error}"
    off = abs(samples.mean() - formula)
    assert off <= SIGMAS * error + slack, f"simulated {samples.mean():.5f} ± {error:.5f}, formula {formula:.5f}"
