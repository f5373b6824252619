"""Comparison of the recommendations of two runs."""

from __future__ import annotations

from tuner.answer.answer import Answer
from tuner.answer.judge import differences_by_intervals
from tuner.answer.significance import Comparison
from tuner.problem.problem import Recording
from tuner.search_spaces.errors import InputError


def compare_runs(first: Answer, second: Answer) -> Comparison:
    """Compare the recommendations of two runs by their intervals.

    Raises:
        InputError: one of them measured nothing, or their figures cannot be compared.
    """
    if obstacles := _obstacles(first, second):
        raise InputError(
            f"the figures of {first.name} and {second.name} cannot be compared: "
            f"{'; '.join(obstacles)}"
        )
    a, b = first.recommended, second.recommended
    if a is None or b is None:
        raise InputError(f"{(second if a else first).name} measured nothing to compare")
    energy, time = differences_by_intervals(a, b)
    names = [f"{run.name}: {p.configuration.short}" for run, p in ((first, a), (second, b))]
    return Comparison(names[0], names[1], time, energy, b.meter)


def _job(result: Answer) -> str:
    recording = Recording.of(result.about)
    name = result.job.name if result.job else recording.table if recording else ""
    length = f"{result.length:,} steps" if result.length else "of unknown length"
    return f"{name}, {length}".removeprefix(", ")


def _obstacles(first: Answer, second: Answer) -> list[str]:
    found = []
    if _job(first) != _job(second):
        found.append(f"they train {_job(first)} and {_job(second)}")
    batches = [result.job.global_batch if result.job else None for result in (first, second)]
    if None not in batches and batches[0] != batches[1]:
        found.append(f"a step trains a global batch of {batches[0]} and of {batches[1]}")
    meters = [{p.meter.scope for p in result.points} for result in (first, second)]
    if all(meters) and meters[0] != meters[1]:
        scopes = [" and ".join(sorted(each)) for each in meters]
        found.append(f"their energy has the scopes {scopes[0]} and {scopes[1]}")
    sources = [{p.source for p in result.points} for result in (first, second)]
    if all(sources) and sources[0] != sources[1]:
        found.append("one was measured and the other was predicted")
    return found
