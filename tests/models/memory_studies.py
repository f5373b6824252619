"""Probes of a study that run out of memory, with and without the margin learned from probes.

The simulated cluster's true peaks are the models' times a factor common to all launches, which the
models do not know, times each launch's own 5 %. A study that relies on predicted memory runs out of
memory again and again; one that learns from its first failures and measured peaks does not
(`tuner.models.memory_margin`). Studies with and without differ in nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import optuna

from tuner.executors.simulated_time import SimulatedExecutor
from tuner.models.memory_margin import MEMORY_SPREAD
from tuner.problem.problem import Problem
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.evidence import Observations
from tuner.search.planner import PlanningState
from tuner.search_spaces.configuration import Settings
from tuner.simulated.runner import Conditions, SimulatedRunner
from tuner.workload.records.probe import Measurement, ProbeRecord, ProbeRequest


@dataclass(frozen=True)
class OomStudy:
    """Probes of one study: how many were made, and how many ran out of memory."""

    probes: int
    ran_out: int


class UnlearningPlanner(CandidatePlanner):
    """Planner that keeps to the predicted memory whatever it measured."""

    def _fits(self, observations: Observations) -> np.ndarray:
        return super()._fits(Observations(self.candidates, self._launch_of))


def failures(problem: Problem, *, bias: float, learn: bool, probes: int, seed: int = 0) -> OomStudy:
    """One study on a simulated cluster whose memory the models misjudge by `bias` (in log)."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    assert problem.job is not None
    assert problem.cluster is not None
    runner = SimulatedRunner(
        problem.job,
        problem.cluster,
        seed=seed,
        conditions=Conditions(model_error=0.05, memory_bias=bias, memory_error=MEMORY_SPREAD),
    )
    planner = (CandidatePlanner if learn else UnlearningPlanner)(
        problem.candidates,
        prior=problem.prior,
        seed=seed,
        memory_bytes=problem.device_memory_bytes,
    )
    executor = SimulatedExecutor(runner)
    records: list[ProbeRecord] = []

    def next_settings(
        request: ProbeRequest, windows: Sequence[Measurement]
    ) -> tuple[Settings, ...]:
        so_far = ProbeRecord(request, tuple(windows), runner.meter)
        plan = planner.plan_continuation(PlanningState(records, cost=problem.cost), so_far)
        return () if plan is None else plan.live

    made = ran_out = 0
    while made < probes:
        plan = planner.plan(PlanningState(records, cost=problem.cost))
        if plan is None:
            break
        request = ProbeRequest(
            f"p{made:04d}", plan.launch, plan.live, time_limit_s=3600.0, extendable=plan.extendable
        )
        executor.submit(request, next_settings)
        record = executor.wait()
        assert record is not None
        records.append(record)
        made += 1
        ran_out += record.failure is not None and record.failure.kind == "out_of_memory"
    return OomStudy(made, ran_out)
