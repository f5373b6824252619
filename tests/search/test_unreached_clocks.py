"""Clocks above the first one that the devices did not reach are probed last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.studies import measured, record
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import Measurement, ProbeRecord, ProbeRequest, UnappliedSetting

CLOCKS = (1200, 2100, 2700, 2900, 3105)


def candidates(*clocks: object) -> Candidates:
    return Candidates.from_configurations(
        Configuration.of(micro_batch=b, clock_MHz=clock)  # type: ignore[arg-type]
        for b in (1, 8)
        for clock in clocks or CLOCKS
    )


class Study:
    """A study of which each probe is told by hand."""

    def __init__(self, *clocks: object) -> None:
        self.planner = CandidatePlanner(candidates(*clocks), seed=0)
        self.records: list[ProbeRecord] = []

    def visit(self, micro_batch: int, clock: object, **ran: float) -> None:
        """Tell one window: it is no data point if `ran` is given."""
        live = Settings({"clock_MHz": clock})  # type: ignore[dict-item]
        name = f"p{len(self.records):04d}"
        request = ProbeRequest(name, Settings(micro_batch=micro_batch), (live,))
        delivered = {name.replace("_stage_", "."): value for name, value in ran.items()}
        windows: tuple[Measurement, ...] = ()
        missed: tuple[UnappliedSetting, ...] = (UnappliedSetting(live, "not as set", delivered),)
        if not ran:
            window = replace(measured(live), delivered={"clock_MHz": clock})  # type: ignore[dict-item]
            windows, missed = (window,), ()
        self.records.append(record(request=request, measurements=windows, missed=missed))

    def last(self) -> list[tuple[int, object]]:
        """Return the candidates that the clocks put last, as (micro-batch, clock)."""
        observations = self.planner._observe(PlanningState(tuple(self.records)))
        mask = self.planner.unreached_clocks.chances(observations) < 1
        every = self.planner.candidates.configurations
        return [(every[i].micro_batch, every[i].get("clock_MHz")) for i in np.flatnonzero(mask)]


def test_a_clock_that_fell_short_puts_itself_and_higher_ones_last_in_every_launch() -> None:
    study = Study()
    assert study.last() == []
    study.visit(1, 2900, clock_MHz=2760.0)
    assert study.last() == [(b, c) for b in (1, 8) for c in (2900, 3105)]


def test_a_lower_clock_that_falls_short_later_puts_more_last() -> None:
    study = Study()
    study.visit(1, 3105, clock_MHz=2600.0)
    study.visit(1, 2900, clock_MHz=2600.0)
    assert study.last() == [(b, c) for b in (1, 8) for c in (2900, 3105)]


def test_a_clock_that_ran_elsewhere_stays() -> None:
    study = Study()
    study.visit(1, 2100, clock_MHz=600.0)  # a disturbed window
    study.visit(8, 2700)
    assert study.last() == []


@pytest.mark.parametrize("ran", [{"clock_MHz": 3105.0}, {"memory_clock_MHz": 800.0}])
def test_a_clock_above_the_one_set_and_another_clock_put_nothing_last(
    ran: dict[str, float],
) -> None:
    study = Study()
    study.visit(1, 2700, **ran)
    assert study.last() == []


def test_clocks_of_stages_count_one_by_one() -> None:
    study = Study((1200, 3105), (2700, 2700), (2900, 1200))
    study.visit(1, (1200, 3105), clock_MHz_stage_0=1200.0, clock_MHz_stage_1=2760.0)
    assert study.last() == [(1, (1200, 3105)), (8, (1200, 3105))]


def test_a_search_visits_the_rest_first() -> None:
    study = Study()
    study.visit(1, 1200)
    study.visit(1, 2900, clock_MHz=2760.0)
    visited: list[tuple[int, int]] = []
    while plan := study.planner.plan(PlanningState(tuple(study.records))):
        (configuration,) = plan.configurations
        clock = int(configuration.get("clock_MHz"))  # type: ignore[call-overload]
        visited.append((configuration.micro_batch, clock))
        # What fell short in the first launch, disturbed, is reached in the other.
        short = clock > 2800 and configuration.micro_batch == 1
        study.visit(configuration.micro_batch, clock, **({"clock_MHz": 2760.0} if short else {}))
    assert len(visited) == len(study.planner.candidates.configurations) - 2
    assert {clock for _, clock in visited[-3:]} == {2900, 3105}
