"""Recommendations: when to train with the choice, when to keep the baseline, and why."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tuner.display.text import summary_lines
from tuner.formatting import settings_text
from tuner.problem.constraints import Constraints
from tuner.results.choice import decide, front_of
from tuner.results.parts import Attempt, Point, Spent, Verification
from tuner.results.recommendation import difference_of_points, recommend
from tuner.results.result import Result
from tuner.results.significance import Difference
from tuner.search_spaces.configuration import Configuration
from tuner.workload.probe import MeterInfo

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


def result(
    other: tuple[float, float] = (5.0, 50.0),
    *,
    constraints: Constraints | None = None,
    verification: Verification | None = None,
    today: tuple[float, float] | None = (10.0, 100.0),
    meter: MeterInfo = METER,
    **more,
) -> Result:
    """A study of a baseline (10 kJ, 100 s) and one other configuration."""
    constraints = constraints or Constraints()
    points = [point(OTHER, *other, meter=meter)]
    baseline = point(TODAY, *today, meter=meter) if today else None
    points += [baseline] if baseline else []
    best, choice = decide(points, front_of(points), constraints)
    if baseline is not None:
        choice = replace(choice, baseline_met=decide([baseline], [baseline], constraints)[1].met)
    given = {
        "name": "study",
        "run_dir": None,
        "front_points": front_of(points),
        "points": tuple(points),
        "best": best,
        "choice": choice,
        "baseline": baseline,
        "spent": Spent(1.0, 10.0, 2, 0, 2, None, None),
        "steps": 100,
        "constraints": constraints.limits,
        "verification": verification,
        **more,
    }
    return Result(**given)


def difference(quantity: str, relative: float, half: float, p: float) -> Difference:
    return Difference(quantity, relative, relative - half, relative + half, p, "test")


def attempt(energy: float, time: float, *, half: float, p: float, survived: bool) -> Attempt:
    return Attempt(
        OTHER,
        3,
        difference("step_time", time, half, p),
        difference("energy_per_step", energy, half, p),
        survived,
        "reason",
        "sentence",
    )


def test_a_verified_saving_is_recommended_in_one_sentence() -> None:
    tried = attempt(-0.82, -0.82, half=0.01, p=1e-6, survived=True)
    found = result(verification=Verification("confirmed", "Verified.", (tried,), 6))
    advice = found.recommendation
    assert (advice.action, advice.basis, advice.promising) == ("train", "verified", None)
    assert advice.headline == (
        "Train with zero0 optim-none: 82 % less energy and 82 % less time "
        "than today (verified, p < 0.001)."
    )
    assert advice.details == ()
    assert found.recommended is found.best


def test_a_trade_says_both_and_what_was_not_shown() -> None:
    tried = attempt(0.1, -0.2, half=0.01, p=0.004, survived=True)
    advice = result(verification=Verification("confirmed", "", (tried,), 6)).recommendation
    assert "20 % less time but 10 % more energy than today (verified, p = 0.004)" in advice.headline
    unclear = replace(tried, energy=difference("energy_per_step", -0.01, 0.05, 0.5))
    advice = result(verification=Verification("confirmed", "", (unclear,), 6)).recommendation
    assert "20 % less time than today; no difference in energy shown (verified" in advice.headline


def test_an_unfinished_verification_keeps_the_baseline_whatever_the_search_measured() -> None:
    found = result(verification=Verification("unfinished", "The choice is not verified: limits."))
    advice = found.recommendation
    assert (advice.action, advice.basis) == ("keep", "not_shown")
    assert advice.headline == ("Keep what you run today: nothing measured was shown to be better.")
    assert found.recommended is found.baseline
    assert advice.promising is found.best
    (sentence,) = advice.details
    assert sentence.startswith("Promising but unproven: zero0 optim-none")
    assert "-50.0 % energy" in sentence
    front = next(t for t in found.plot("front").data if t.name in ("chosen", "promising"))
    assert front.name == "promising"
    text = "\n".join(summary_lines(found))
    assert text.index("Keep what you run") < text.index("not verified: limits")
    assert "Against the baseline it takes" not in text


def test_a_rejected_candidate_is_promising_with_the_launches_that_would_prove_it() -> None:
    tried = attempt(-0.04, -0.04, half=0.08, p=0.3, survived=False)
    found = result(verification=Verification("refuted", "Nothing survived.", (tried,), 6))
    found = replace(found, best=found.baseline)
    advice = found.recommendation
    assert advice.action == "keep"
    assert advice.promising.configuration == OTHER
    # Half-width 8 % at 3 launches is 4 % at 3 * 2^2.
    assert "about 12 launches of each in turn (3 made)" in advice.details[1]


def test_a_candidate_shown_to_be_worse_is_not_promising() -> None:
    tried = attempt(0.04, 0.04, half=0.01, p=0.001, survived=False)
    found = result(verification=Verification("refuted", "Nothing survived.", (tried,), 6))
    advice = replace(found, best=found.baseline).recommendation
    assert (advice.action, advice.basis, advice.promising) == ("keep", "nothing_better", None)


@pytest.mark.parametrize("energy_kJ", [9.9, 10.0])
def test_without_verification_overlapping_intervals_show_nothing(energy_kJ: float) -> None:
    off = Verification("off", "Not verified: a recorded trace.")
    found = result((energy_kJ, 99.5), verification=off)
    assert found.best.configuration == OTHER
    advice = found.recommendation
    assert advice.action == "keep"
    assert "tuner optimize" in advice.details[1]


def test_without_verification_a_clear_saving_is_recommended_with_what_it_rests_on() -> None:
    found = result(verification=Verification("off", "Not verified: a recorded trace."))
    advice = found.recommendation
    assert (advice.action, advice.basis) == ("train", "measured")
    assert advice.headline.endswith(
        "50 % less energy and 50 % less time than today (not verified)."
    )
    assert "looks better than it is" in advice.details[0]


def test_a_plan_says_that_it_is_a_prediction() -> None:
    off = Verification("off", "Not verified.")
    simulated = MeterInfo("simulated", "gpu", "analytic models", estimated=True)
    advice = result(verification=off, meter=simulated).recommendation
    assert advice.basis == "predicted"
    assert "(predicted, not measured)" in advice.headline
    assert "energy (estimated)" in advice.headline


def test_where_only_the_choice_meets_the_constraints_it_is_recommended_unproven() -> None:
    unfinished = Verification("unfinished", "The choice is not verified: limits.")
    found = result(constraints=Constraints(budget_kJ=6), verification=unfinished)
    advice = found.recommendation
    assert (advice.action, advice.basis) == ("train", "constraints")
    assert "it trains within 6.00 kJ, and what you run today does not" in advice.headline
    assert "not verified" in advice.headline
    # Where the baseline meets them too, it is kept.
    found = result(constraints=Constraints(budget_kJ=60), verification=unfinished)
    assert found.recommendation.action == "keep"
    # Where neither does, the nearest is no reason to change.
    found = result(constraints=Constraints(budget_kJ=1), verification=unfinished)
    assert found.recommendation.action == "keep"
    assert "nothing measured trains within 1.00 kJ" in found.recommendation.headline


def test_no_worse_is_enough_where_the_baseline_does_not_meet_the_constraints() -> None:
    tried = attempt(0.01, 0.01, half=0.03, p=0.6, survived=True)
    found = result(
        (10.0, 100.5),
        today=(12.0, 100.0),
        constraints=Constraints(budget_kJ=11),
        verification=Verification("confirmed", "Verified.", (tried,), 6),
    )
    advice = found.recommendation
    assert (advice.action, advice.basis) == ("train", "constraints")
    assert "no difference in energy or time shown (verified); it trains" in advice.headline


def test_a_limit_that_is_not_sure_to_be_met_comes_with_its_probability() -> None:
    tried = attempt(0.2, 0.01, half=0.03, p=0.6, survived=True)
    verified = Verification("confirmed", "Verified.", (tried,), 6)
    found = result((10.9, 100.5), today=(12.0, 100.0), constraints=Constraints(budget_kJ=11))
    found = replace(found, verification=verified)
    unsure = replace(found.choice, p_all_met=0.77, baseline_p_met=0.2)
    advice = replace(found, choice=unsure).recommendation
    assert advice.headline.endswith(
        "(3 fresh launches of each); it trains within 11.0 kJ with a probability of 77 %, "
        "and what you run today probably does not."
    )
    unlikely = replace(found.choice, p_all_met=0.4, baseline_p_met=0.0)
    advice = replace(found, choice=unlikely).recommendation
    assert advice.action == "keep"
    assert advice.headline == (
        "Keep what you run today, although it does not train within 11.0 kJ: nothing measured was "
        "shown to do so."
    )


def test_a_cost_that_may_exceed_the_saving_is_in_the_headline() -> None:
    tried = attempt(0.14, -0.22, half=0.01, p=0.01, survived=True)
    for half, words in (
        (0.25, "no difference in energy shown, but it may take up to 39 % more energy (verified"),
        (0.05, "no difference in energy shown (verified"),
        (9.0, "shown, but how much more energy it may take is not known (verified"),
    ):
        unclear = replace(tried, energy=difference("energy_per_step", 0.14, half, 0.3))
        advice = result(verification=Verification("confirmed", "", (unclear,), 6)).recommendation
        assert words in advice.headline


def test_a_survivor_that_shows_nothing_better_is_not_recommended() -> None:
    """An attempt that promised no saving survives, but a baseline that may stay is kept."""
    tried = attempt(0.0, 0.0, half=0.02, p=0.9, survived=True)
    found = result(verification=Verification("confirmed", "Verified.", (tried,), 6))
    assert found.recommendation.action == "keep"


def test_without_a_measured_baseline_the_choice_is_recommended_without_a_saving() -> None:
    advice = result(today=None).recommendation
    assert (advice.action, advice.basis) == ("train", "no_baseline")
    assert "no saving is known" in advice.headline
    assert "dp2" in advice.headline


def test_where_nothing_was_measured_there_is_no_recommendation() -> None:
    found = result(points=(), front_points=(), best=None, baseline=None)
    assert recommend(found) is None
    assert found.recommended is None
    assert found.to_json()["recommendation"] is None


def test_a_lower_price_is_a_saving_too() -> None:
    one = Configuration.of(data_parallel=1)
    points = (point(one, 10.0, 101.0), point(TODAY, 9.9, 100.0))
    off = Verification("off", "Not verified.")
    found = result(points=points, best=points[0], baseline=points[1], verification=off)
    assert found.recommendation.action == "keep"
    choice = replace(found.choice, objective="least-cost", objective_value=1.0, baseline_value=1.9)
    assert replace(found, choice=choice).recommendation.action == "train"


def test_point_and_json_name_the_recommendation() -> None:
    found = result(verification=Verification("unfinished", "Not verified."))
    assert found.point("recommended") is found.baseline
    said = found.to_json()["recommendation"]
    assert said["action"] == "keep"
    assert said["promising"] == OTHER.to_json()
    assert said["headline"] == found.recommendation.headline


def test_differences_of_points_are_those_of_their_logarithms() -> None:
    a, b = point(TODAY, 10.0, 100.0), point(OTHER, 9.0, 100.0)
    energy = difference_of_points("energy_per_step", a, b)
    assert energy.relative == pytest.approx(-0.1)
    error = math.hypot(*[math.log(1.01 / 0.99) / (2 * 1.6449)] * 2)
    assert energy.low == pytest.approx(0.9 * math.exp(-1.96 * error) - 1, abs=1e-5)
    assert energy.shown
    assert not difference_of_points("step_time", a, b).shown
    exact = replace(b, energy_interval_kJ=(9.0, 9.0))
    certain = difference_of_points(
        "energy_per_step", replace(a, energy_interval_kJ=(10.0, 10.0)), exact
    )
    assert certain.shown


def test_settings_are_named_by_what_differs() -> None:
    assert settings_text(OTHER, TODAY) == "zero0 optim-none"
    assert settings_text(TODAY, TODAY) == TODAY.short
