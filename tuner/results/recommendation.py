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

from tuner.problem.constraints import Constraints
from tuner.problem.stop_reason import LIMITS
from tuner.results.choice import LIKELY, SAME, ratios_to
from tuner.results.judge import SURE, Judge
from tuner.results.parts import AnotherChoice, Evidence, Point, Recommendation
from tuner.results.result import Result
from tuner.search_spaces.errors import InputError

#: Launch settings without which nothing is said about a space; a search of a short training ends by
#: itself after about so many.
LEAST_TRIED = 4
#: Probability to be better below which a candidate is not called promising: "very unlikely" in the
#: words of Intelligence Community Directive 203 (2015).
UNLIKELY = 0.2


def evidence_of(judge: Judge, point: Point) -> Evidence:
    """Return what is known of a point."""
    if point.source == "predicted" or point.meter.is_simulated:
        return Evidence.PREDICTED
    if judge.baseline is None:
        return Evidence.NO_BASELINE
    return Evidence.VERIFIED if judge.launches_of(point) & judge.fresh else Evidence.MEASURED


def advise(judge: Judge, best: Point, *, met: bool = True) -> Recommendation:
    """Return what to do under the judge's constraints."""
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
    if for_limits or p_best >= SURE:
        return train(best, for_limits=for_limits)
    sure = [p for p in judge.points if p.configuration not in judge.failed]
    sure = [p for p in sure if not missed and judge.p_better(p) >= SURE]
    second, choice = judge.choose([today, *sure])
    if second is not None and second is not today and choice.met:
        return train(second, promising=best)
    promising = best if p_best >= UNLIKELY else None
    return Recommendation("keep", today, evidence_of(judge, best), p_best, promising=promising)


def recommend(result: Result) -> Recommendation | None:
    """Return what to do after a study; None if nothing was measured."""
    best, judge = result.best, result.judged
    if best is None:
        return None
    found = advise(judge, best, met=result.choice.met)
    more: dict[str, Any] = {}
    if result.choice.rule == "better-in-both":
        more["trade"] = _trade(result, judge, found.point)
    if found.promising is not None and found.evidence is not Evidence.PREDICTED:
        spent = result.spent
        more["launch_s"] = spent.time_s / spent.probes if spent.probes else None
        more["launch_kJ"] = spent.energy_kJ / spent.probes if spent.probes else None
        share = None
        if judge.baseline is not None and more["launch_kJ"] and result.length:
            share = more["launch_kJ"] / judge.baseline.energy_to_solution_kJ
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


def too_little_tried(result: Result) -> bool:
    """Return True if a limit ended the search before it can say anything about its space."""
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
    """Choose among the measured points; without constraints, what the run recommends."""
    baseline = result.baseline
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
    return AnotherChoice(
        result.name,
        point_name(result, best),
        best,
        choice,
        baseline,
        evidence_of(judge, best),
        None if baseline is None or today else judge.p_better(best),
        *(judge.differences(best) or ()),
    )
