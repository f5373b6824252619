"""The draws behind the power of verification."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from benchmarks.verdicts import AIM, SLOWER, pairs_needed, verified
from tuner.problem.settings import MOST_PAIRS
from tuner.results.alpha_spending import look_level


def test_a_saving_of_energy_alone_is_harder_to_confirm_than_one_of_both() -> None:
    """At 3 % more time only the energy counts, with the spreads of time and of power in it."""
    shares = []
    for time_ratio in (None, SLOWER):
        rng = np.random.default_rng(1)
        found = [bool(verified(rng, (0.03,), pairs=4, time_ratio=time_ratio)[0]) for _ in range(40)]
        shares.append(float(np.mean(found)))
    assert shares[0] > shares[1] + 0.2
    sure, made = verified(np.random.default_rng(2), (0.3,), time_ratio=SLOWER)
    assert sure
    assert made <= 3


def test_the_pairs_needed_reach_the_aim_by_simulation() -> None:
    spread = math.hypot(0.01, 0.01)
    pairs = pairs_needed(0.02, spread)
    rng = np.random.default_rng(0)
    level = look_level(0, MOST_PAIRS, (MOST_PAIRS,))

    def share(n: int) -> float:
        a, b = rng.normal(0, spread, (2, 20_000, n))
        apart = a.mean(axis=1) - b.mean(axis=1) - math.log(0.98)
        pooled = np.sqrt((a.var(axis=1, ddof=1) + b.var(axis=1, ddof=1)) / n)
        return float(np.mean(apart / pooled > stats.t.isf(level, 2 * n - 2)))

    assert share(pairs) > AIM - 0.015
    assert share(pairs - 1) < AIM + 0.015
    assert pairs_needed(0.02, 0.0224) > pairs > MOST_PAIRS
