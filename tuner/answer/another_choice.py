"""Choice among the measured points under other constraints; nothing is measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tuner.answer.answer import Answer
from tuner.answer.choice import figures_of
from tuner.answer.judge import Judge, advise, evidence_of
from tuner.answer.parts import AnotherChoice, Point
from tuner.problem.constraints import Constraints
from tuner.search_spaces.errors import InputError


def choose(answer: Answer, constraints: Constraints) -> AnotherChoice:
    """Choose among the measured points; without constraints, the run's recommendation."""
    baseline = answer.baseline
    if constraints.given and constraints.need_energy and not answer.has_energy:
        raise InputError(
            f"run {answer.name!r} measured time alone; choose with --minimize time and no limit on "
            "energy or power"
        )
    if constraints.max_slowdown is not None and baseline is None:
        raise InputError(
            f"the slowdown is relative to today, which run {answer.name!r} did not measure; "
            "give a deadline instead"
        )
    if answer.length is None:
        constraints.require_limits_of_a_step()
    limits = replace(constraints, baseline_time_s=answer.today_s)
    own = answer.judged
    judge = own if not constraints.given else replace(own, constraints=limits)
    best, choice = judge.choose()
    if best is None:
        raise InputError(f"run {answer.name!r} measured nothing, so there is nothing to choose")
    if not constraints.given:
        advised = advise(judge, best, met=choice.met).point
        if advised.configuration != best.configuration:
            best, choice = advised, judge.choose([advised])[1]
    energy, time = judge.differences(best) or (None, None)
    return AnotherChoice(
        answer.name,
        answer.name_of(best),
        best,
        choice,
        baseline,
        evidence_of(judge, best),
        judge.p_better(best) if judge.rival(best) else None,
        energy,
        time,
        limits=limits.limits,
        shrunk=judge.shrunk(best),
        alone=choice.met and bool(limits.limits) and _alone(judge, best, limits),
    )


def _alone(judge: Judge, best: Point, constraints: Constraints) -> bool:
    others = [p for p in judge.candidates if p.configuration != best.configuration]
    worst = constraints.limits.worst_ratio(figures_of(others)) if others else ()
    return not any(ratio <= 1 for ratio in np.broadcast_to(worst, len(others)))
