"""Safe exploration: what would probably exceed a cap on peak power is not probed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.search.test_acquisition import CANDIDATES, CONFIGURATIONS, truth
from tests.search.test_question import view_of
from tuner.problem.stop_reason import StopReason, stop_sentence
from tuner.search.safety import MOST_PROBABLE, PRIOR_MEAN, PRIOR_SD, PeakLimit

POWER = np.array([truth(c)[1] for c in CONFIGURATIONS])
#: All settings of two launches.
MEASURED = list(range(18))


def test_the_ratio_is_learned_from_windows() -> None:
    unknown = PeakLimit.of(300, [], [])
    assert (unknown.log_ratio, unknown.log_ratio_sd) == pytest.approx((PRIOR_MEAN, PRIOR_SD))
    means = np.linspace(100, 200, 50)
    known = PeakLimit.of(300, list(1.3 * means), list(means))
    assert known.log_ratio == pytest.approx(math.log(1.3), abs=0.01)
    assert known.log_ratio_sd < 0.6 * PRIOR_SD
    assert known.mean_power_W == pytest.approx(300 / 1.3, rel=0.01)


def test_what_exceeds_the_cap_is_left_out() -> None:
    _, view, _, _ = view_of(MEASURED)
    ratios = np.full(len(MEASURED), 1.1)
    limit = PeakLimit.of(200, list(POWER[MEASURED] * ratios), list(POWER[MEASURED]))
    safe = limit.safe(view, widening=1.0)
    assert safe is not None
    assert 0 < len(safe.members) < len(view.members)
    assert (1.1 * POWER[safe.members] <= 200).mean() >= 1 - MOST_PROBABLE
    assert {CANDIDATES.launches[i] for i in safe.launch_of} == {
        CONFIGURATIONS[i].launch for i in safe.members
    }
    # Wider figures leave fewer.
    wide = limit.safe(view, widening=5.0)
    assert wide is None or len(wide.members) < len(safe.members)


def test_without_a_safe_candidate_nothing_is_probed() -> None:
    _, view, _, _ = view_of(MEASURED)
    assert PeakLimit.of(20, [], []).safe(view, widening=1.0) is None
    assert "limit on peak power" in stop_sentence(StopReason("unsafe"))
