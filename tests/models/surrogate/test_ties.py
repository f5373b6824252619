"""Decisions do not hang on last bits: equal values keep their order, others their rank."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.models.surrogate.kernel import draw_normal
from tuner.models.surrogate.ties import TOLERANCE, first_best, ranked


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


def test_draws_of_equal_variances_do_not_change_with_rounding() -> None:
    normals = np.random.default_rng(0).standard_normal((64, 6))
    noise = 1e-15 * np.random.default_rng(1).standard_normal((6, 6))
    drawn = draw_normal(np.zeros(6), np.eye(6), normals)
    again = draw_normal(np.zeros(6), np.eye(6) + noise + noise.T, normals)
    assert np.abs(drawn - again).max() < 1e-12


def test_draws_of_a_singular_covariance_are_equal() -> None:
    drawn = draw_normal(np.zeros(4), np.ones((4, 4)), np.random.default_rng(0).random((8, 4)))
    assert np.ptp(drawn, axis=1).max() < 1e-3
