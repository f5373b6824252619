"""What was delivered, not what was asked for, is what the models learn from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from study_tools import METER, measured, record, request

from models.surrogate import Surrogates
from search_spaces.configuration import Configuration, Settings
from search_spaces.errors import InputError
from search_spaces.space import Candidates
from tuner.acquisition import ProbeCost
from tuner.answer import build_result, measured_points
from tuner.decide import Constraints
from tuner.problem import Problem
from tuner.sampler import CandidateSampler
from tuner.study import StudyBook
from workload.probe import Missed, ProbeRecord

CLOCKS = (900, 1200, 1410)
LIVE = tuple(Settings(clock_MHz=clock) for clock in CLOCKS)
LAUNCH = request().launch
ASKED = [Configuration(LAUNCH, live) for live in LIVE]
#: The highest clock was asked for and power held it back.
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
    seen: list[list[Configuration]] = []
    fit = Surrogates.fit

    def spy(self: Surrogates, configurations: Any, *more: Any, **named: Any) -> bool:
        seen.append(list(configurations))
        return fit(self, configurations, *more, **named)

    monkeypatch.setattr(Surrogates, "fit", spy)
    return seen


def test_the_sampler_learns_from_it(
    tmp_path: Path, probe: ProbeRecord, fitted: list[list[Configuration]]
) -> None:
    sampler = CandidateSampler(Candidates.from_configurations(ASKED))
    book = StudyBook.in_memory(sampler, steps=100)
    book.ask(probe.request)
    book.tell(probe)
    surrogates = sampler.fit(book.study)
    assert fitted[-1] == [ASKED[0], ASKED[1], RAN]  # 1198 is 1200 but for the mean's noise
    # Between two clocks that ran it interpolates: the model knows no 1410 MHz.
    said = surrogates.predict([RAN, ASKED[2]])
    assert said.log_time[0] != said.log_time[1]


def test_a_setting_that_was_not_taken_fails_its_trial_alone(
    tmp_path: Path, probe: ProbeRecord
) -> None:
    sampler = CandidateSampler(Candidates.from_configurations(ASKED))
    book = StudyBook.in_memory(sampler, steps=100)
    book.ask(probe.request)
    missed = Missed(LIVE[2], "clock_MHz was set to 1410 and the devices ran at 900 MHz")
    book.tell(replace(probe, measurements=probe.measurements[:2], missed=(missed,)))
    (failed,) = book.study.get_trials(states=(optuna.trial.TrialState.FAIL,))
    assert failed.user_attrs["failure"] == "not_taken"
    assert failed.user_attrs["failure_message"] == missed.message
    complete = book.study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert len(complete) == 2


def problem() -> Problem:
    return Problem(
        name="delivered",
        candidates=Candidates.from_configurations(ASKED),
        steps=100,
        baseline=ASKED[2],
        cost=ProbeCost(),
        asked={},
    )


def test_the_answers_surrogates_learn_from_it(
    probe: ProbeRecord, fitted: list[list[Configuration]]
) -> None:
    result = build_result(
        problem(), [probe], Constraints(), name="d", run_dir=None, stopped="", time_s=1.0
    )
    assert fitted[-1] == [ASKED[0], ASKED[1], RAN]
    # The points are named by what is to be asked for again.
    assert {point.configuration for point in result.points} == set(ASKED)
    assert result.windows[ASKED[2]] == (probe.measurements[2],)


def test_two_scopes_enter_no_front(probe: ProbeRecord) -> None:
    other = replace(probe, meter=replace(METER, scope="gpu"))
    with pytest.raises(InputError, match="different scopes"):
        measured_points([probe, other], 100)
