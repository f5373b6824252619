"""Where every search of the benchmark starts: at the user's baseline, not where it suits a sampler.

The baseline is the table's own. A table without one has a launch drawn at random, the same for all
samplers, at the last of its live settings: at the highest limit and clock, or with them left to the
device, as a launch runs before anything is tuned.
"""

from __future__ import annotations

import zlib

import numpy as np

from benchmarks.search.ask_tell import level_order
from benchmarks.search.problems import Problem, load_problem
from tuner.search.planner import PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import ProbeRecord


def start_of(problem: Problem, seed: int) -> Configuration:
    """Return the configuration that every search of a problem measures first.

    Args:
        problem: is searched.
        seed: of the search; draws the launch if the table has no baseline of its own.
    """
    table = load_problem(problem)
    configurations = [point.configuration for point in table.groups[0].points]
    if table.baseline:
        today = [c for c in configurations if all(c.get(k) == v for k, v in table.baseline.items())]
        if today:
            return today[0]
    launches = list(dict.fromkeys(one.launch for one in configurations))
    draw = np.random.default_rng([seed, 17, zlib.crc32(problem.group.encode())])
    launch = launches[int(draw.integers(len(launches)))]
    return max((c for c in configurations if c.launch == launch), key=lambda c: level_order(c.live))


class StartingAt(ProbePlanner):
    """Planner whose first plan is a given configuration; what follows is another planner's."""

    def __init__(self, planner: ProbePlanner, start: Configuration) -> None:
        super().__init__(planner.candidates)
        self._planner, self._start = planner, start
        self._began = False
        self.max_live, self.estimates_gain = planner.max_live, planner.estimates_gain

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan the start, then what the planner plans."""
        if self._began:
            return self._planner.plan(state)
        self._began = True
        lives = self.candidates.indices_of_launch(self._start.launch)
        return ProbePlan((self._start,), "where every search starts", extendable=len(lives) > 1)

    def plan_continuation(self, state: PlanningState, so_far: ProbeRecord) -> ProbePlan | None:
        return self._planner.plan_continuation(state, so_far)

    def better_to_wait(self, state: PlanningState) -> bool:
        return self._planner.better_to_wait(state)
