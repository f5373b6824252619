"""Measure the choice and the baseline again before recommending, in turn, from fresh launches.

A phase of its own after the search: one probe at a time on the search's own executor, the baseline
and the choice in the order A B B A A B, recorded in the trace and the study like any probe, with
the purpose "verify". Pairs are added until the verdict is clear (`tuner.results.verification`).
Where the choice does not survive, the next one is tried. It spends what the limits kept for it and
what the search left over. Launches in the trace
count, so that an interrupted verification continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.problem.settings import FEW_PROBES, MOST_PAIRS
from tuner.problem.stop_reason import NoVerdict
from tuner.problem.study_spec import StudySpec
from tuner.results.alpha_spending import LEAST_PAIRS, MOST_TRIES, with_plan
from tuner.results.build import measured_points
from tuner.results.limit_probability import Limits
from tuner.results.parts import Attempt
from tuner.results.verification import (
    ab_pairs,
    attempts_of,
    baseline_is_feasible,
    baseline_of,
    choose_verified,
    next_is_baseline,
)
from tuner.search_spaces.configuration import Configuration
from tuner.study.loop import SearchLoop
from tuner.study.rules import constraints_of
from tuner.workload.probe import ProbeRecord

__all__ = ["verify"]

#: A launch that the node spoiled (no fault of the configuration) is made again so often.
SPOILED = 2


def verify(
    search: SearchLoop,
    spec: StudySpec,
    *,
    settle_on: Callable[[str, tuple[int, ...]], None] = lambda key, planned_pairs: None,
) -> NoVerdict | None:
    """Verify the choice against the baseline; then the next one, until one survives.

    Args:
        search: the study's, whose search is over.
        spec: the study.
        settle_on: called with the key of what is tried and the pairs that are planned for each
            candidate. It stays the choice until it falls, although its own new windows may make an
            unverified neighbour look marginally better.

    Returns:
        Why there is no verdict; None if there is one, or nothing to verify.
    """
    problem, prefer, planned = spec.problem, spec.ended.chosen, spec.ended.planned_pairs
    for _ in range(MOST_TRIES):
        points = measured_points(search.records, problem.steps, run_dir=spec.run_dir)
        constraints = constraints_of(spec, search.records, points)
        verified = choose_verified(
            points,
            search.records,
            constraints,
            prefer=prefer,
            planned=planned,
            steps=problem.steps,
        )
        if verified.to_try is None:
            return None
        prefer = verified.to_try.key
        baseline = baseline_of(search.records)
        assert baseline is not None  # `choose_verified` found something to try
        feasible = baseline_is_feasible(points, baseline, constraints)
        room = _room(search, baseline, verified.to_try)
        if room >= LEAST_PAIRS:
            planned = with_plan(planned, _rank(search, baseline, verified.to_try), room)
        settle_on(prefer, planned)
        if room < LEAST_PAIRS:
            return _no_room(search, spec)
        attempt = _Attempt(
            verified.to_try, baseline, feasible, planned, Limits(points, constraints, problem.steps)
        )
        if reason := _try(search, spec, attempt, room):
            return reason
    return None


@dataclass(frozen=True)
class _Attempt:
    """What is verified.

    Attributes:
        tried: the configuration.
        baseline: is launched in turn with it.
        feasible: whether the baseline could be kept instead.
        planned: pairs that are planned for each candidate.
        limits: of the training job.
    """

    tried: Configuration
    baseline: Configuration
    feasible: bool
    planned: tuple[int, ...]
    limits: Limits


def _rank(search: SearchLoop, baseline: Configuration, tried: Configuration) -> int:
    """Return the number of candidates that were launched before this one."""
    before = list(ab_pairs(search.records, baseline)[0])
    return before.index(tried) if tried in before else len(before)


def _room(search: SearchLoop, baseline: Configuration, tried: Configuration) -> int:
    """For how many pairs of launches there is room, with those that were made."""
    group = _launches(search, baseline, tried)
    done = sum(record.request.configurations()[0] == tried for record in group)
    return max((len(group) + search.room_for([baseline, tried])) // 2, done)


def _no_room(search: SearchLoop, spec: StudySpec) -> NoVerdict:
    """Return the reason that the limits leave no room, with what would make room."""
    figures = {"least_pairs": LEAST_PAIRS}
    most = spec.settings.max_probes
    if most is None or most >= FEW_PROBES:
        return NoVerdict("no_room", figures, run=spec.name)
    made = sum(r.failure is None or not r.failure.was_cancelled for r in search.records)
    figures |= {
        "least_probes": FEW_PROBES,
        "enough_probes": max(FEW_PROBES, made + 2 * LEAST_PAIRS),
    }
    return NoVerdict("few_probes", figures, run=spec.name)


def _try(
    search: SearchLoop,
    spec: StudySpec,
    attempt: _Attempt,
    room: int,
) -> NoVerdict | None:
    """Measure one configuration and the baseline alternately; return why there is no verdict."""
    tried, baseline = attempt.tried, attempt.baseline

    def verdict() -> Attempt | None:
        attempts = attempts_of(
            search.records,
            baseline,
            feasible=attempt.feasible,
            planned=attempt.planned,
            limits=attempt.limits,
        )
        return next((each for each in attempts if each.configuration == tried), None)

    group = _launches(search, baseline, tried)
    pairs = min(MOST_PAIRS, room)
    if not group:
        search.note(
            f"verifying {tried.short} against the baseline: at most "
            f"{pairs} fresh launches of each, in turn"
        )
    spoiled = 0
    while len(group) < 2 * pairs:
        of_baseline = next_is_baseline(group, baseline)
        what = baseline if of_baseline else tried
        record = search.probe_now(
            what, "verify", "verifying: the baseline" if of_baseline else "verifying: the choice"
        )
        if record is None:  # the limits: a probe took more than expected
            break
        if record.failure is not None and not record.failure.blames_configuration:
            spoiled += 1
            if spoiled > SPOILED:
                return NoVerdict("spoiled", message=record.failure.message)
        elif not record.measurements and of_baseline:
            why = record.failure.message if record.failure else "it measured nothing"
            return NoVerdict("baseline_failed", message=why)
        elif not record.measurements:
            break  # a verdict: it failed
        group = _launches(search, baseline, tried)
        found = verdict() if len(group) % 2 == 0 else None
        if found is not None and not found.undecided:
            break
    found = verdict()
    if found is None:
        return NoVerdict("limits_reached")
    search.note(found.sentence)
    if found.undecided:
        return NoVerdict("not_clear", {"pairs": found.pairs}, run=spec.name)
    return None


def _launches(
    search: SearchLoop, baseline: Configuration, tried: Configuration
) -> list[ProbeRecord]:
    """Return the launches of one attempt so far, including one without a partner yet."""
    groups, waiting = ab_pairs(search.records, baseline)
    return [*groups.get(tried, []), *waiting]
