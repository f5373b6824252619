"""Studies that end with this process, for benchmarks and tests."""

from __future__ import annotations

import optuna

from tuner.problem.constraints import Constraints
from tuner.search.planner import ProbePlanner
from tuner.search_spaces.configuration import Settings
from tuner.study.recorder import StudyRecorder
from tuner.workload.probe import ProbeRecord


def recorder_in_memory(sampler: ProbePlanner, *, steps: int = 1) -> StudyRecorder:
    """Return a study that is kept nowhere."""
    return StudyRecorder(
        name="in memory",
        storage=optuna.storages.InMemoryStorage(),
        sampler=sampler,
        steps=steps,
        constraints=Constraints(),
        identity="in memory",
    )


def next_settings(
    book: StudyRecorder, sampler: ProbePlanner, so_far: ProbeRecord
) -> tuple[Settings, ...]:
    """Return what else the sampler would visit in a running launch, with its trials started."""
    plan = sampler.plan_continuation(book.study, so_far)
    if plan is None:
        return ()
    book.start(so_far.request, plan.live)
    return plan.live
