"""The conditioning bound (Oyedotun et al. 2020, Proposition 1) against least squares."""

import math

import numpy as np
import pytest

from unskip.theory import condition_number, relative_change_bound


def changes(n: int, N: int, eta: float, seed: int) -> tuple[float, float]:
    """κ(X), and ‖ΔW‖ / ‖W‖ of the least-squares solution if X changes along its smallest singular value."""
    rng = np.random.default_rng(seed)
    X, W = rng.standard_normal((n, N)), rng.standard_normal((4, n))
    U, s, Vt = np.linalg.svd(X, full_matrices=False)
    # W along the direction whose singular value shrinks: the change that the bound is about.
    W = W @ np.outer(U[:, -1], U[:, -1]) + 1e-3 * W
    aligned = -np.outer(U[:, -1], Vt[-1])
    noise = rng.standard_normal((n, N))
    direction = aligned if seed % 2 else noise / np.linalg.norm(noise, 2)
    moved = np.linalg.lstsq((X + eta * s[0] * direction).T, (W @ X).T, rcond=None)[0].T
    return condition_number(X), np.linalg.norm(moved - W, 2) / np.linalg.norm(W, 2)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_no_change_of_weights_exceeds_the_bound(share: float) -> None:
    tightest = 0.0
    for seed in range(60):
        n, N = 5, 5 + seed % 12
        kappa, _ = changes(n, N, 0.0, seed)
        _, change = changes(n, N, share / kappa, seed)
        bound = relative_change_bound(kappa, share / kappa)
        assert change <= bound * (1 + 1e-9)
        tightest = max(tightest, change / bound)
    assert tightest > 0.95  # reached, so no smaller bound would do


def test_finite_changes_exceed_the_printed_bound() -> None:
    kappa, _ = changes(5, 9, 0.0, 1)
    _, change = changes(5, 9, 0.5 / kappa, 1)
    assert change > 1.5 * relative_change_bound(kappa, 0.5 / kappa, first_order=True)
    _, change = changes(5, 9, 1e-4 / kappa, 1)
    assert change <= 1.001 * relative_change_bound(kappa, 1e-4 / kappa, first_order=True)


def test_condition_number_is_numpys_and_infinite_where_singular() -> None:
    X = np.random.default_rng(0).standard_normal((6, 9))
    assert condition_number(X) == pytest.approx(np.linalg.cond(X))
    assert condition_number(np.vstack([X, X[:1]])) == math.inf
    assert condition_number(np.zeros((2, 3))) == math.inf


def test_a_non_linearity_can_raise_the_rank() -> None:
    """Lemma 1 is about products; f stands between layers, so a singular layer need not make the next one singular."""
    rng = np.random.default_rng(0)
    H = np.outer(rng.standard_normal(6), rng.standard_normal(40))
    W = rng.standard_normal((6, 6))
    assert np.linalg.matrix_rank(W @ H) == 1
    assert np.linalg.matrix_rank(np.maximum(W @ H, 0)) == 2
    assert np.linalg.matrix_rank(np.tanh(W @ H)) > 2


def test_wrong_arguments_are_named() -> None:
    assert relative_change_bound(math.inf, 0.0) == 0
    assert relative_change_bound(10.0, 0.1) == math.inf
    with pytest.raises(ValueError, match=r"kappa=0\.5 must be at least 1"):
        relative_change_bound(0.5, 0.1)
    with pytest.raises(ValueError, match="must be a matrix of finite numbers"):
        condition_number([[1.0, math.nan]])
