"""Knobs of which the devices take no value, which stay as they are for the rest of a study.

Whether a GPU takes a lock of its clock only the first attempt tells, in a probe. From then on the
candidates are those of the study without the knob, so that every other knob is still searched. The
trace holds the refusals, and a study that continues or is read again begins with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tuner.problem.problem import Problem
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.records.probe import ProbeRecord


def unsupported_knobs(records: Iterable[ProbeRecord]) -> dict[str, str]:
    """Return the knobs that devices refused as such, each with its first refusal's sentence."""
    found: dict[str, str] = {}
    for record in records:
        for missed in record.missed:
            for knob in missed.unsupported:
                found.setdefault(knob, missed.message)
    return found


def fixed_knobs(record: ProbeRecord) -> list[str]:
    """Return a sentence on each knob that stays as it is because of this probe."""
    return [
        f"{knob} stays as it is from now on, and the other knobs are searched: {why}"
        for knob, why in unsupported_knobs([record]).items()
    ]


def without_unsupported(problem: Problem, records: Iterable[ProbeRecord]) -> Problem:
    """Return the problem without the knobs that devices refused; the same object if it has none."""
    knobs = unsupported_knobs(records)
    candidates = problem.candidates
    if not any(knob in c.live for c in candidates for knob in knobs):
        return problem
    kept = dict.fromkeys(_without(c, knobs) for c in candidates)
    reduced = Candidates.from_configurations(kept)
    return replace(
        problem, candidates=replace(reduced, among=candidates.whole, knobs=candidates.knobs)
    )


def _without(configuration: Configuration, knobs: Iterable[str]) -> Configuration:
    live = {name: value for name, value in configuration.live.items() if name not in knobs}
    return Configuration(configuration.launch, Settings(live))
