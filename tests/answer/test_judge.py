"""The probability of being better, and what is worth another launch."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import ClassVar

import numpy as np
import pytest

import tuner
from tests.answer.test_posterior import configuration, launch
from tests.support.results import NVML
from tests.support.results import point as drawn_point
from tuner.answer.choice import cost_of
from tuner.answer.judge import ENOUGH, SURE, Judge, advise
from tuner.answer.parts import Point
from tuner.answer.posterior import Gain, LaunchPosterior, Windows
from tuner.answer.state import points_of
from tuner.problem.constraints import Constraints
from tuner.search_spaces.configuration import Configuration
from tuner.workload.node.measure.statistics import log_error
from tuner.workload.records.probe import Failure, ProbeRecord

STEPS = 1000


def point(which, time_s, power_W):
    return drawn_point(which, time_s, power_W, NVML)


def judge_of(records: list[ProbeRecord], *, fresh=(), failed=(), **limits) -> Judge:
    posterior = LaunchPosterior.of(Windows.of(records))
    points = points_of(posterior, STEPS)
    today = next(p for p in points if p.configuration == configuration(0))
    constraints = replace(Constraints(**limits), baseline_time_s=today.time_to_solution_s)
    return Judge(points, today, constraints, STEPS, posterior, frozenset(fresh), frozenset(failed))


def searched(rng: np.random.Generator, saving: float, spread: float = 0.01) -> list[ProbeRecord]:
    """Six configurations, the fourth of which saves this share, and two more of the baseline."""
    records = [
        launch(rng, i, i, spread, time=math.log1p(-saving) if i == 3 else 0.05 * (i > 0))
        for i in range(6)
    ]
    return [*records, launch(rng, 6, 0, spread), launch(rng, 7, 0, spread)]


@pytest.mark.parametrize("limit", [3, 6, 8])
def test_a_saving_of_73_percent_is_recommended_by_what_was_measured(limit: int) -> None:
    """Whatever ended the search: nothing that was measured is thrown away."""
    records = [r for i, r in enumerate(searched(np.random.default_rng(1), 0.73)) if i in (0, 3)]
    records += [launch(np.random.default_rng(2), 2 + i, 4 + i, 0.01) for i in range(limit - 2)]
    judge = judge_of(records)
    best, _ = judge.choose()
    advice = advise(judge, best)
    assert (advice.action, advice.point.configuration) == ("train", configuration(3))
    assert advice.p_better >= SURE
    assert advice.energy.relative == pytest.approx(-0.73, abs=0.06)
    energy, time = judge.differences(best)
    assert energy.predicted is time.predicted is False
    assert energy.method == "posterior of all launches"


def test_nothing_is_recommended_where_nothing_differs() -> None:
    wrong = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        records = [launch(rng, i, i, 0.02) for i in range(6)]
        records += [launch(rng, 6, 0, 0.02), launch(rng, 7, 0, 0.02)]
        judge = judge_of(records, fresh=(6, 7))
        best, _ = judge.choose()
        wrong += advise(judge, best).action == "train"
    assert wrong <= 4


def test_the_best_of_many_settings_of_one_launch_is_no_discovery() -> None:
    """Windows err by twice what they state; a hundred clocks are a hundred chances."""
    wrong = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        swept = launch(rng, 1, 0, 0.02, lives=tuple(range(2, 102)))
        noisy = [
            replace(w, step_time_s=w.step_time_s * noise[0], power_W=w.power_W * noise[1])
            for w, noise in zip(
                swept.measurements, np.exp(rng.normal(0, 0.009, (100, 2))), strict=True
            )
        ]
        judge = judge_of([launch(rng, 0, 0, 0.02), replace(swept, measurements=tuple(noisy))])
        best, _ = judge.choose()
        wrong += advise(judge, best).action == "train"
    assert wrong <= 3  # nine if only launches counted as chances


def test_a_small_saving_asks_for_launches_and_a_large_one_for_none() -> None:
    rng = np.random.default_rng(4)
    small, large = (judge_of(searched(rng, saving), fresh=(6, 7)) for saving in (0.06, 0.6))
    best, _ = small.choose()
    more = small.more(best, 1e-4)
    assert small.p_better(best) < ENOUGH
    assert 1 <= more.launches <= 14
    assert not more.of_baseline  # it has three launches, the candidate none since it was chosen
    assert small.more(best, 10.0) is None  # launches that take more than the training
    best, _ = large.choose()
    assert large.p_better(best) >= ENOUGH
    assert large.more(best, 1e-4).launches == 1  # a single launch may be wrong for other reasons
    assert large.more(best, 0.1) is None


def test_launches_after_the_choice_count_without_a_correction_for_luck() -> None:
    rng = np.random.default_rng(4)
    records = searched(rng, 0.08)
    before = judge_of(records, fresh=(6, 7))
    best, _ = before.choose()
    records += [launch(rng, 8 + i, 3, 0.01, time=math.log1p(-0.08)) for i in range(3)]
    after = judge_of(records, fresh=(6, 7, 8, 9, 10))
    again, _ = after.choose()
    assert best.configuration == again.configuration == configuration(3)
    assert after.p_better(again) > max(before.p_better(best), SURE)


def test_what_failed_when_launched_again_is_passed_over() -> None:
    judge = judge_of(searched(np.random.default_rng(1), 0.5), failed=[configuration(3)])
    best, _ = judge.choose()
    assert best.configuration != configuration(3)


def test_a_trade_is_chosen_under_an_objective_only() -> None:
    today, trade = point(configuration(0), 100.0, 300.0), point(configuration(1), 120.0, 150.0)
    free = Judge((today, trade), today, Constraints(), STEPS)
    assert free.choose()[0] is today
    assert Judge((today, trade), today, Constraints(objective="energy"), STEPS).choose()[0] is trade
    assert free.choose()[1].rule == "better-in-both"


def test_the_baseline_is_within_a_tenth_of_itself_for_certain() -> None:
    records = searched(np.random.default_rng(1), 0.0, spread=0.2)
    judge = judge_of(records, max_slowdown=0.1, objective="energy")
    assert judge.p_baseline_meets == 1.0


def test_limits_are_judged_together() -> None:
    rng = np.random.default_rng(9)
    records = searched(rng, 0.3)
    judge = judge_of(records)
    best, _ = judge.choose()
    limits = Constraints(budget_kJ=best.energy_to_solution_kJ, deadline_s=best.time_to_solution_s)
    met, every = judge.chance(best, limits)
    assert met["budget_kJ"] == pytest.approx(0.5, abs=0.2)
    assert met["deadline_s"] == pytest.approx(0.5, abs=0.2)
    assert max(met["budget_kJ"] * met["deadline_s"], 0.26) < every <= min(met.values())


def test_where_the_baseline_misses_the_limits_meeting_them_is_enough() -> None:
    records = searched(np.random.default_rng(1), 0.3)
    today_s = records[0].measurements[0].step_time_s * STEPS
    judge = judge_of(records, deadline_s=0.85 * today_s)
    best, choice = judge.choose()
    advice = advise(judge, best, met=choice.met)
    assert (advice.action, advice.for_limits) == ("train", True)
    assert advice.p_better > 0.95


def test_a_limit_that_both_barely_meet_or_miss_is_no_reason_for_twice_the_energy() -> None:
    rng, records = np.random.default_rng(9), []
    for i, time_s in enumerate((1.003, 0.996, 1.006, 0.998, 1.0, 1.22)):
        drawn = launch(rng, i, (0, 1, 0, 1, 0, 2)[i], 0.0)
        power_W = 40.0 if i in (1, 3) else 20.0
        window = replace(drawn.measurements[0], step_time_s=time_s, power_W=power_W)
        records.append(replace(drawn, measurements=(window,)))
    judge = judge_of(records, deadline_s=STEPS * 1.0)
    best, choice = judge.choose()
    assert best.configuration == configuration(1)
    assert choice.baseline_p_met < 0.5 < choice.p_all_met
    assert advise(judge, best, met=choice.met).action == "keep"


def test_a_sure_second_is_recommended_and_the_better_one_promising() -> None:
    """Twelve launches each of today and of what saves 6 %, and a single one of what may save 11."""
    rng = np.random.default_rng(3)
    records = []
    for number in range(0, 36, 3):
        records += [launch(rng, number, 0, 0.045), launch(rng, number + 1, 1, 0.045, time=-0.06)]
    judge = judge_of([*records, launch(rng, 50, 2, 0.045, time=-0.12)])
    best, choice = judge.choose()
    advice = advise(judge, best, met=choice.met)
    assert best.configuration == configuration(2)
    assert (advice.action, advice.point.configuration) == ("train", configuration(1))
    assert advice.promising == best


def test_a_launch_that_fails_again_is_known_from_the_records() -> None:
    from tuner.answer.judge import failed_again

    rng = np.random.default_rng(3)
    good = launch(rng, 0, 3, 0.0)
    request = replace(good.request, purpose="verify", live=(good.measurements[0].live,))
    failed = ProbeRecord(request, (), good.meter, Failure("out_of_memory", "no memory"))
    assert failed_again([good, failed]) == {configuration(3)}
    node = ProbeRecord(request, (), good.meter, Failure("node", "lost"))
    assert failed_again([good, node]) == frozenset()
    # A training that was over before its window was full says nothing of the configuration.
    over = ProbeRecord(request, (), good.meter, Failure("ended", "the program ended by itself"))
    assert failed_again([good, over]) == frozenset()
    assert failed_again([good, failed, over]) == {configuration(3)}
    assert failed_again([failed, replace(good, request=request)]) == frozenset()


def test_differences_of_points_are_those_of_their_logarithms() -> None:
    a, b = point(configuration(0), 100.0, 300.0), point(configuration(1), 50.0, 300.0)
    energy, time = Judge([a, b], a, Constraints(), STEPS).differences(b)
    assert time.relative == pytest.approx(-0.5)
    assert energy.relative == pytest.approx(-0.5)
    assert time.shown
    for source, predicted in (("measured", False), ("predicted", True)):
        other = replace(b, source=source)
        energy, time = Judge([a, other], a, Constraints(), STEPS).differences(other)
        assert energy.predicted is time.predicted is predicted
        assert time.method == "intervals of the points"


@pytest.mark.extra("tuner.simulated.runner")
def test_predictions_are_judged_by_the_known_error_of_the_models(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """No launch tells anything there, so that neither their number nor their spread counts."""
    result = tuner.optimize(
        "opt-350m",
        cluster="a100-8",
        executor="simulated",
        max_slowdown=0.15,
        search=tuner.SearchSettings(max_probes=10),
        runs_dir=tmp_path,
    )
    judge, today, sure, chances = result.judged, result.baseline, [], []
    assert judge.posterior is None
    for point in result.points:
        if point.configuration == today.configuration:
            continue
        energy, _ = judge.differences(point)
        p_better = judge.p_better(point)
        if energy.high < -0.01:  # the whole interval saves more than a change is worth
            assert p_better > SURE
        elif energy.relative > 0:
            assert p_better < 0.5
        sure.append(p_better > SURE)
        met, _ = judge.chance(point, judge.constraints)
        chances.append(met["deadline_s"])
    assert any(0.001 < chance < 0.999 for chance in chances)  # the models may be wrong, too
    assert any(sure)
    assert not all(sure)
    assert result.recommendation.evidence.value == "predicted"
    assert result.recommendation.more is None


class TestGain:
    """Of a point that takes 0.8 of the time and 1.2 of the power, so 0.96 of the energy."""

    @pytest.fixture
    def pair(self) -> tuple[Point, Point]:
        return point(configuration(0), 100.0, 300.0), point(configuration(1), 80.0, 360.0)

    @pytest.mark.parametrize(
        ("limits", "mean"),
        [
            ({"objective": "energy"}, -math.log(0.96)),
            ({"objective": "time"}, -math.log(0.8)),
            ({}, -math.log(0.96) - math.log(0.8)),
            (
                {"objective": "cost", "price_per_kWh": 0.3, "price_per_gpu_hour": 1e-9},
                -math.log(0.96),
            ),
            (
                {"objective": "cost", "price_per_kWh": 1e-9, "price_per_gpu_hour": 1.0},
                -math.log(0.8),
            ),
        ],
    )
    def test_it_is_the_logarithm_of_what_the_objective_weighs(
        self, pair: tuple[Point, Point], limits: dict, mean: float
    ) -> None:
        today, other = pair
        judge = Judge(pair, today, Constraints(**limits), STEPS)
        gain = judge.gain(other)
        assert gain.mean == pytest.approx(mean, rel=1e-4)
        assert judge.gain(today) is None  # of itself there is none
        errors = [math.hypot(log_error(today.time_interval_s), log_error(other.time_interval_s))]
        errors += [
            math.hypot(log_error(today.energy_interval_kJ), log_error(other.energy_interval_kJ))
        ]
        share = {"energy": (0, 1), "time": (1, 0)}.get(limits.get("objective", ""))
        if share is not None:
            expected = math.hypot(share[0] * errors[0], share[1] * errors[1])
            assert gain.sd == pytest.approx(expected, rel=0.01)

    def test_a_price_of_both_lies_between_and_is_exact(self, pair: tuple[Point, Point]) -> None:
        today, other = pair
        asked = Constraints(objective="cost", price_per_kWh=120.0, price_per_gpu_hour=36.0)
        gain = Judge(pair, today, asked, STEPS).gain(other)
        before, after = cost_of(today, asked), cost_of(other, asked)
        assert gain.mean == pytest.approx(math.log(before / after))
        assert -math.log(0.96) < gain.mean < -math.log(0.8)
        share = 120.0 * (28.8 / 3600) / after  # of the price, for energy; the rest for time
        errors = [
            math.hypot(log_error(a), log_error(b))
            for a, b in (
                (today.energy_interval_kJ, other.energy_interval_kJ),
                (today.time_interval_s, other.time_interval_s),
            )
        ]
        expected = math.hypot(share * errors[0], (1 - share) * errors[1])
        assert gain.sd == pytest.approx(expected, rel=0.01)

    def test_known_errors_of_ratios_take_the_place_of_intervals_and_add_up(
        self, pair: tuple[Point, Point]
    ) -> None:
        today, other = pair
        third = point(configuration(2), 90.0, 200.0)
        known = {other.configuration: (0.01, 0.02), third.configuration: (0.03, 0.05)}
        judge = Judge([*pair, third], today, Constraints(objective="energy"), STEPS, ratio_sd=known)
        gain = judge.gain(other)
        assert gain.sd == pytest.approx(0.02, rel=0.01)
        assert judge.against(other).ratio_sd == {
            today.configuration: pytest.approx((0.01, 0.02)),
            other.configuration: pytest.approx((0.02, 0.04)),
            third.configuration: pytest.approx((0.04, 0.07)),
        }
        assert judge.against(other).today_point is other
        unknown = point(configuration(9), 90.0, 200.0)
        assert judge.against(unknown).ratio_sd is None
        assert Judge(pair, today, Constraints(), STEPS).against(other).ratio_sd is None

    def test_the_chance_of_a_slowdown_is_by_the_error_of_the_ratio(
        self, pair: tuple[Point, Point]
    ) -> None:
        today, _ = pair
        slower = point(configuration(1), 110.0, 200.0)
        asked = replace(Constraints(max_slowdown=0.1), baseline_time_s=today.time_to_solution_s)
        known = {slower.configuration: (0.02, 0.02)}
        judge = Judge([today, slower], today, asked, STEPS, ratio_sd=known)
        met, every = judge.chance(slower, asked)
        assert every == pytest.approx(0.5, abs=0.05)  # just at the limit
        assert set(met.values()) == {every}
        faster = replace(slower, time_to_solution_s=110.0 * math.exp(-0.04))  # by two of it
        assert judge.chance(faster, asked)[1] == pytest.approx(0.977, abs=0.01)
        assert judge.chance(slower, Constraints()) == ({}, 1.0)

    def test_a_launch_is_a_share_of_the_training_where_both_are_known(
        self, pair: tuple[Point, Point]
    ) -> None:
        today, _ = pair  # 30 kJ
        judge = Judge(pair, today, Constraints(), STEPS)
        assert judge.launch_share(3.0, 100) == pytest.approx(0.1)
        assert judge.launch_share(3.0, None) is judge.launch_share(None, 100) is None
        assert judge.launch_share(0.0, 100) is judge.launch_share(3.0, 0) is None
        assert replace(judge, baseline=None).launch_share(3.0, 100) is None


class Known:
    """A posterior that knows one saving, by a launch of each of two configurations."""

    draws: ClassVar[dict] = {}

    def __init__(self, mean: float, sd: float, launch_sd: float) -> None:
        self.gain, self.of_a_launch = Gain.normal(mean, sd), launch_sd
        self.configurations = (configuration(0), configuration(1))

    def launches_of(self, which: Configuration) -> frozenset[int]:
        return frozenset({self.configurations.index(which)})

    def saving(self, *_: object) -> Gain:
        return self.gain

    def by_launches(self, *_: object, only: frozenset[int] | None = None) -> Gain | None:
        return self.gain if only is None else None

    def launch_sd(self, energy: float, time: float) -> float:
        return self.of_a_launch


@pytest.mark.parametrize(
    ("mean", "sd", "launch_sd", "training"),
    [
        (0.03, 0.03, 0.01, 2000.0),
        (0.03, 0.03, 0.02, 2000.0),
        (0.02, 0.03, 0.02, 500.0),
        (0.02, 0.02, 0.02, 150.0),
        (0.05, 0.04, 0.04, 300.0),
        (0.01, 0.02, 0.02, 20.0),  # a training this short pays for none
        (-0.05, 0.02, 0.02, 2000.0),  # nor does a hope this faint
    ],
)
def test_launches_are_bought_by_what_simulated_ones_are_worth(
    mean: float, sd: float, launch_sd: float, training: float
) -> None:
    """Of k further launches, a saving is recommended only if they make it sure."""
    today, other = point(configuration(0), 100.0, 300.0), point(configuration(1), 90.0, 300.0)
    known = Known(mean, sd, launch_sd)
    judge = Judge([today, other], today, Constraints(), STEPS, known)  # type: ignore[arg-type]
    values = {0: 0.0}
    drawn = np.array([NormalDist().inv_cdf((i + 0.5) / 10_000) for i in range(10_000)])
    for k in range(1, 17):
        # Each tells the difference of two launches by a half of what both would.
        left = math.sqrt(1 / (1 / sd**2 + k / (4 * launch_sd**2)))
        later = mean + math.sqrt(sd**2 - left**2) * drawn
        sure = later - 0.005 > 1.645 * left  # the margin of a saving; 95 %
        if sure.mean() > 0.05:
            values[k] = float((later * sure).mean()) * training - k
    more = judge.more(other, 1 / training)
    assert (more.launches if more is not None else 0) == max(values, key=values.__getitem__)


@pytest.mark.parametrize("others", [1, 2, 5])
def test_each_configuration_that_may_have_been_lucky_counts_once(others: int) -> None:
    """The union bound over all but today's, of a saving of 3 % that is known to 1 %."""
    today, other = point(configuration(0), 100.0, 300.0), point(configuration(1), 97.0, 300.0)
    known = Known(0.03, 0.01, 0.01)
    known.configurations = tuple(map(configuration, range(1 + others)))
    judge = Judge([today, other], today, Constraints(), STEPS, known)  # type: ignore[arg-type]
    doubt = 0.5 * math.erfc((0.03 - 0.005) / 0.01 / math.sqrt(2))
    assert judge.p_better(other) == pytest.approx(1 - others * doubt)
    assert judge.p_better(today) == 0.0
