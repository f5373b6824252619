"""Safe exploration: what would probably exceed a cap on peak power is not probed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.search.test_score import CANDIDATES, CONFIGURATIONS, truth, view_of
from tests.support.studies import measured, record
from tuner.problem.settings import StopReason, stop_sentence
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.joint_draws import CandidateView
from tuner.search.planner import PlanningState, ProbePlan
from tuner.search.question import MOST_PROBABLE, PRIOR_MEAN, PRIOR_SD, PeakLimit, most_power_W
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import ProbeRequest

POWER = np.array([truth(c)[1] for c in CONFIGURATIONS])
#: All settings of two launches.
MEASURED = list(range(18))


def configurations_of(view: CandidateView) -> list[Configuration]:
    return [CONFIGURATIONS[i] for i in view.members]


def test_the_ratio_is_learned_from_windows() -> None:
    unknown = PeakLimit.of(300, [], [])
    assert (unknown.log_ratio, unknown.log_ratio_sd) == pytest.approx((PRIOR_MEAN, PRIOR_SD))
    means = np.linspace(100, 200, 50)
    known = PeakLimit.of(300, list(1.3 * means), list(means))
    assert known.log_ratio == pytest.approx(math.log(1.3), abs=0.01)
    assert known.log_ratio_sd < 0.6 * PRIOR_SD
    assert known.mean_power_W == pytest.approx(300 / 1.3, rel=0.01)


def test_what_exceeds_the_cap_is_left_out() -> None:
    _, view, _ = view_of(MEASURED)
    ratios = np.full(len(MEASURED), 1.1)
    limit = PeakLimit.of(200, list(POWER[MEASURED] * ratios), list(POWER[MEASURED]))
    open_ = configurations_of(view)
    kept = limit.safe(view.posterior, 1.0, open_)
    assert kept is not None
    assert 0 < len(kept) < len(view.members)
    safe = view[kept]
    assert (1.1 * POWER[safe.members] <= 200).mean() >= 1 - MOST_PROBABLE
    assert {CANDIDATES.launches[i] for i in safe.launch_of} == {
        CONFIGURATIONS[i].launch for i in safe.members
    }
    # Wider figures leave fewer.
    wide = limit.safe(view.posterior, 5.0, open_)
    assert wide is None or len(wide) < len(kept)


def test_without_a_safe_candidate_nothing_is_probed() -> None:
    _, view, _ = view_of(MEASURED)
    assert PeakLimit.of(20, [], []).safe(view.posterior, 1.0, configurations_of(view)) is None
    assert "limit on peak power" in stop_sentence(StopReason("unsafe"))


def planned_after_the_highest(knob: str, cap_W: float, *, limits_hold: bool) -> ProbePlan | None:
    """Return the plan after one window at 228 W, as of a baseline at its highest setting."""
    values = range(100, 251, 25) if knob == "power_limit_W" else range(600, 1401, 100)
    candidates = Candidates.from_configurations(
        Configuration.of({"micro_batch": b, knob: v}) for b in (8, 12, 16) for v in values
    )
    highest = next(
        c for c in candidates.configurations if c.micro_batch == 12 and c.get(knob) == max(values)
    )
    window = measured(highest.live, time_s=1.6, power_W=228.0)
    request = ProbeRequest("p0", highest.launch, (highest.live,))
    limit = replace(PeakLimit.of(cap_W, [], []), limits_hold=limits_hold)
    state = PlanningState((record(request=request, measurements=(window,)),), peak_limit=limit)
    return CandidatePlanner(candidates, seed=0).plan(state)


@pytest.mark.parametrize("cap_W", [200.0, 260.0])
def test_a_power_limit_is_safe_far_from_what_was_measured(cap_W: float) -> None:
    plan = planned_after_the_highest("power_limit_W", cap_W, limits_hold=True)
    assert plan is not None
    assert all(most_power_W(c) <= 0.9 * cap_W for c in plan.configurations)


@pytest.mark.parametrize("knob", ["power_limit_W", "clock_MHz"])
def test_before_anything_is_fitted_the_lowest_setting_is_probed(knob: str) -> None:
    plan = planned_after_the_highest(knob, 200.0, limits_hold=False)
    assert plan is not None
    assert [c.get(knob) for c in plan.configurations] == [100 if knob == "power_limit_W" else 600]


def test_a_power_limit_bounds_the_power_of_all_devices() -> None:
    assert most_power_W(Configuration.of(data_parallel=4, power_limit_W=150)) == 600.0
    assert most_power_W(Configuration.of(data_parallel=4, clock_MHz=900)) == math.inf
