"""Planner of a search of a few probes, which are dearer than the joules of their windows.

A search spreads its first launches over the space, which pays off later; a search of a few probes
has no later. It first tries what the models favour, or what a user would try without them, measures
the settings of a launch before it leaves it, and makes no probe of what probably crashes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.models.memory_margin import MemoryMargin
from tuner.problem.constraints import OBJECTIVES
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.candidate_pool import LIKELY
from tuner.search.crash_causes import LAST
from tuner.search.observations import Observations
from tuner.search.planner import PlanningState, ProbePlan
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.workload.records.probe import ProbeRecord

if TYPE_CHECKING:
    from tuner.problem.problem import Problem
    from tuner.search_spaces.space import Candidates

#: The joules of a launch count this many times where a running one may go on instead.
DEAR = 100.0
#: Candidates of which the models predict each; of more, as on many GPUs, none is tried first.
MOST_PREDICTED = 100_000


def first_of_few(problem: Problem, objective: str) -> tuple[Configuration, ...]:
    """Return what to probe first after today's configuration, until one is no better.

    Empty if nothing stands out.
    """
    if problem.prior is None:
        larger = _larger_batches(problem, problem.baseline)
        if larger or objective == "time":
            return larger
        return _middle_setting(problem, problem.baseline)
    if len(problem.candidates) > MOST_PREDICTED:
        return ()
    return _favourite(problem, problem.baseline, objective)


def _larger_batches(problem: Problem, today: Configuration) -> tuple[Configuration, ...]:
    # Today's configuration with the next micro-batch of twice its size or more, and so on.
    found: list[Configuration] = []
    size, candidates = today.micro_batch, problem.candidates
    for each in sorted({c.micro_batch for c in candidates.configurations}):
        launch = Settings({**today.launch, "micro_batch": each})
        other = Configuration(launch, today.live)
        if each >= 2 * size and other in candidates:
            found.append(candidates[candidates.index_of(other)])
            size = each
    return tuple(found)


def _middle_setting(problem: Problem, today: Configuration) -> tuple[Configuration, ...]:
    # Today's launch at the middle one of its other live settings.
    others = [
        c for c in problem.candidates.configurations if c.launch == today.launch and c != today
    ]
    return (others[len(others) // 2],) if others else ()


def _favourite(problem: Problem, today: Configuration, objective: str) -> tuple[Configuration, ...]:
    # The most expected saving by the models, which a launch that does not fit does not bring.
    every = list(problem.candidates.configurations)
    assert problem.prior is not None
    predicted = problem.prior.predict([today, *every])
    time = np.log(predicted.step_time_s)
    energy = time + np.log(predicted.power_W)
    of_energy, of_time = OBJECTIVES.get(objective) or (1.0, 1.0)
    cost = of_energy * energy + of_time * time
    saved = cost[0] - cost[1:]
    if problem.device_memory_bytes is not None:
        needed = np.asarray(predicted.memory_bytes, dtype=float)[1:]
        margin = MemoryMargin(problem.device_memory_bytes)
        saved = saved * margin.probability_of_fitting(needed)
    best = int(saved.argmax())
    return (every[best],) if saved[best] > 0 else ()


class SmallSearchPlanner(CandidatePlanner):
    """Planner of a search that is limited to a few probes.

    Args:
        tries: configurations to probe after today's, in this order, until one is no better.
        options: of `CandidatePlanner`.
    """

    def __init__(
        self, candidates: Candidates, *, tries: Sequence[Configuration], **options: Any
    ) -> None:
        super().__init__(candidates, **options)
        self._tries, self._tries_help = tries, True

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan the next probe; None if no candidate is left to propose."""
        self._tries_help = self._each_was_better(self._observe(state))
        return super().plan(state)

    def _each_was_better(self, observations: Observations) -> bool:
        # Whether each try so far was better than all before it in energy times time.
        tries = {self.candidates.find(each) for each in self._tries}
        launches = {int(self._launch_of[i]) for i in tries if i is not None}
        best: dict[int, float] = {}
        for each in observations.measured:
            launch = int(self._launch_of[each.candidate])
            product = each.step_time_s**2 * each.power_W
            best[launch] = min(product, best.get(launch, math.inf))
        least = math.inf
        for launch, product in best.items():
            if launch in launches and product >= least:
                return False
            least = min(least, product)
        return True

    def _to_try(self, closed: np.ndarray) -> list[int]:
        wanted = super()._to_try(closed)
        if wanted or not self._tries_help:
            return wanted
        numbers = (self.candidates.find(each) for each in self._tries)
        return [i for i in numbers if i is not None and not closed[i]][:1]

    def _starting(self, observations: Observations, fresh: list[int]) -> bool:
        return not observations.measured

    def _trains(self, records: Sequence[ProbeRecord], observations: Observations) -> np.ndarray:
        trains = super()._trains(records, observations)
        return np.where(trains < LIKELY, np.minimum(trains, LAST / 2), trains)

    def plan_continuation(self, state: PlanningState, so_far: ProbeRecord) -> ProbePlan | None:
        """Plan further settings of a running launch; None to end the launch."""
        # Another launch takes one of the few probes.
        dear = replace(state.cost, launch_s=DEAR * max(state.cost.launch_s, state.cost.window_s))
        return super().plan_continuation(replace(state, cost=dear), so_far)
