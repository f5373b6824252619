"""Sweeps of a launch: their settings, value and expected joules."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.search.log_regret import LogRegret, Sweep

WINDOWS_J = np.array([1.0, 2.0, 3.0, 4.0, 5.0])


def sweep_of(level: float, launch_J: float = 10.0) -> Sweep:
    """Five settings along a trade-off, at about `level` in log time and energy from a front."""
    rng = np.random.default_rng(0)
    own = rng.normal(0, 0.1, (128, 1)) + level
    slope = np.linspace(-0.3, 0.3, 5) + rng.normal(0, 0.005, (128, 5))
    front = np.tile([-0.3, 0.0, 0.3], (128, 1))
    regret = LogRegret(
        np.hstack([front, own + slope]), np.hstack([-front, own - slope]), measured=3
    )
    return Sweep(regret, np.arange(5), launch_J * WINDOWS_J, WINDOWS_J)


def test_a_launch_that_is_surely_good_is_expected_whole_and_a_poor_one_is_worth_little() -> None:
    good, poor = sweep_of(-0.8), sweep_of(0.2)
    for sweep in (good, poor):
        sweep.grow(8)
    assert sorted(good.added) == [0, 1, 2, 3, 4]
    assert good.cost_J == pytest.approx(10.0 + WINDOWS_J.sum(), rel=0.05)
    assert good.needed == 1.0
    assert poor.needed < 0.2
    assert poor.value < 0.1 * good.value
    assert 0 <= poor.share.mean() < 0.1 < good.share.mean()


def test_the_joules_foresee_that_a_launch_may_be_left_after_its_first_window() -> None:
    doubtful = sweep_of(-0.02)
    doubtful.grow(8)
    assert 0 < doubtful.needed < 1
    assert len(doubtful.added) > 2
    assert doubtful.cost_J < 10.0 + WINDOWS_J[doubtful.added].sum()


def test_a_launch_begins_at_the_setting_that_costs_the_least() -> None:
    sweep = sweep_of(-0.8)
    sweep.grow(2)
    added = set(sweep.added)
    sweep.begin_cheaply()
    assert sweep.added[0] == 0  # the cheapest, whether it is worth its own window or not
    assert added <= set(sweep.added)
    assert len(sweep.added) == len(set(sweep.added))
    assert sweep.first_J == pytest.approx(10.0 + 1.0)


def test_in_a_running_launch_only_what_is_worth_its_own_window_is_added() -> None:
    running, new = sweep_of(-0.3, 0.0), sweep_of(-0.3, 1000.0)
    running.grow(8)
    new.grow(8)
    assert len(running.added) < len(new.added)
    assert len(sweep_of(-0.3).added) == 0
