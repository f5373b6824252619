"""Regret: what the measured configurations miss, and how sure that is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.search.test_score import CONFIGURATIONS, MEASURED, truth, view_of
from tuner.pareto import hypervolume, reference_point
from tuner.search.joint_draws import JointDraws
from tuner.search.regret import MOST_NOISE, RegretEstimate, regret_of


def regret_after(measured: list[int], *, fits: float = 1.0) -> RegretEstimate:
    front, view, surrogates = view_of(measured)
    still_open = replace(view, chances=np.full(len(view.members), fits))
    return regret_of(JointDraws(surrogates, front, still_open))


def true_missing(measured: list[int]) -> float:
    t, p = np.array([truth(c) for c in CONFIGURATIONS]).T
    points = np.log(np.column_stack([t * p, t]))
    reference = reference_point(points)
    return 1 - hypervolume(points[measured], reference) / hypervolume(points, reference)


def test_it_holds_what_is_really_missing() -> None:
    missing = regret_after(MEASURED).missing
    assert missing.min() <= true_missing(MEASURED) <= missing.max()
    assert ((missing >= 0) & (missing <= 1)).all()


def test_it_falls_as_the_front_is_measured() -> None:
    best_launch = [i for i, c in enumerate(CONFIGURATIONS) if c.micro_batch == 16]
    before, after = regret_after(MEASURED), regret_after([*MEASURED, *best_launch])
    assert true_missing([*MEASURED, *best_launch]) < 0.01
    assert np.median(after.missing) < 0.2 * np.median(before.missing)
    assert after.saving.mean() < 0.2 * before.saving.mean()
    assert after.probability_above(0.5) < before.probability_above(0.0)


def test_what_does_not_fit_in_memory_is_not_missed() -> None:
    assert (regret_after(MEASURED, fits=0.0).missing == 0).all()
    some = regret_after(MEASURED, fits=0.5)
    assert 0 < some.missing.mean() < regret_after(MEASURED).missing.mean()


def test_what_is_below_the_noise_does_not_count() -> None:
    estimate = RegretEstimate(
        missing=np.array([0.01, 0.03, 0.05, 0.3]),
        noise=np.array([0.0, 0.0, 0.1, 0.1]),
        saving=np.zeros(4),
    )
    assert estimate.probability_above(0.02) == pytest.approx(0.5)
    assert estimate.probability_above(0.0) == pytest.approx(0.75)


def test_a_noise_beyond_the_front_itself_hides_no_regret() -> None:
    whole = RegretEstimate(
        missing=np.array([0.9, 0.2, 0.05, 0.0]), noise=np.full(4, 1.5), saving=np.zeros(4)
    )
    assert whole.probability_above(0.02) == pytest.approx(0.5)
    assert whole.probability_above(0.3) == pytest.approx(0.25)
    # What is said to have been tested is what was tested.
    assert whole.detection_threshold(0.02) == pytest.approx(MOST_NOISE)
    assert whole.detection_threshold(0.3) == pytest.approx(0.3)
