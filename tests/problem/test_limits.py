"""Limits on the training job: made of what was asked, and how far figures exceed them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.results import large_result
from tuner.answer.choice import decide, figures_of
from tuner.answer.judge import Judge
from tuner.answer.parts import ResolvedRequest
from tuner.formatting import Units
from tuner.problem.constraints import LIMITS, Constraints, JobFigures, Limits
from tuner.search.question import Question
from tuner.search_spaces.errors import InputError
from tuner.study.rules import front_to_beat

NAMES = [row.name for row in LIMITS]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, math.inf, -math.inf, "9", True])
def test_a_limit_is_a_positive_finite_number(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        Constraints(**{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
def test_a_slowdown_is_a_finite_share(value: float) -> None:
    with pytest.raises(InputError, match="max_slowdown"):
        Constraints(max_slowdown=value)


def test_every_row_is_a_limit_and_has_a_figure() -> None:
    every = Limits(**dict.fromkeys(NAMES, 2))
    assert [row.name for row, _ in every.given] == NAMES
    assert set(every.ratios(JobFigures(1.0, 1.0, 1.0, 1.0, 1))) == set(NAMES)
    assert list(every.to_json()) == NAMES


def test_a_slowdown_becomes_a_deadline_with_a_baseline_only() -> None:
    asked = Constraints(max_slowdown=0.0)
    assert not asked.limits
    assert asked.goal == "knee"
    resolved = replace(asked, baseline_time_s=100.0)
    assert resolved.limits == Limits(deadline_s=100.0, slowdown=0.0)
    assert resolved.goal == "energy"
    assert ResolvedRequest(resolved).to_json() == {"max_slowdown": 0.0}


@pytest.mark.parametrize(
    ("deadline_s", "limits"),
    [
        (124.0, Limits(deadline_s=124.0)),
        (125.0, Limits(deadline_s=125.0, slowdown=0.25)),
        (126.0, Limits(deadline_s=125.0, slowdown=0.25)),
    ],
)
def test_of_two_limits_on_the_time_the_tighter_holds(deadline_s: float, limits: Limits) -> None:
    asked = replace(Constraints(max_slowdown=0.25, deadline_s=deadline_s), baseline_time_s=100.0)
    assert asked.limits == limits


def test_one_limit_given_twice_with_two_values_is_refused() -> None:
    with pytest.raises(InputError, match="give it once"):
        Constraints(deadline_s=3600.0).limited(deadline="2h")
    assert Constraints(deadline_s=7200.0).limited(deadline="2h").limits.deadline_s == 7200.0


def test_a_price_of_zero_is_no_price() -> None:
    with pytest.raises(InputError, match="price_per_kWh"):
        Constraints(objective="cost", price_per_kWh=0)


def test_figures_that_are_unknown_exceed_nothing_and_a_missing_peak_everything() -> None:
    limits = Limits(budget_kJ=10.0, peak_power_W=100.0)
    assert limits.ratios(JobFigures(energy_kJ=11.0)) == {"budget_kJ": pytest.approx(1.1)}
    (point,) = large_result().points[:1]
    assert point.peak_power_W is None
    assert limits.worst_ratio(figures_of([point])) == [math.inf]
    assert Limits().worst_ratio(figures_of([point])) == 0.0


def test_a_limit_without_end_in_a_result_of_another_tool_is_met() -> None:
    assert Limits(deadline_s=math.inf).worst_ratio(JobFigures(time_s=1e9)) == 0.0


def test_an_unknown_figure_meets_no_limit() -> None:
    points = large_result().points[:3]
    ratios = Limits(deadline_s=1e9).ratios(JobFigures(time_s=np.array([math.nan, 1.0, 2.0])))
    assert list(ratios["deadline_s"] <= 1) == [False, True, True]
    best, choice = decide(points, Constraints(deadline_s=1e9))
    assert best in points
    assert choice.met


def test_choice_search_and_probability_agree_on_which_points_exceed_a_limit() -> None:
    result = large_result()
    energy = [p.energy_to_solution_kJ for p in result.points]
    time = [p.time_to_solution_s for p in result.points]
    asked = Constraints(
        budget_kJ=float(np.median(energy)), deadline_s=float(np.median(time)), power_cap_W=250.0
    )
    over = asked.limits.worst_ratio(figures_of(result.points)) > 1
    assert set(over) == {True, False}
    steps = result.steps
    logs = np.log([[1000 * e / steps, t / steps] for e, t in zip(energy, time, strict=True)])
    searched = Question(asked, steps).excess(logs[:, 0], logs[:, 1])
    assert list(searched > 0) == list(over)
    judge = Judge(result.points, None, asked, steps)
    for point, exceeds in zip(result.points, over, strict=True):
        met, every = judge.chance(point, asked)
        assert (min(met.values()) < 0.5) == exceeds
        assert every <= min(met.values())


def test_a_baseline_meets_the_slowdown_of_zero_for_certain() -> None:
    result = large_result()
    today = result.baseline
    asked = replace(Constraints(max_slowdown=0.0), baseline_time_s=today.time_to_solution_s)
    judge = Judge(result.points, today, asked, result.steps)
    assert judge.chance(today, asked) == ({"deadline_s": 1.0}, 1.0)


def test_only_limits_that_grow_with_the_training_leave_a_front_to_beat() -> None:
    front = large_result().front_points
    for row in LIMITS:
        kept = row.of_training or row.figure == "gpus"
        assert bool(front_to_beat(Constraints(**{row.name: 5}), front, 100)) == kept


def test_limits_are_worded_in_the_units_of_the_page() -> None:
    limits = Limits(budget_kJ=7200.0, max_gpus=1)
    assert limits.phrase(Units("kWh", 3600.0)) == "within 2.00 kWh and on at most 1 GPU"
    assert Limits().phrase(Units()) == ""
