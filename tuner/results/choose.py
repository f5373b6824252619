"""Another choice on an existing front: other limits or another objective, without any probe."""

from __future__ import annotations

from dataclasses import replace

from tuner.problem.constraints import Constraints
from tuner.results.parts import AnotherChoice, Point
from tuner.results.recommendation import advise, evidence_of
from tuner.results.result import Result
from tuner.results.unmeasured import with_unmeasured
from tuner.search_spaces.errors import InputError


def point_name(result: Result, point: Point) -> str:
    """Return the name of a point for `Result.point`: its number on the front, or its knobs."""
    front = [each.configuration for each in result.front_points]
    if point.configuration in front:
        return str(front.index(point.configuration) + 1)
    return point.configuration.short


def choose(result: Result, constraints: Constraints) -> AnotherChoice:
    """Choose among the measured points of a result; without constraints, what the run recommends.

    Raises:
        InputError: nothing was measured, the slowdown is limited and the baseline was not measured,
            or a limit is on the whole training, whose length is unknown.
    """
    baseline = result.baseline
    if constraints.max_slowdown is not None and baseline is None:
        raise InputError(
            f"the slowdown is relative to today, which run {result.name!r} did not measure; "
            "give a deadline instead"
        )
    if not result.length_known:
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
        with_unmeasured(choice, limits, result.surrogates, result.unmeasured, result.steps),
        baseline,
        evidence_of(judge, best),
        None if baseline is None or today else judge.p_better(best),
        energy,
        time,
    )
