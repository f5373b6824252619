"""Where every search of the benchmark starts: at the user's baseline, not where it suits a sampler.

The baseline is the table's own. A table without one has a launch drawn at random, the same for all
samplers, at the last of its live settings: at the highest limit and clock, or with them left to the
device, as a launch runs before anything is tuned.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.search.ask_tell import level_order
from benchmarks.search.problems import Problem, load_problem
from tuner.search.planner import ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration

if TYPE_CHECKING:
    from optuna.study import Study


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


def start_at(planner: ProbePlanner, start: Configuration) -> None:
    """Make a configuration the first plan of a planner; what follows is the planner's own."""
    own_plan, lives = planner.plan, planner.candidates.indices_of_launch(start.launch)

    def plan(study: Study) -> ProbePlan | None:
        planner.plan = own_plan  # type: ignore[method-assign]
        first = ProbePlan((start,), "where every search starts", extendable=len(lives) > 1)
        return planner._enqueue(first)

    planner.plan = plan  # type: ignore[method-assign]
