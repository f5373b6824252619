"""The user's question in the search: its loss, what is worth probing for it, and its regret."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.search.test_score import CANDIDATES, CONFIGURATIONS, truth, view_of
from tuner.problem.constraints import Constraints
from tuner.problem.problem import ProbeCost
from tuner.search.joint_draws import JointDraws, ScoredProbe, best_probe
from tuner.search.question import Question

TRUTH = np.array([truth(c) for c in CONFIGURATIONS])
LOG_T = np.log(TRUTH[:, 0])
LOG_E = LOG_T + np.log(TRUTH[:, 1])
#: All of the launch of micro-batch 16, which holds the front, but its slowest and fastest settings.
MIDDLE = [i for i, c in enumerate(CONFIGURATIONS) if c.micro_batch == 16][2:-2]
SCATTERED = [4, 13, 22, 26, 18, 8]


def best_for(
    constraints: Constraints, measured: list[int], running: int | None = None
) -> ScoredProbe:
    front, view, surrogates = view_of(measured)
    drawn = JointDraws(surrogates, front, view, Question(constraints, 1), running_launch=running)
    return best_probe(drawn, ProbeCost(), 8, running)


def regret_for(constraints: Constraints | None, measured: list[int]) -> np.ndarray:
    front, view, surrogates = view_of(measured)
    question = None if constraints is None else Question(constraints, 1)
    return JointDraws(surrogates, front, view, question).regret


@pytest.mark.parametrize(
    ("given", "goal"),
    [
        ({}, "knee"),
        ({"deadline_s": 9}, "energy"),
        ({"budget_kJ": 9}, "time"),
        ({"budget_kJ": 9, "deadline_s": 9}, "time"),
        ({"deadline_s": 9, "objective": "edp"}, "edp"),
        ({"deadline_s": 9, "objective": "knee"}, "knee"),
    ],
)
def test_the_front_is_searched_unless_one_configuration_is_asked_for(
    given: dict[str, float], goal: str
) -> None:
    constraints = Constraints(**given)
    assert constraints.goal == goal
    assert (Question.of(constraints, 1) is None) == (goal == "knee")


def test_a_configuration_that_meets_the_limits_loses_less_than_one_that_does_not() -> None:
    # 100 steps within 20 s and 5 kJ: 0.2 s and 50 J a step.
    question = Question(Constraints(deadline_s=20, budget_kJ=5), steps=100)
    energy, time = np.log([40.0, 40.0, 60.0, 80.0]), np.log([0.1, 0.15, 0.1, 0.25])
    worst = float(question.objective(energy, time, np.ones(4)).max())
    loss = question.loss(energy, time, np.ones(4))
    assert list(np.argsort(loss)) == [0, 1, 2, 3]
    assert loss[0] == pytest.approx(math.log(0.1))  # least time
    assert loss[2] - worst == pytest.approx(math.log(60 / 50))
    assert loss[3] - worst == pytest.approx(math.log(80 / 50))  # the larger overshoot


def test_a_power_cap_limits_energy_over_time() -> None:
    question = Question(Constraints(power_cap_W=300), steps=7)
    excess = question.excess(np.log([29.0, 33.0]), np.log([0.1, 0.1]))
    assert excess == pytest.approx([0.0, math.log(1.1)])


def test_cost_counts_energy_and_gpu_hours() -> None:
    asked = Constraints(objective="cost", price_per_kWh=0.5, price_per_gpu_hour=2.0)
    cost = Question(asked, 1).objective(np.log([3.6e6]), np.log([1800.0]), np.array([4]))
    assert np.exp(cost) == pytest.approx([0.5 + 4.0])


def test_what_is_worth_a_window_depends_on_the_question() -> None:
    running = CANDIDATES.launches.index(CONFIGURATIONS[MIDDLE[0]].launch)
    fast = best_for(Constraints(objective="time"), MIDDLE, running)
    frugal = best_for(Constraints(objective="energy"), MIDDLE, running)
    clocks = [int(CONFIGURATIONS[b.member].live["clock_MHz"]) for b in (fast, frugal)]
    measured = [int(CONFIGURATIONS[i].live["clock_MHz"]) for i in MIDDLE]
    assert clocks[0] > max(measured)
    assert clocks[1] < min(measured)
    assert fast.expected_gain > 0


def test_nothing_improves_an_answer_that_is_far_inside_the_limits() -> None:
    # The slowest launch cannot be faster than what is measured, whatever it draws.
    least = best_for(Constraints(objective="time"), list(range(9, 45)))
    assert least.expected_gain < 5e-3


def test_a_chance_weighs_what_a_window_is_worth() -> None:
    front, view, surrogates = view_of(MIDDLE)
    asked = Question(Constraints(objective="energy"), 1)

    def best(chance: float) -> ScoredProbe:
        weighed = replace(view, chances=np.full(len(view.chances), chance))
        return best_probe(JointDraws(surrogates, front, weighed, asked), ProbeCost(), 8)

    usual, half = best(1.0), best(0.5)
    assert half.score == pytest.approx(0.5 * usual.score, rel=0.4)
    assert best(1e-4).score == 0.0


def test_the_regret_is_that_of_the_answer() -> None:
    deadline = 1.15 * float(TRUTH[:, 0].min())
    asked = Constraints(deadline_s=deadline)
    answer = int(np.argmin(np.where(TRUTH[:, 0] <= deadline, LOG_E, np.inf)))
    before = regret_for(asked, SCATTERED)
    known = [*SCATTERED, *range(max(answer - 2, 36), min(answer + 3, 45))]
    after = regret_for(asked, known)
    assert np.median(before) > 0.02 > np.median(after)
    # The front still misses its other end.
    assert np.median(regret_for(None, known)) > np.median(after)
