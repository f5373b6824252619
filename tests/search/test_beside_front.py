"""Settings next to the measured front: which are due, and what a search does with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.studies import METER, measured
from tuner.models.surrogate.features import FeatureMap
from tuner.models.surrogate.surrogates import Surrogates
from tuner.search.candidate_planner import BELIEVED_FROM, CandidatePlanner, beside_front
from tuner.search.candidate_pool import CandidateView
from tuner.search.planner import PlanningState
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import ProbeRecord, ProbeRequest

LIMITS_W = (100, 150, 200, 250)


def space(batches: Sequence[int], **live: Sequence[int | None]) -> Candidates:
    [(name, values)] = live.items()
    every = ({"micro_batch": b} | ({} if v is None else {name: v}) for b in batches for v in values)
    return Candidates.from_configurations(Configuration.of(**each) for each in every)


def due(
    candidates: Candidates,
    front: Sequence[int],
    closed: Sequence[int] = (),
    unlikely: Sequence[int] = (),
) -> list[int]:
    """Return the due settings, by number, of this front; what is on it is closed."""
    features = FeatureMap(candidates)
    surrogates = Surrogates(features)
    configurations = candidates.configurations
    launch_of = np.array([candidates.launches.index(c.launch) for c in configurations])
    still_open = np.setdiff1d(np.arange(len(configurations)), [*front, *closed])
    view = CandidateView(
        members=still_open,
        launch_of=launch_of[still_open],
        posterior=surrogates.predict([configurations[i] for i in still_open]),
        chances=np.where(np.isin(still_open, unlikely), 0.1, 1.0),
        gpus=np.ones(len(still_open)),
    )
    members = [np.flatnonzero(launch_of == i) for i in range(len(candidates.launches))]
    return beside_front(features, members, launch_of, front, view)


def test_both_neighbours_in_the_same_launch_are_due_and_nothing_else() -> None:
    few = space((1, 2), power_limit_W=LIMITS_W)
    assert due(few, [1]) == [0, 2]
    assert due(few, [1], closed=[0]) == [2]
    assert due(few, [1], closed=[0, 2]) == []
    assert due(few, [0, 7]) == [1, 6]


def test_a_setting_that_probably_equals_another_is_not_due() -> None:
    assert due(space((1, 2), power_limit_W=LIMITS_W), [1], unlikely=[2]) == [0]


def test_of_a_grid_only_one_live_knob_changes() -> None:
    grid = Candidates.from_configurations(
        Configuration.of(micro_batch=1, clock_MHz=c, power_limit_W=w)
        for c in (600, 900, 1200)
        for w in (100, 150, 200)
    )
    assert sorted(due(grid, [4])) == [1, 3, 5, 7]


def test_a_fine_curve_is_not_measured_step_by_step() -> None:
    """A clock in steps of 15 MHz, all of whose settings lie on the front."""
    fine = space((1,), clock_MHz=range(210, 1411, 15))
    on_front = [40]
    while further := due(fine, on_front):
        on_front.append(further[0])
    assert len(on_front) <= 12
    apart = np.diff(sorted(on_front)) / 80
    assert apart.max() <= 0.1 + 1e-9


def test_a_clock_that_is_left_to_the_device_is_next_to_the_highest() -> None:
    free = space((1,), clock_MHz=(600, 900, 1200, None))
    assert due(free, [3]) == [2]


# -- in a search -----------------------------------------------------------------------------------

BATCHES = (1, 2, 4, 8)
SPACE = space(BATCHES, power_limit_W=LIMITS_W)


def probed(batch: int, limits_W: Sequence[int], step_time_s: float = 0.0) -> ProbeRecord:
    """Return the record of a launch at these limits: the larger the batch, the worse."""
    lives = [Settings(power_limit_W=limit) for limit in limits_W]
    windows = tuple(
        measured(
            live,
            time_s=step_time_s or batch * (0.5 + 50 / limit),
            power_W=0.7 * limit * (1 + 0.1 * batch),
        )
        for live, limit in zip(lives, limits_W, strict=True)
    )
    return ProbeRecord(
        ProbeRequest("p0", Settings(micro_batch=batch), tuple(lives), extendable=True),
        windows,
        METER,
    )


def limits_until_the_launch_is_left(records: Sequence[ProbeRecord], first_W: int) -> list[int]:
    planner = CandidatePlanner(SPACE, seed=0)
    limits_W = [first_W]
    while True:
        plan = planner.plan_continuation(PlanningState(tuple(records)), probed(1, limits_W))
        if plan is None:
            return limits_W
        assert plan.launch == Settings(micro_batch=1)
        limits_W += [int(live["power_limit_W"]) for live in plan.live]  # type: ignore[arg-type]


def test_a_launch_is_not_left_while_a_setting_next_to_the_front_is_open() -> None:
    others = [probed(batch, LIMITS_W[:3]) for batch in BATCHES[1:BELIEVED_FROM]]
    limits_W = limits_until_the_launch_is_left(others, 150)
    assert sorted(limits_W) == list(LIMITS_W)


def test_a_launch_that_is_off_the_front_is_left() -> None:
    better = [probed(batch, LIMITS_W, step_time_s=0.1) for batch in BATCHES[1:BELIEVED_FROM]]
    assert limits_until_the_launch_is_left(better, 100) == [100]


def test_before_the_end_the_setting_next_to_the_front_is_planned() -> None:
    records = [probed(1, (100, 150, 200)), probed(2, LIMITS_W), probed(4, LIMITS_W)]
    plan = CandidatePlanner(SPACE, seed=0).plan(PlanningState(tuple(records)))
    assert plan is not None
    confirming = plan.before_end
    assert confirming is not None
    assert confirming.confirms
    assert confirming.configurations == (Configuration.of(micro_batch=1, power_limit_W=250),)
    assert confirming.cost_J > 0
    whole = [probed(1, LIMITS_W), *records[1:]]
    plan = CandidatePlanner(SPACE, seed=0).plan(PlanningState(tuple(whole)))
    assert plan is not None
    assert plan.before_end is None
