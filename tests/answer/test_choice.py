"""The choice under everything that can be asked, choosing again, and what was never measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.answer.test_judge import judge_of, searched
from tests.answer.test_recommendation import result_of
from tests.support.results import large_result
from tests.support.results import point as drawn_point
from tests.support.studies import METER, run_replay, write_table
from tuner.answer.choice import decide, never_measured
from tuner.answer.judge import Judge
from tuner.answer.parts import Point
from tuner.problem.constraints import Constraints, Limits
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.workload.records.probe import Failure, Measurement, MeterInfo, ProbeRecord, ProbeRequest


def point(
    name: int,
    time_s: float,
    energy_kJ: float,
    *,
    gpus: int = 1,
    peak_W: float | None = None,
    spread: float = 0.02,
) -> Point:
    configuration = Configuration.of(micro_batch=name, data_parallel=gpus)
    power_W = 1000 * energy_kJ / time_s
    return drawn_point(configuration, time_s, power_W, METER, spread, peak_power_W=peak_W)


#: Fastest to most frugal; 9 is dominated.
POINTS = (
    point(1, 100.0, 50.0, gpus=8, peak_W=700.0),
    point(2, 140.0, 36.0, gpus=4, peak_W=400.0),
    point(3, 200.0, 30.0, gpus=2, peak_W=260.0),
    point(4, 400.0, 28.0, gpus=1),
    point(9, 300.0, 45.0, gpus=1, peak_W=160.0),
)


def chosen(**asked):
    best, choice = Judge(POINTS, None, Constraints(**asked), 1).choose()
    return int(best.configuration.get("micro_batch")), choice


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"objective": "time"}, 1),
        ({"objective": "energy"}, 4),
        ({"objective": "edp"}, 1),  # 5000, 5040, 6000, 11200 kJ s
        ({"objective": "energy", "deadline_s": 250}, 3),
        ({"objective": "time", "budget_kJ": 40}, 2),
        ({"objective": "knee", "max_gpus": 2}, 3),
        ({"max_gpus": 4}, 2),  # a limit alone asks for speed
        ({"max_gpus": 1}, 9),
        ({"max_gpus": 1, "objective": "energy"}, 4),
        ({"peak_power_W": 300}, 3),
        ({"peak_power_W": 200}, 9),  # 4 recorded no peak, so nobody can promise it
        ({"power_cap_W": 200, "deadline_s": 500}, 4),
        ({"budget_kJ": 36.0}, 2),  # what just fits, fits
    ],
)
def test_what_is_asked_is_chosen(asked, expected) -> None:
    name, choice = chosen(**asked)
    assert name == expected
    assert choice.met


def test_cost_weighs_energy_against_gpu_hours() -> None:
    # GPU seconds: 800, 560, 400, 400 (4), 300 (9).
    name, choice = chosen(objective="cost", price_per_gpu_hour=2.0)
    assert name == 9
    assert choice.objective_value == pytest.approx(2.0 * 300 / 3600)
    name, choice = chosen(objective="cost", price_per_kWh=0.3)
    assert name == 4
    assert choice.objective_value == pytest.approx(0.3 * 28 / 3600)
    assert "at the prices given" in choice.sentence


def test_carbon_is_energy_by_the_users_own_grid() -> None:
    name, choice = chosen(objective="carbon", grid_gCO2_per_kWh=360.0)
    assert name == 4
    assert choice.objective_value == pytest.approx(2.8)
    assert "2.80 g of CO2" in choice.sentence


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"objective": "cost"}, InputError, "price_per_kWh"),
        ({"objective": "carbon"}, InputError, "none is assumed"),
        ({"price_per_kWh": 0.3}, InputError, "cost"),
        ({"grid_gCO2_per_kWh": 300}, InputError, "carbon"),
        ({"objective": "cheapest"}, UnknownName, "energy"),
        ({"max_gpus": 0}, InvalidValue, "max_gpus"),
        ({"max_gpus": 1.5}, InvalidValue, "integer"),
        ({"peak_power_W": -1}, InvalidValue, "peak_power_W"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(asked, error, words) -> None:
    with pytest.raises(error, match=words):
        Constraints(**asked)


def test_the_probability_is_that_of_the_point_keeping_the_limit() -> None:
    # The limit stands at the 95 % quantile of the fastest point's energy.
    limit = 50.0 * math.exp(1.5 * 0.02)
    name, choice = chosen(budget_kJ=limit, objective="time")
    assert name == 1
    assert choice.p_met["budget_kJ"] == pytest.approx(0.95, abs=0.015)
    _, choice = chosen(budget_kJ=50.0, objective="time")
    assert choice.p_met["budget_kJ"] == pytest.approx(0.5, abs=0.03)
    assert "probability of 5" in choice.sentence


def test_all_together_are_drawn_together() -> None:
    """Time and energy of a point rise together, so both fail less often than apart."""
    _, choice = chosen(budget_kJ=50.0, deadline_s=100.0, objective="time")
    apart = choice.p_met["budget_kJ"] * choice.p_met["deadline_s"]
    assert apart + 0.05 < choice.p_all_met <= min(choice.p_met.values())


def test_probabilities_against_plain_simulation() -> None:
    _, choice = chosen(power_cap_W=505.0, objective="time")
    rng = np.random.default_rng(5)
    se_time, se_energy = 0.02 / 1.645, 0.03 / 1.645
    power = math.log(500.0) + math.sqrt(se_energy**2 - se_time**2) * rng.standard_normal(100_000)
    expected = float((power <= math.log(505.0)).mean())
    assert choice.p_met["power_cap_W"] == pytest.approx(expected, abs=0.03)


def test_what_cannot_be_met_is_said_with_what_could_be_asked() -> None:
    name, choice = chosen(budget_kJ=20.0)
    assert (name, choice.met) == (4, False)
    assert choice.sentence.startswith(
        "Nothing measured meets the energy budget: the least found is 28.0 kJ, 40 % beyond the "
        "energy budget of 20.0 kJ. Nearest: "
    )
    _, choice = chosen(budget_kJ=0.28)
    assert "100 times the energy budget of 0.280 kJ" in choice.sentence
    _, choice = chosen(budget_kJ=30.0, deadline_s=120.0)
    assert not choice.met
    assert choice.sentence.startswith(
        "The energy budget and the deadline can each be met, but nothing measured meets both. "
        "Nearest: "
    )
    _, choice = chosen(budget_kJ=1.0, deadline_s=120.0, max_gpus=8)
    assert choice.sentence.startswith(
        "The deadline and the number of GPUs can be met, but nothing measured meets the energy "
        "budget: the least found is 28.0 kJ, 28.0 times"
    )
    _, choice = chosen(deadline_s=50.0, power_cap_W=50.0)
    assert choice.sentence.startswith("Nothing measured meets the deadline or the power cap: the ")
    _, choice = chosen(peak_power_W=100.0)
    assert "the least found is a peak of 160 W, 60 % beyond the cap" in choice.sentence
    _, choice = chosen(max_gpus=1, deadline_s=250.0)
    assert not choice.met


def test_a_value_just_beyond_its_limit_is_told_apart_from_it() -> None:
    """Not "the least found is 100 W, 0.3 % beyond the power cap of 100 W"."""
    _, choice = chosen(power_cap_W=69.8)
    assert "the least found is 70.0 W on average, 0.3 % beyond the power cap of 69.8 W" in (
        choice.sentence
    )
    _, choice = chosen(power_cap_W=69.96)
    assert "found is 70.00 W on average, 0.1 % beyond the power cap of 69.96 W" in choice.sentence
    _, choice = chosen(deadline_s=99.999)
    assert "found is 100.00 s, less than 0.1 % beyond the deadline of 99.999 s" in choice.sentence


def test_a_part_of_the_points_is_told_in_the_units_of_all() -> None:
    small, large = point(1, 3000.0, 1500.0), point(2, 3e6, 9e5)
    _, alone = decide([small], Constraints())
    _, beside = decide([small], Constraints(), beside=[large])
    assert "needs 1,500 kJ (estimated) and 50.0 min" in alone.sentence
    assert "needs 0.417 kWh (estimated) and 0.0347 days" in beside.sentence


def test_stated_holds_everything_and_reads_back() -> None:
    asked = Constraints(deadline_s=9.0, objective="cost", price_per_kWh=0.2)
    assert Constraints(**asked.given) == asked
    assert asked.limits == Limits(deadline_s=9.0)


@pytest.mark.parametrize(
    ("objective", "figures", "expected"),
    [
        # Eleven times the time for a joule of a thousand.
        ("energy", [(100.0, 40.04), (1100.0, 40.0)], 0),
        # A per cent of energy is worth a thousandth of time.
        ("energy", [(99.9, 40.36), (100.0, 40.0)], 1),
        # More than a per cent is what was asked for, whatever it costs.
        ("energy", [(100.0, 40.5), (1100.0, 40.0)], 1),
        ("time", [(100.0, 60.0), (100.4, 40.0)], 1),
        ("time", [(100.0, 60.0), (102.0, 40.0)], 0),
        # Each is within a per cent of the next, and not of the least.
        ("energy", [(400.0, 40.0), (300.0, 40.3), (100.0, 40.6), (10.0, 40.9)], 1),
    ],
)
def test_of_what_is_within_a_per_cent_of_the_least_the_other_figure_decides(
    objective: str, figures: list[tuple[float, float]], expected: int
) -> None:
    points = [point(number, *each, spread=1e-4) for number, each in enumerate(figures, 1)]
    best, choice = decide(points, Constraints(objective=objective))
    assert best == points[expected]
    value = 0 if objective == "time" else 1
    least = figures[expected][value] == min(each[value] for each in figures)
    assert (" but for 1 %: " in choice.sentence) != least


# ---- choosing again among the points of a run


def test_the_slowdown_is_relative_to_the_baseline():
    result = large_result()
    today_s = result.baseline.time_to_solution_s
    for share in (0.0, 0.02, 0.1, 0.5):
        found = result.choose(max_slowdown=share)
        fits = [p for p in result.points if p.time_to_solution_s <= (1 + share) * today_s]
        least_kJ = min(p.energy_to_solution_kJ for p in fits)
        assert found.point in fits
        assert found.point.energy_to_solution_kJ <= 1.01 * least_kJ
        assert found.met
        assert "more than today" in found.choice.sentence
    both = result.choose(max_slowdown=0.5, deadline_s=today_s)
    assert both.point == result.choose(max_slowdown=0.0).point
    assert "more than today" not in both.choice.sentence


def test_a_point_is_named_as_the_command_takes_it():
    result = large_result()
    for objective in ("time", "energy", "knee"):
        found = result.choose(Constraints(objective=objective))
        assert result.point(found.name).configuration == found.point.configuration
    peak = result.choose(power_cap_W=1.0)
    assert not peak.met
    assert result.point(peak.name).configuration == peak.point.configuration


def test_a_prediction_is_told_as_one():
    result = large_result()
    meter = replace(result.points[0].meter, name="simulated")
    points = tuple(replace(p, meter=meter, source=meter.basis) for p in result.points)
    found = replace(result, points=points).choose(max_slowdown=0.1)
    assert found.evidence == "predicted"
    assert "nothing was measured" in str(found).splitlines()[-2]


def test_without_a_baseline_a_slowdown_is_refused():
    result = replace(large_result(), baseline=None)
    with pytest.raises(InputError, match="which run 'gpt-h100' did not measure; give a deadline"):
        result.choose(max_slowdown=0.1)
    assert result.choose(deadline_s=1e9).met
    with pytest.raises(InvalidValue, match="max_slowdown is"):
        result.choose(max_slowdown=-0.1)
    nothing = replace(result, points=(), front_points=())
    with pytest.raises(InputError, match="measured nothing"):
        nothing.choose()


def test_a_search_with_a_limit_on_slowdown_chooses_as_asking_again_does(tmp_path):
    result = run_replay(
        write_table(tmp_path / "table", shapes=(4, 6, 8)),  # the baseline is the fastest
        constraints=Constraints(max_slowdown=0.3),
        search=SearchSettings(max_probes=12, seed=1),
        runs_dir=tmp_path / "runs",
        name="r",
        report=False,
    )
    again = result.choose(max_slowdown=0.3)
    assert result.recommended == again.point
    assert result.best != result.baseline
    assert result.best.time_to_solution_s <= 1.3 * result.baseline.time_to_solution_s
    # At speed 3 the table has less energy, for 50 % more time: a window that is not worth a probe.
    assert result.best.configuration.get("speed") == 4
    assert result.choice.rule == "max_slowdown + deadline_s"


def test_where_today_is_kept_it_is_said_as_the_run_says_it():
    """A baseline once was called the fastest, of itself alone."""
    result = result_of(judge_of(searched(np.random.default_rng(4), 0.02)))
    assert result.recommendation.action == "keep"
    assert result.best != result.baseline
    kept = result.choose()
    assert kept.point == result.baseline
    assert kept.choice.sentence == result.headline


# ---- candidates that were never measured


SLOW, FAST = Configuration.of(micro_batch=1), Configuration.of(micro_batch=2, data_parallel=4)


def test_a_measured_setting_and_a_failed_launch_are_left_out() -> None:
    meter = MeterInfo("nvml", "gpu", "a counter")
    setting = Settings({"clock_MHz": 900})
    of_slow = Configuration(SLOW.launch, setting)
    window = Measurement(setting, 3, 5.0, 1.6, 1500.0, 300.0)
    failure = Failure("out_of_memory", "no room")
    records = [
        ProbeRecord(ProbeRequest("p0", SLOW.launch, (setting,)), (window,), meter),
        ProbeRecord(ProbeRequest("p1", FAST.launch), (), meter, failure=failure),
    ]
    assert never_measured([SLOW, of_slow, FAST], records) == (SLOW,)
