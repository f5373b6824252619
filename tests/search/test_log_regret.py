"""Log regret: shares of drawn fronts, and what measurements are worth."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.pareto import hypervolume, reference_point
from tuner.search.log_regret import LEAST_REGRET, LogRegret

RNG = np.random.default_rng(3)
TIME = RNG.normal(0, 0.3, (6, 9))
ENERGY = RNG.normal(0, 0.3, (6, 9)) - 0.5 * TIME


def missing(energy: np.ndarray, time: np.ndarray, chosen: list[int]) -> float:
    """Share of one draw's front that these points miss."""
    points = np.column_stack([energy, time])
    reference = reference_point(points)
    return 1 - hypervolume(points[chosen], reference) / hypervolume(points, reference)


def test_what_is_missing_is_each_draws_own() -> None:
    regret = LogRegret(ENERGY, TIME, measured=3)
    expected = [missing(e, t, [0, 1, 2]) for e, t in zip(ENERGY, TIME, strict=True)]
    assert regret.missing == pytest.approx(expected)


def test_the_noise_is_what_noisy_points_show() -> None:
    # A dominated point, and one beyond the reference of the front, take no part.
    points = np.array([[0.1, 0.8], [0.3, 0.5], [0.6, 0.2], [0.5, 0.7], [0.9, 0.19]])
    regret = LogRegret(points[None, :, 0], points[None, :, 1], measured=1)
    reference = reference_point(points)
    draws = np.random.default_rng(0).normal(size=(4000, 5, 2)) * [0.002, 0.01]
    noisy = [
        hypervolume(points + np.column_stack([t + p, t]), reference)
        for t, p in draws.transpose(0, 2, 1)
    ]
    share = np.std(noisy) / hypervolume(points, reference)
    assert regret.noise(0.002, 0.01) == pytest.approx([share], rel=0.05)
    assert regret.noise(0.0, 0.0) == 0.0


def test_what_a_gain_saves_is_averaged_over_the_fronts_times() -> None:
    regret = LogRegret(ENERGY, TIME, measured=3)
    for draw, (e, t) in enumerate(zip(ENERGY, TIME, strict=True)):
        points = np.column_stack([e, t])
        reference = reference_point(points)
        left = hypervolume(points, reference) - hypervolume(points[:3], reference)
        assert regret.saving[draw] == pytest.approx(left / (reference[1] - t.min()))


def test_shares_are_what_is_no_longer_missing() -> None:
    regret = LogRegret(ENERGY, TIME, measured=3)
    one = regret.shares(regret.front_energy, regret.front_time, np.array([2]))[:, 0]
    both = regret.together(np.array([2, 4]))
    for draw, (e, t) in enumerate(zip(ENERGY, TIME, strict=True)):
        before = missing(e, t, [0, 1, 2])
        assert one[draw] == pytest.approx(before - missing(e, t, [0, 1, 2, 5]))
        assert both[draw] == pytest.approx(before - missing(e, t, [0, 1, 2, 5, 7]))
    assert regret.together(np.arange(6)) == pytest.approx(regret.missing)


def test_every_draw_counts_alike_but_for_what_a_search_need_not_find() -> None:
    regret = LogRegret(ENERGY, TIME, measured=3)
    assert regret.reduction(np.zeros(6)) == pytest.approx(np.zeros(6))
    half = regret.reduction(regret.missing / 2)
    large = regret.missing > 20 * LEAST_REGRET
    assert half[large] == pytest.approx(np.full(large.sum(), np.log(2)), rel=0.08)
    rest = regret.reduction(regret.missing)
    assert rest == pytest.approx(np.log(1 + regret.missing / LEAST_REGRET))
