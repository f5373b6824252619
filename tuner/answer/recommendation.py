"""Recommendation of a study: train with its choice, or keep the baseline, and how sure that is.

The choice (`Answer.best`) is the configuration that is best by the posterior under the constraints.
It is recommended once it is better than the baseline with a probability of `judge.SURE`. If it is
not, but another measured configuration is, that one is recommended and the choice is named as
promising. If the choice probably meets the limits and the baseline misses them, the choice is
recommended in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tuner.answer.choice import BOTH, LIKELY, SAME, ratios_to
from tuner.answer.judge import SURE, Judge
from tuner.answer.parts import Choice, Evidence, Point, Recommendation, SearchCost

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
    if point.source == "predicted":
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
    missed = judge.p_baseline_meets < LIKELY
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


def recommend(
    judge: Judge,
    best: Point,
    choice: Choice,
    spent: SearchCost,
    length: int | None,
    front: Sequence[Point],
) -> Recommendation:
    """Return the recommendation of a study with this choice.

    Args:
        length: steps of the whole training; None if unknown.
    """
    more: dict[str, Any] = {}
    launch_kJ = spent.energy_kJ / spent.probes if spent.probes else None
    share = judge.launch_share(launch_kJ, length)
    found = advise(judge, best, met=choice.met, launch_share=share)
    if choice.rule == BOTH:
        trade = more["trade"] = _trade(front, judge, found.point)
        more["trade_objective"] = trade and _objective_of(trade, judge)
    if found.promising is not None and found.evidence is not Evidence.PREDICTED:
        more["launch_s"] = spent.time_s / spent.probes if spent.probes else None
        more["launch_kJ"] = launch_kJ
        more["more"] = judge.more(found.promising, share)
    return replace(found, **more)


def _trade(front: Sequence[Point], judge: Judge, point: Point) -> Point | None:
    # Of the points that trade energy for time, the one with the least product of both; None if that
    # is no less.

    def is_trade(other: Point) -> bool:
        if other.configuration in judge.failed:
            return False
        pair = ratios_to(point, other)
        return min(pair) < 1 - SAME and max(pair) > 1 + SAME and pair[0] * pair[1] < 1

    return min(
        filter(is_trade, front),
        key=lambda other: math.prod(ratios_to(point, other)),
        default=None,
    )


def _objective_of(trade: Point, judge: Judge) -> str | None:
    for objective in TRADING:
        constraints = replace(judge.constraints, objective=objective)
        if replace(judge, constraints=constraints).choose()[0] is trade:
            return objective
    return None
