"""Probability that a configuration meets the limits: by fresh launches, surrogates, intervals."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from tuner.problem.constraints import Constraints
from tuner.results.choice import decide, decide_likely, front_of
from tuner.results.limit_probability import Limits, of_launches, of_point, of_surrogates
from tuner.results.parts import Point
from tuner.search_spaces.configuration import Configuration
from tuner.testing.studies import METER, measured


def point(micro_batch: int, time_s: float, energy_kJ: float, gpus: int = 1) -> Point:
    """A point whose 90 % intervals reach 2 % to either side."""
    return Point(
        configuration=Configuration.of(micro_batch=micro_batch, data_parallel=gpus),
        energy_to_solution_kJ=energy_kJ,
        time_to_solution_s=time_s,
        energy_interval_kJ=(0.98 * energy_kJ, 1.02 * energy_kJ),
        time_interval_s=(0.98 * time_s, 1.02 * time_s),
        power_W=1000 * energy_kJ / time_s,
        source="measured",
        windows=1,
        p_nondominated=math.nan,
        meter=METER,
    )


def surrogates(log_time: dict[Configuration, float], std: float) -> SimpleNamespace:
    """Surrogates that predict this log time (s) at 100 W."""

    def with_intervals(configurations):
        return SimpleNamespace(
            log_time=np.array([log_time[c] for c in configurations]),
            log_time_std=np.full(len(configurations), std),
            log_power=np.full(len(configurations), math.log(100.0)),
            log_power_std=np.full(len(configurations), 1e-9),
        )

    return SimpleNamespace(with_intervals=with_intervals)


def test_fresh_launches_tell_it_by_students_t() -> None:
    times, others = [0.99, 1.01, 1.0], [1.2, 1.22, 1.18]
    launches, baseline = ([measured(time_s=t) for t in side] for side in (times, others))
    x, y = np.log(times), np.log(others)
    spread = math.sqrt((2 * x.var(ddof=1) + 2 * y.var(ddof=1)) / 4)
    limits = Constraints(deadline_s=1010.0)
    met, every = of_launches(point(1, 1000.0, 20.0), limits, launches, baseline, 1000)
    exact = stats.t.cdf((math.log(1.01) - x.mean()) / (spread / math.sqrt(3)), 4)
    assert met["deadline_s"] == every == pytest.approx(exact, abs=0.03)
    # Two GPUs are not one, whatever the launches say.
    limits = Constraints(deadline_s=2000.0, max_gpus=1)
    met, every = of_launches(point(1, 1000.0, 20.0, gpus=2), limits, launches, baseline, 1000)
    assert (met, every) == ({"deadline_s": 1.0, "max_gpus": 0.0}, 0.0)


def test_launches_without_any_spread_meet_what_they_equal() -> None:
    launches = [measured(time_s=1.0, power_W=20.0)] * 2
    limits = Constraints(deadline_s=1000.0, power_cap_W=20.0, budget_kJ=20.0)
    assert of_launches(point(1, 1000.0, 20.0), limits, launches, launches, 1000)[1] == 1.0
    assert Limits([], limits, 1000).by_launches(Configuration.of(), launches, launches) is None


def test_the_neighbours_make_a_lucky_point_less_likely() -> None:
    lucky = point(1, 99.0, 10.0)
    limits = Constraints(deadline_s=100.0)
    assert of_point(lucky, limits)[1] > 0.75
    chance = of_surrogates(surrogates({lucky.configuration: math.log(1.02)}, 0.01), 100)
    assert chance(lucky, limits)[1] < 0.05
    # A simulated point is no window that luck could have made better.
    simulated = replace(lucky, source="predicted")
    assert chance(simulated, limits) == of_point(simulated, limits)


def test_a_choice_that_only_luck_made_feasible_is_passed_over() -> None:
    lucky, safe = point(1, 99.0, 10.0), point(2, 90.0, 12.0)
    points, limits = [lucky, safe], Constraints(deadline_s=100.0)
    assert decide(points, front_of(points), limits)[0] is lucky
    said = {lucky.configuration: math.log(1.02), safe.configuration: math.log(0.92)}
    best, choice = decide_likely(points, limits, None, of_surrogates(surrogates(said, 0.01), 100))
    assert best is safe
    assert choice.p_all_met == pytest.approx(1.0)
    # Without another the first stands, and says how unlikely it is.
    best, choice = decide_likely([lucky], limits, None, of_surrogates(surrogates(said, 0.01), 100))
    assert best is lucky
    assert choice.p_all_met < 0.05
