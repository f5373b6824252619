"""Baseline to measure next: the user's own, or the largest default that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.problem.baseline import is_default
from tuner.problem.problem import Problem
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.probe import ProbeRecord

#: Number of times that a cancelled baseline is tried.
BASELINE_TRIES = 2
#: Knobs with which a user makes a configuration fit, in the order in which they are tried.
_LIGHTER = ("micro_batch", "zero_stage", "activation_checkpointing", "optimizer_offload")


def baseline_due(problem: Problem, records: Sequence[ProbeRecord]) -> Configuration | None:
    """Return the baseline that has to be measured, or None.

    A baseline of the user's is measured or fails. Where the default one runs out of memory, the
    next lighter candidate takes its place (`lighter`).
    """
    baseline = problem.baseline
    tries = [record for record in records if record.request.purpose == "baseline"]
    if baseline is None or any(record.measurements for record in tries):
        return None
    by_default = is_default(problem.identity)
    while True:
        own = [r for r in tries if r.request.configurations()[0] == baseline]
        failed = [r.failure for r in own if r.failure and r.failure.blames_configuration]
        if not failed:
            return baseline if len(own) < BASELINE_TRIES else None
        if not by_default or not failed[-1].type.lacks_memory:
            return None
        following = next(lighter(baseline, problem), None)
        if following is None:
            return None
        baseline = following


def lighter(configuration: Configuration, problem: Problem) -> Iterator[Configuration]:
    """Yield candidates that need less memory in one knob: a smaller micro-batch, a higher ZeRO
    stage, checkpointed activations, the optimizer on the host."""
    candidates = problem.candidates
    for knob in _LIGHTER:
        values = {c.get(knob) for c in map(Configuration, candidates.launches)}
        today = configuration.get(knob)
        following: list[Value]
        if knob == "micro_batch":
            ordered = sorted((v for v in values if isinstance(v, int)), reverse=True)
            following = [v for v in ordered if isinstance(today, int) and v < today]
        else:
            order = KNOBS[knob].choices
            following = [v for v in order if v in values and order.index(v) > order.index(today)]
        for value in following:
            launch = Settings({**configuration.launch, knob: value})
            other = Configuration(launch, configuration.live)
            if other in candidates:
                yield candidates[candidates.index_of(other)]
