"""`benchmarks.prediction`: its parts hold what they say, on problems small enough to run here."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.validation import coverage
from tuner.models.surrogate.surrogates import FEW


@pytest.fixture(scope="module")
def seen() -> coverage.Seen:
    return coverage._simulated("opt-350m", "a100-40gb-8", launches=20, seed=0)


def test_measurements_come_launch_by_launch(seen: coverage.Seen) -> None:
    assert len(np.unique(seen.launches)) == 20
    assert len(seen.logs) == 80
    assert np.isfinite(seen.logs).all()


def test_intervals_hold_most_of_what_was_held_out(seen: coverage.Seen) -> None:
    held = [coverage.held_out(seen, size, seed) for size in (8, 24) for seed in range(2)]
    inside = np.vstack([each.inside for each in held])
    assert inside.shape[1] == len(coverage.WHAT)
    assert (inside.mean(axis=0) > 0.75).all()
    narrow = np.concatenate([each.covered(0, 0.0) for each in held])
    assert narrow.mean() < inside[:, 0].mean()  # the factor for few measurements widens them


def test_the_factor_can_be_judged_apart_from_the_fit(seen: coverage.Seen) -> None:
    each = coverage.held_out(seen, 16, 0)
    for output in range(2):
        assert np.array_equal(each.covered(output, FEW[output]), each.inside[:, output])
        shares = [each.covered(output, few).mean() for few in (0.0, 10.0, 100.0)]
        assert shares == sorted(shares)
