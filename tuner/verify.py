"""Measure the choice and the baseline again before recommending, in turn, from fresh launches.

A phase of its own after the search: one probe at a time on the search's own executor, the baseline
and the choice in the order A B B A A B, told to the trace and the study like any probe, with the
purpose "verify". Where the choice does not survive (`tuner.verdict`), the next one is tried. It
spends what the limits kept for it and what the search left over. What stands in the trace counts,
so that an interrupted verification goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from search_spaces.configuration import Configuration
from tuner.answer import estimated_points
from tuner.decide import Constraints
from tuner.problem import Problem
from tuner.search import Search
from tuner.settings import FEW_PROBES, SearchSettings
from tuner.verdict import (
    LEAST_PAIRS,
    MOST_TRIES,
    NO_BLAME,
    attempts_of,
    baseline_of,
    may_stay,
    next_in_turn,
    settle,
    tried_in_turn,
)
from tuner.wording import knobs
from workload.probe import ProbeRecord

__all__ = ["MOST_PAIRS", "verify"]

#: Pairs of launches where there is room for them.
MOST_PAIRS = 3
#: A launch that the node spoiled (no fault of the configuration) is made again so often.
SPOILED = 2


def verify(
    search: Search,
    problem: Problem,
    constraints: Constraints,
    settings: SearchSettings,
    *,
    run_dir: Path,
    prefer: str = "",
    settle_on: Callable[[str], None] = lambda key: None,
) -> str:
    """Hold the choice against the baseline; then the next, until one survives or nothing is left.

    Args:
        search: the study's, whose search is over.
        problem: what was searched.
        constraints: what was asked.
        settings: what may be spent, and the seed.
        run_dir, prefer: as in `tuner.answer.build_result`, so that what is verified here is what
            is answered there.
        settle_on: told the key of what is tried: it stays the choice until it falls, although its
            own fresh windows may make a neighbour that nobody verified look better by a hair.

    Returns:
        Why there is no verdict, as a phrase; "" where there is one, or nothing to verify.
    """
    for _ in range(MOST_TRIES):
        points = estimated_points(problem, search.records, seed=settings.seed, run_dir=run_dir)
        settled = settle(points, search.records, constraints, prefer=prefer)
        if settled.to_try is None:
            return ""
        prefer = settled.to_try.key
        settle_on(prefer)
        baseline = baseline_of(search.records)
        assert baseline is not None  # `settle` found something to try
        kept = may_stay(points, baseline, constraints)
        room = _room(search, baseline, settled.to_try)
        if room < LEAST_PAIRS:
            return _no_room(search, settings, run_dir.name)
        if why := _try(search, settled.to_try, baseline, kept, room):
            return why
    return ""


def _room(search: Search, baseline: Configuration, tried: Configuration) -> int:
    """For how many pairs of launches there is room, with those that were made."""
    group = _launches(search, baseline, tried)
    done = sum(record.request.configurations()[0] == tried for record in group)
    return max((len(group) + search.room_for([baseline, tried])) // 2, done)


def _no_room(search: Search, settings: SearchSettings, name: str) -> str:
    """Why nothing was verified, and how to have it verified after all, as a phrase."""
    why, more = "the limits leave no room for it", "higher limits"
    if settings.max_probes is not None and settings.max_probes < FEW_PROBES:
        made = sum(r.failure is None or r.failure.kind != "cancelled" for r in search.records)
        why = f"with fewer than {FEW_PROBES} probes none is kept for it"
        more = f"--max-probes {max(FEW_PROBES, made + 2 * LEAST_PAIRS)}"
    return (
        f"{why}, and it takes at least {LEAST_PAIRS} launches each of the choice and of the "
        f"baseline; the same command with --name {name} and {more} goes on from here"
    )


def _try(
    search: Search, tried: Configuration, baseline: Configuration, kept: bool, room: int
) -> str:
    """Measure one configuration and the baseline in turn; why there is no verdict, or ""."""
    group = _launches(search, baseline, tried)
    pairs = min(MOST_PAIRS, room)
    if not group:
        search.note(
            f"verifying {' '.join(knobs(tried)) or tried.key} against the baseline: {pairs} fresh "
            "launches of each, in turn"
        )
    spoiled = 0
    while len(group) < 2 * pairs:
        of_baseline = next_in_turn(group, baseline)
        what = baseline if of_baseline else tried
        record = search.probe_now(
            what, "verify", "verifying: the baseline" if of_baseline else "verifying: the choice"
        )
        if record is None:  # the limits: a probe took more than expected
            break
        if record.failure is not None and record.failure.kind in NO_BLAME:
            spoiled += 1
            if spoiled > SPOILED:
                return f"its launches were spoiled: {record.failure.message}"
        elif not record.measurements and of_baseline:
            why = record.failure.message if record.failure else "it measured nothing"
            return f"the baseline failed when it was started again: {why}"
        elif not record.measurements:
            break  # a verdict: it failed
        group = _launches(search, baseline, tried)
    attempts = attempts_of(search.records, baseline, kept=kept)
    verdicts = [attempt for attempt in attempts if attempt.configuration == tried]
    if not verdicts:
        return "the limits were reached before two launches of each were made"
    search.note(verdicts[-1].sentence)
    return ""


def _launches(search: Search, baseline: Configuration, tried: Configuration) -> list[ProbeRecord]:
    """The launches made for one attempt so far, the one that has no partner yet included."""
    groups, waiting = tried_in_turn(search.records, baseline)
    return [*groups.get(tried, []), *waiting]
