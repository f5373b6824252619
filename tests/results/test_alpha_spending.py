"""Levels of verification's tests: what all of them together may make of errors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tuner.problem.settings import MOST_PAIRS
from tuner.results.alpha_spending import (
    ATTEMPT_SHARES,
    FEW_PAIRS_SHARES,
    LATER_SHARE,
    LEAST_PAIRS,
    LEVEL,
    MOST_TRIES,
    look_level,
    with_plan,
)


@pytest.fixture(scope="module")
def p_values() -> np.ndarray:
    """One-sided p-values of looks at 2 to `MOST_PAIRS` pairs without a difference, (looks, n)."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 200_000, MOST_PAIRS))
    looks = []
    for n in range(LEAST_PAIRS, MOST_PAIRS + 1):
        x, y = a[:, :n], b[:, :n]
        error = np.sqrt((x.var(axis=1) + y.var(axis=1)) / (n - 1))
        looks.append(stats.t.sf((x.mean(1) - y.mean(1)) / error, 2 * n - 2))
    return np.array(looks)


@pytest.mark.parametrize("planned", range(LEAST_PAIRS, MOST_PAIRS + 1))
def test_the_planned_looks_of_a_candidate_spend_its_share(
    p_values: np.ndarray, planned: int
) -> None:
    looks = range(LEAST_PAIRS, planned + 1)
    levels = np.array([look_level(0, pairs, [planned]) for pairs in looks])
    share = ATTEMPT_SHARES[0] if planned == MOST_PAIRS else FEW_PAIRS_SHARES[0]
    crossed = (p_values[: len(levels)] < levels[:, None]).any(axis=0)
    assert 0.75 * share * LEVEL < crossed.mean() < 1.05 * share * LEVEL


@pytest.mark.parametrize("planned", [2, 3, 5])
def test_looks_that_higher_limits_add_spend_what_was_kept(
    p_values: np.ndarray, planned: int
) -> None:
    looks = range(LEAST_PAIRS, MOST_PAIRS + 1)
    levels = np.array([look_level(0, pairs, [planned]) for pairs in looks])
    later = levels[planned - LEAST_PAIRS + 1 :]
    assert (later > 0).all()
    crossed = (p_values < levels[:, None]).any(axis=0)
    assert crossed.mean() < 1.05 * (FEW_PAIRS_SHARES[0] + LATER_SHARE) * LEVEL


def test_the_shares_add_up_to_the_whole() -> None:
    assert sum(ATTEMPT_SHARES) == pytest.approx(1)
    assert sum(FEW_PAIRS_SHARES) + LATER_SHARE == pytest.approx(1)
    assert look_level(MOST_TRIES, 5, []) == 0.0


def test_a_later_candidate_has_no_looks_beyond_its_plan_with_few_pairs() -> None:
    assert look_level(1, 2, [4, 2]) > 0
    assert look_level(1, 3, [4, 2]) == 0.0


def test_an_older_study_keeps_its_levels() -> None:
    for rank in range(MOST_TRIES):
        for pairs in range(LEAST_PAIRS, MOST_PAIRS + 1):
            expected = 0.2 * 0.05 * ATTEMPT_SHARES[rank]
            assert look_level(rank, pairs, []) == pytest.approx(expected)


def test_a_plan_stays_once_it_is_declared() -> None:
    assert with_plan((), 0, 3) == (3,)
    assert with_plan((3,), 0, 20) == (3,)
    assert with_plan((3,), 1, 20) == (3, MOST_PAIRS)
    assert with_plan((), 1, 2) == (MOST_PAIRS, 2)  # the first is of an older release
