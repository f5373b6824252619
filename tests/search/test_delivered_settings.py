"""Models that learn from the delivered settings, not from the requested ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.studies import METER, measured, record, request
from tuner.answer.posterior import Windows
from tuner.answer.state import answer_of_study
from tuner.models.surrogate.surrogates import Surrogates
from tuner.problem.problem import ProbeCost, Problem
from tuner.problem.study_spec import StudySpec
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import PlanningState
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import Candidates
from tuner.workload.records.probe import ProbeRecord, UnappliedSetting

CLOCKS = (900, 1200, 1410)
LIVE = tuple(Settings(clock_MHz=clock) for clock in CLOCKS)
LAUNCH = request().launch
REQUESTED = [Configuration(LAUNCH, live) for live in LIVE]
#: Ran at a lower clock than the requested one, because of the power limit.
RAN = Configuration(LAUNCH, Settings(clock_MHz=1245.0))


@pytest.fixture
def probe() -> ProbeRecord:
    windows = [
        measured(live, time_s=0.5 - 0.05 * i, power_W=200.0 + 40 * i) for i, live in enumerate(LIVE)
    ]
    delivered = (900.0, 1198.0, 1245.0)
    return record(
        request=request(live=LIVE),
        measurements=tuple(
            replace(window, delivered={"clock_MHz": clock})
            for window, clock in zip(windows, delivered, strict=True)
        ),
    )


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[list[Configuration]]:
    """The configurations of every fit of the surrogates."""
    fits: list[list[Configuration]] = []
    fit = Surrogates.fit

    def spy(self: Surrogates, configurations: Any, *more: Any, **named: Any) -> bool:
        fits.append(list(configurations))
        return fit(self, configurations, *more, **named)

    monkeypatch.setattr(Surrogates, "fit", spy)
    return fits


def test_the_planner_learns_from_it(probe: ProbeRecord, fitted: list[list[Configuration]]) -> None:
    planner = CandidatePlanner(Candidates.from_configurations(REQUESTED))
    planner._fit(planner._observe(PlanningState((probe,))))
    surrogates = planner.surrogates
    assert fitted[-1] == [REQUESTED[0], REQUESTED[1], RAN]  # 1198 is 1200 but for the mean's noise
    # Between two clocks that ran it interpolates: the model knows no 1410 MHz.
    posterior = surrogates.predict([RAN, REQUESTED[2]])
    assert posterior.log_time[0] != posterior.log_time[1]


def test_a_setting_that_was_not_taken_is_closed_alone(probe: ProbeRecord) -> None:
    planner = CandidatePlanner(Candidates.from_configurations(REQUESTED))
    missed = UnappliedSetting(LIVE[2], "clock_MHz was set to 1410", {"clock_MHz": 900.0})
    record = replace(probe, measurements=probe.measurements[:1], missed=(missed,))
    record = replace(record, request=replace(probe.request, live=(LIVE[0], LIVE[2])))
    observations = planner._observe(PlanningState((record,)))
    assert observations.closed == {0, 2}
    assert observations.not_taken == {2: {"clock_MHz": 900.0}}
    assert not observations.failed_launches


def test_figures_are_the_records_own(probe: ProbeRecord) -> None:
    """Bytes stay bytes, and a cause is a flag of its own, wherever its words stand."""
    first, second, third = probe.measurements
    windows = (
        replace(first, peak_memory_bytes=12_345_678_901, flags=("throttle_power in 2 of 9",)),
        replace(second, flags=("note: throttle_power was not read",)),
        third,
    )
    planner = CandidatePlanner(Candidates.from_configurations(REQUESTED))
    observations = planner._observe(PlanningState((replace(probe, measurements=windows),)))
    assert observations.peak_bytes == {0: 12_345_678_901.0}
    assert [one.power_capped for one in observations.measured] == [True, False, False]


def problem() -> Problem:
    return Problem(
        name="delivered",
        candidates=Candidates.from_configurations(REQUESTED),
        steps=100,
        baseline=REQUESTED[2],
        cost=ProbeCost(),
        identity={},
    )


def test_the_answers_surrogates_learn_from_it(
    probe: ProbeRecord, fitted: list[list[Configuration]]
) -> None:
    result = answer_of_study(StudySpec("d", None, problem()), [probe])
    assert fitted[-1] == [REQUESTED[0], REQUESTED[1], RAN]
    # The points are named by the settings to request again.
    assert {point.configuration for point in result.points} == set(REQUESTED)
    assert result.windows[REQUESTED[2]] == (probe.measurements[2],)


def test_two_scopes_enter_no_front(probe: ProbeRecord) -> None:
    other = replace(probe, meter=replace(METER, scope="gpu"))
    with pytest.raises(InputError, match="different scopes"):
        Windows.of([probe, other])
