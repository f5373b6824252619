"""Recommendation of a study: train with its choice, or keep the baseline, and how sure that is.

The choice (`Result.best`) is the configuration that is best by the posterior under the constraints.
It is recommended once it is better than the baseline with a probability of `judge.SURE`. If it is
not, but another measured configuration is, that one is recommended and the choice is named as
promising. If the choice probably meets the limits and the baseline misses them, the choice is
recommended in any case.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from tuner.answer.choice import BOTH, LIKELY, SAME, figures_of, ratios_to
from tuner.answer.judge import SURE, Judge
from tuner.answer.parts import AnotherChoice, Evidence, Point, Recommendation
from tuner.answer.result import Result
from tuner.problem.constraints import Constraints
from tuner.problem.stop_reason import LIMITS
from tuner.search_spaces.errors import InputError

#: Launch settings without which nothing is said about a space; a search of a short training ends by
#: itself after about so many.
LEAST_TRIED = 4
#: Probability to be better below which a candidate is not called promising: "very unlikely" in the
#: words of Intelligence Community Directive 203 (2015).
UNLIKELY = 0.2
#: Objectives that can choose a point which trades energy for time.
TRADING = ("energy", "time", "edp")
#: Probability to be better up to which the odds are about even ("about as likely as not" ends at
#: 60 % in the scale of the IPCC's fifth report): such a candidate is named only if further launches
#: are worth it.
EVEN = 0.6


def evidence_of(judge: Judge, point: Point) -> Evidence:
    """Return the facts of a point."""
    if point.source == "predicted" or point.meter.is_simulated:
        return Evidence.PREDICTED
    if judge.baseline is None:
        return Evidence.NO_BASELINE
    return Evidence.VERIFIED if judge.launches_of(point) & judge.fresh else Evidence.MEASURED


def is_promising(judge: Judge, point: Point, launch_share: float | None = None) -> bool:
    """Return True if a point that is not sure to be better is worth naming beside the advice."""
    p = judge.p_better(point)
    if p < UNLIKELY or not judge.saves_enough(point):
        return False
    return p >= EVEN or judge.more(point, launch_share) is not None


def advise(
    judge: Judge, best: Point, *, met: bool = True, launch_share: float | None = None
) -> Recommendation:
    """Return the recommendation under the judge's constraints.

    Args:
        launch_share: energy of a launch, as a share of the training's.
    """
    today = judge.baseline
    if today is None:
        return Recommendation("train", best, evidence_of(judge, best))
    if best.configuration == today.configuration:
        return Recommendation("keep", today, evidence_of(judge, today))

    def train(point: Point, **more: Any) -> Recommendation:
        energy, time = judge.differences(point) or (None, None)
        p = judge.p_better(point)
        evidence = evidence_of(judge, point)
        return Recommendation("train", point, evidence, p, energy=energy, time=time, **more)

    p_best = judge.p_better(best)
    missed = judge.baseline_met is not None and judge.baseline_met < LIKELY
    for_limits = missed and met and judge.p_for_limits(best) >= LIKELY
    # A plan's today that does not fit in memory is no point.
    cannot_stay = today.configuration not in {point.configuration for point in judge.points}
    if cannot_stay or for_limits or (p_best >= SURE and judge.saves_enough(best)):
        return train(best, for_limits=for_limits)
    promising = best if is_promising(judge, best, launch_share) else None
    sure = [p for p in judge.points if p.configuration not in judge.failed]
    sure = [p for p in sure if not missed and judge.p_better(p) >= SURE and judge.saves_enough(p)]
    second, choice = judge.choose([today, *sure])
    if second is not None and second is not today and choice.met:
        return train(second, promising=promising)
    return Recommendation("keep", today, evidence_of(judge, best), p_best, promising=promising)


def recommend(result: Result) -> Recommendation | None:
    """Return the recommendation of a study; None if nothing was measured."""
    best, judge = result.best, result.judged
    if best is None:
        return None
    spent, more = result.spent, dict[str, Any]()
    launch_kJ = spent.energy_kJ / spent.probes if spent.probes else None
    share = None
    if judge.baseline is not None and launch_kJ and result.length:
        share = launch_kJ / judge.baseline.energy_to_solution_kJ
    found = advise(judge, best, met=result.choice.met, launch_share=share)
    if result.choice.rule == BOTH:
        trade = more["trade"] = _trade(result, judge, found.point)
        more["trade_objective"] = trade and _objective_of(trade, judge)
    if found.promising is not None and found.evidence is not Evidence.PREDICTED:
        more["launch_s"] = spent.time_s / spent.probes if spent.probes else None
        more["launch_kJ"] = launch_kJ
        more["more"] = judge.more(found.promising, share)
    return replace(found, **more)


def _trade(result: Result, judge: Judge, point: Point) -> Point | None:
    # Of the points that trade energy for time, the one with the least product of both; None if that
    # is no less.

    def is_trade(other: Point) -> bool:
        if other.configuration in judge.failed:
            return False
        pair = ratios_to(point, other)
        return min(pair) < 1 - SAME and max(pair) > 1 + SAME and pair[0] * pair[1] < 1

    return min(
        filter(is_trade, result.front_points),
        key=lambda other: math.prod(ratios_to(point, other)),
        default=None,
    )


def _objective_of(trade: Point, judge: Judge) -> str | None:
    for objective in TRADING:
        constraints = replace(judge.constraints, objective=objective)
        if replace(judge, constraints=constraints).choose()[0] is trade:
            return objective
    return None


def too_little_tried(result: Result) -> bool:
    """Return True if a limit ended the search before any conclusion about its space."""
    if result.stop is None or result.stop.kind not in LIMITS:
        return False
    tried = {point.configuration.launch for point in result.points}
    every = int(result.about.get("candidates", 0))
    return len(tried) < LEAST_TRIED and len(result.points) < every


def point_name(result: Result, point: Point) -> str:
    """Return the name of a point for `Result.point`: its number on the front, or its knobs."""
    front = [each.configuration for each in result.front_points]
    if point.configuration in front:
        return str(front.index(point.configuration) + 1)
    return point.configuration.short


def choose(result: Result, constraints: Constraints) -> AnotherChoice:
    """Choose among the measured points; without constraints, the run's recommendation."""
    baseline = result.baseline
    if constraints.given and constraints.need_energy and not result.has_energy:
        raise InputError(
            f"run {result.name!r} measured time alone; choose with --minimize time and no limit on "
            "energy or power"
        )
    if constraints.max_slowdown is not None and baseline is None:
        raise InputError(
            f"the slowdown is relative to today, which run {result.name!r} did not measure; "
            "give a deadline instead"
        )
    if result.length is None:
        constraints.require_limits_of_a_step()
    limits = constraints.relative_to(baseline.time_to_solution_s if baseline else None)
    own = result.judged
    judge = own if not constraints.given else replace(own, constraints=limits)
    best, choice = judge.choose()
    if best is None:
        raise InputError(f"run {result.name!r} measured nothing, so there is nothing to choose")
    if not constraints.given:
        advised = advise(judge, best, met=choice.met).point
        if advised.configuration != best.configuration:
            best, choice = advised, replace(judge.choose([advised])[1], sentence=result.headline)
    today = baseline is not None and best.configuration == baseline.configuration
    energy, time = judge.differences(best) or (None, None)
    return AnotherChoice(
        result.name,
        point_name(result, best),
        best,
        choice,
        baseline,
        evidence_of(judge, best),
        None if baseline is None or today else judge.p_better(best),
        energy,
        time,
        limits=limits.limits,
        alone=choice.met and bool(limits.limits) and _alone(judge, best, limits),
    )


def _alone(judge: Judge, best: Point, constraints: Constraints) -> bool:
    others = [p for p in judge.candidates if p.configuration != best.configuration]
    worst = constraints.limits.worst_ratio(figures_of(others)) if others else ()
    return not any(ratio <= 1 for ratio in np.broadcast_to(worst, len(others)))
