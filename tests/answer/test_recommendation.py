"""Recommendations: when to train with the choice, when to keep the baseline, and in which words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.answer.test_judge import judge_of, searched
from tests.answer.test_posterior import configuration, launch
from tuner.answer.choice import front_of
from tuner.answer.judge import EVEN, Judge
from tuner.answer.parts import Evidence, Point, ResolvedRequest, SearchCost, Verification
from tuner.display.advice import details, evidence_sentence
from tuner.display.text import summary_lines
from tuner.formatting import probability, settings_text
from tuner.problem.constraints import Constraints
from tuner.problem.settings import NoVerdict, StopReason
from tuner.result import Result
from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import MeterInfo

METER = MeterInfo("nvml", "gpu", "NVML total-energy counter")
TODAY = Configuration.of(data_parallel=2, zero_stage=2, optimizer_offload="cpu")
OTHER = Configuration.of(data_parallel=2, zero_stage=0, optimizer_offload="none")


def point(configuration: Configuration, energy_kJ: float, time_s: float, **more) -> Point:
    """A point whose 90 % intervals reach 1 % to either side."""
    given = {"source": "measured", "windows": 1, "p_nondominated": 0.5, "meter": METER, **more}
    return Point(
        configuration=configuration,
        energy_to_solution_kJ=energy_kJ,
        time_to_solution_s=time_s,
        energy_interval_kJ=(0.99 * energy_kJ, 1.01 * energy_kJ),
        time_interval_s=(0.99 * time_s, 1.01 * time_s),
        power_W=1000 * energy_kJ / time_s,
        **given,
    )


def result_of(judge: Judge, **more) -> Result:
    best, choice = judge.choose()
    given = {
        "name": "study",
        "run_dir": None,
        "front_points": front_of(judge.points),
        "points": tuple(judge.points),
        "best": best,
        "choice": choice,
        "baseline": judge.baseline,
        "spent": SearchCost(1.0, 200.0, 10, 0, 2, None, None),
        "steps": judge.steps,
        "request": ResolvedRequest(judge.constraints),
        "judge": judge,
        **more,
    }
    if judge.posterior is not None:
        windows = judge.posterior.windows
        made, rows = windows.measurements, windows.rows.items()
        given["windows"] = {c: tuple(made[i] for i in own) for c, own in rows}
    return Result(**given)


def result(
    other: tuple[float, float] = (5.0, 50.0),
    *,
    constraints: Constraints | None = None,
    today: tuple[float, float] | None = (10.0, 100.0),
    meter: MeterInfo = METER,
    source: str = "measured",
    **more,
) -> Result:
    """A study of a baseline (10 kJ, 100 s) and one other configuration, by their intervals."""
    points = [point(OTHER, *other, meter=meter, source=source)]
    baseline = point(TODAY, *today, meter=meter, source=source) if today else None
    points += [baseline] if baseline else []
    return result_of(Judge(points, baseline, constraints or Constraints(), 100), **more)


def test_a_saving_is_recommended_in_one_sentence_with_how_sure_it_is() -> None:
    found = result((1.8, 18.0))
    advice = found.recommendation
    assert (advice.action, advice.evidence, advice.promising) == ("train", "measured", None)
    assert found.headline == (
        "Train with zero0 optim-none: 82 % less energy and 82 % less time than today "
        "(more than 99.9 % sure)."
    )
    assert details(found) == ()
    assert found.recommended is found.best


def test_what_is_free_comes_first_and_a_trade_stands_beside_it() -> None:
    found = result((11.0, 80.0))
    assert found.recommendation.action == "keep"
    assert found.headline == (
        "Keep what you run today: nothing better in both energy and time was found among 1 other."
    )
    (trade,) = details(found)
    assert trade == (
        "A trade: zero0 optim-none takes 20 % less time for 10 % more energy than today "
        "(--minimize time)."
    )
    asked = result((11.0, 80.0), constraints=Constraints(objective="time"))
    assert "20 % less time but 10 % more energy than today" in asked.headline
    assert details(asked) == ()


@pytest.mark.parametrize(
    ("others", "option"),
    [
        ([], " (--minimize energy)"),
        ([(7.5, 150.0)], " (--minimize edp)"),
    ],
)
def test_the_option_beside_a_trade_chooses_it(others, option) -> None:
    today, trading = point(TODAY, 10.0, 100.0), point(OTHER, 8.0, 110.0)
    more = [point(configuration(i), *each) for i, each in enumerate(others)]
    found = result_of(Judge([today, trading, *more], today, Constraints(), 100))
    (trade,) = (line for line in details(found) if line.startswith("A trade"))
    assert trade == (
        f"A trade: zero0 optim-none takes 20 % less energy for 10 % more time than today{option}."
    )


def test_probably_better_and_not_better_have_other_headlines() -> None:
    """One launch each that differ by 6 %: perhaps; by -10 %: nothing better was found."""
    rng = np.random.default_rng(0)
    records = [launch(rng, 0, 0, 0.0), launch(rng, 1, 0, 0.0, time=0.03)]
    records += [launch(rng, 2, 1, 0.0, time=-0.07), launch(rng, 3, 2, 0.0, time=0.1)]
    found = result_of(judge_of(records))
    advice = found.recommendation
    assert (advice.action, advice.promising.configuration) == ("keep", configuration(1))
    assert (advice.launch_s, advice.launch_kJ) == (20.0, 0.1)  # a tenth of what ten probes took
    assert 0.5 < advice.p_better < 0.95
    assert "for now: mb2 probably saves" in found.headline
    assert f"({probability(advice.p_better)} sure)" in found.headline
    assert f"{advice.more.launches} more launch" in found.headline
    assert details(found)[-1].startswith("The same command with --name study and higher limits")
    worse = result_of(judge_of([*records[:2], records[3]]))
    assert worse.headline == (
        "Keep what you run today: nothing better in both energy and time was found among 1 other."
    )


SMALL = "Keep what you run today: no difference worth a change was found among 1 other."


@pytest.mark.parametrize("source", ["measured", "predicted"])
@pytest.mark.parametrize(
    ("other", "constraints"),
    [
        ((9.91, 100.4), Constraints()),
        ((9.97, 99.7), Constraints()),
        ((9.91, 99.1), Constraints()),  # 84 % sure
        ((9.92, 50.0), Constraints(objective="energy")),  # half the time was not asked for
    ],
)
def test_a_change_that_is_small_or_at_even_odds_is_no_finding(
    other: tuple[float, float], constraints: Constraints, source: str
) -> None:
    found = result(other, source=source, constraints=constraints)
    assert found.recommendation.action == "keep"
    assert found.recommendation.promising is None
    assert found.headline == SMALL
    assert str(found).startswith(SMALL)
    assert found.choose().point == found.baseline
    assert "Keep what you run today" in found.choose().choice.sentence


def known_within(factor: float, *figures: tuple[Configuration, float, float]) -> list[Point]:
    return [
        replace(
            point(each, energy, time),
            energy_interval_kJ=(energy / factor, energy * factor),
            time_interval_s=(time / factor, time * factor),
        )
        for each, energy, time in figures
    ]


@pytest.mark.parametrize(
    ("factor", "others", "words"),
    [
        (
            3.0,
            ((9.8, 99.0),),
            "for now: the measurements are too uncertain to tell it from the other.",
        ),
        (3.0, ((9.8, 99.0), (12.0, 130.0)), "too uncertain to tell it from the 2 others."),
        (1.02, ((10.0, 101.0),), "today: nothing better in both energy and time was found"),
        # One is told apart: the search did find something out.
        (1.5, ((9.9, 100.4), (90.0, 900.0)), "no difference worth a change was found among 2"),
    ],
)
def test_a_noise_that_hides_large_differences_is_no_finding(
    factor: float, others: Sequence[tuple[float, float]], words: str
) -> None:
    names = (OTHER, *(configuration(i) for i in range(2, len(others) + 1)))
    figures = [(TODAY, 10.0, 100.0), *((n, *each) for n, each in zip(names, others, strict=True))]
    today, *rest = known_within(factor, *figures)
    found = result_of(Judge([*rest, today], today, Constraints(), 100))
    assert words in found.headline
    assert found.recommendation.action == "keep"


@pytest.mark.parametrize(("energy_kJ", "keeps"), [(9.92, True), (9.88, False)])
def test_a_sure_saving_below_one_per_cent_is_no_reason_to_change(
    energy_kJ: float, keeps: bool
) -> None:
    today, other = (
        replace(
            point(each, energy, 100.0),
            energy_interval_kJ=(energy * (1 - 1e-5), energy * (1 + 1e-5)),
            time_interval_s=(99.999, 100.001),
        )
        for each, energy in ((TODAY, 10.0), (OTHER, energy_kJ))
    )
    judged = Judge([other, today], today, Constraints(), 100)
    assert judged.p_better(other) > 0.95
    found = result_of(judged)
    assert (found.recommendation.action == "keep") == keeps
    assert (found.headline == SMALL) == keeps


def test_a_prediction_at_even_odds_is_not_named() -> None:
    named = set()
    for time_s in (99.9, 100.2, 100.5, 100.8):
        found = result((9.89, time_s), source="predicted")
        even = found.judged.p_better(found.best) < EVEN
        assert even == (found.recommendation.promising is None) == (found.headline == SMALL)
        named.add(even)
    assert named == {True, False}


def test_an_unfinished_verification_throws_no_evidence_away() -> None:
    """A saving of half is recommended whatever ended the search, and the reason is told."""
    judge = judge_of(searched(np.random.default_rng(1), 0.5), fresh=(6, 7))
    for kind in ("stopped", "limits_reached", "not_requested"):
        found = result_of(judge, verification=Verification(2, 1.0, NoVerdict(kind)))
        assert found.recommendation.action == "train"
        assert "no more were made" in evidence_sentence(found)
    node = Verification(2, 1.0, NoVerdict("spoiled", "no memory left"))
    assert "spoiled by the node: no memory left" in evidence_sentence(
        result_of(judge, verification=node)
    )


def test_launches_are_counted() -> None:
    found = result_of(judge_of(searched(np.random.default_rng(1), 0.5), fresh=(6, 7)))
    assert evidence_sentence(found) == "Rests on 1 launch of it and 3 of today."


def test_a_plan_says_that_it_is_a_prediction() -> None:
    meter = MeterInfo("simulated", "gpu", "analytic models", estimated=True)
    found = result(meter=meter, source="predicted")
    assert found.recommendation.evidence is Evidence.PREDICTED
    assert "(predicted, not measured)" in found.headline
    assert "sure)" not in found.headline
    assert "Every figure is predicted" in details(found)[0]


def test_where_only_the_choice_meets_the_limits_it_is_recommended() -> None:
    found = result((9.9, 99.0), constraints=Constraints(deadline_s=99.5))
    advice = found.recommendation
    assert (advice.action, advice.for_limits) == ("train", True)
    assert "it trains within 99.5 s with a probability of" in found.headline
    assert found.headline.endswith("and what you run today does not.")


def test_limits_that_nothing_meets_are_told() -> None:
    found = result((9.0, 90.0), constraints=Constraints(deadline_s=50.0))
    assert "nothing measured trains within 50.0 s, and this comes nearest" in found.headline


def test_without_a_baseline_the_choice_is_recommended_without_a_saving() -> None:
    found = result(today=None)
    assert found.recommendation.evidence is Evidence.NO_BASELINE
    assert found.headline == (
        "Train with dp2 zero0: the best of 1 measured configurations. What you run "
        "today was not measured, so no saving is known."
    )


def test_where_nothing_was_measured_there_is_no_recommendation() -> None:
    found = replace(result(), best=None, baseline=None, points=(), front_points=())
    assert found.recommendation is None
    assert found.headline == ""


def test_few_probes_are_told_with_how_to_go_on() -> None:
    stop = StopReason("max_probes", {"max_probes": 2, "reserved": 0})
    found = result((10.0, 100.0), stop=stop, about={"candidates": 40})
    assert found.recommendation.action == "keep"
    assert "The same command with --name study and higher limits continues" in details(found)[-1]


def test_a_lower_price_is_a_saving_too() -> None:
    prices = Constraints(objective="cost", price_per_kWh=0.3, price_per_gpu_hour=0.0001)
    found = result((9.0, 103.0), constraints=prices)
    assert found.recommendation.action == "train"


def test_one_choice_everywhere() -> None:
    found = result_of(judge_of(searched(np.random.default_rng(1), 0.3)))
    advised = found.recommended.configuration
    assert found.choose().point.configuration == advised
    assert found.point("recommended").configuration == advised
    named = settings_text(advised, found.baseline.configuration)
    assert named in found.headline
    assert named in "\n".join(summary_lines(found))
    assert found.compare().step_time.relative == pytest.approx(found.recommendation.time.relative)
    assert found.to_json()["recommendation"]["point"] == advised.to_json()
    assert found.to_json()["headline"] == found.headline
