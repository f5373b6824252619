"""Decisions do not hang on last bits: equal values keep their order, others their rank."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.models.surrogate.gaussian_process import TOLERANCE, first_best, lower_root, ranked


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_of_values_that_differ_by_rounding_is_best(scale: float, seed: int) -> None:
    values = np.array([0.1, 0.7, 0.3, 0.7, 0.1, 0.7]) * scale
    noise = 1 + 1e-12 * np.random.default_rng(seed).standard_normal(len(values))
    assert first_best(values * noise) == 1
    assert ranked(values * noise).tolist() == [1, 3, 5, 2, 0, 4]


def test_a_difference_beyond_the_tolerance_decides() -> None:
    assert first_best(np.array([1.0, 1 + 3 * TOLERANCE])) == 1
    assert first_best(-np.array([1.0, 1 - 3 * TOLERANCE])) == 1
    assert ranked(np.array([1.0, 1 + 3 * TOLERANCE])).tolist() == [1, 0]


def test_rounding_errors_of_zero_rank_as_zero() -> None:
    assert ranked(np.array([0.0, 1e-17, 0.5, -1e-18])).tolist() == [2, 0, 1, 3]
    assert first_best(np.zeros(3)) == 0
    assert ranked(np.empty(0)).tolist() == []


def test_infinite_values_are_worst_or_best() -> None:
    assert first_best(np.array([-np.inf, 2.0, 2.0])) == 1
    assert first_best(np.array([1.0, np.inf])) == 1
    assert ranked(np.array([-np.inf, 1.0, 2.0])).tolist() == [2, 1, 0]


def test_many_values_are_ranked_as_sorted() -> None:
    values = np.random.default_rng(0).random(100_000)
    assert (
        np.abs(np.diff(values[ranked(values)])[np.diff(values[ranked(values)]) > 0]).max(initial=0)
        <= TOLERANCE
    )


def test_a_root_of_equal_variances_does_not_change_with_rounding() -> None:
    noise = 1e-15 * np.random.default_rng(1).standard_normal((6, 6))
    again = lower_root(np.eye(6) + noise + noise.T, 1.0)
    assert np.abs(lower_root(np.eye(6), 1.0) - again).max() < 1e-12


def test_a_singular_covariance_has_a_root() -> None:
    root = lower_root(np.ones((4, 4)), 1.0)
    assert np.abs(root @ root.T - 1).max() < 1e-4
