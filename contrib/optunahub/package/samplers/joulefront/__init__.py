"""Sampler for energy and time where some parameters need a new launch and others do not."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
import itertools
from typing import Any

from tuner.problem.problem import ProbeCost
from tuner.search.planner import PlanningState
from tuner.search.planner import ProbePlan
from tuner.search.sampler import CandidateSampler
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.space import Candidates


__all__ = ["LaunchAwareSampler"]


class LaunchAwareSampler(CandidateSampler):
    """Sampler of energy and time by expected fall of the log regret per joule.

    A trial with the launch parameters of the trial before it is assumed to reuse the running
    process, so it costs a window only. Ask with ``study.ask(sampler.distributions())`` and tell
    ``[energy_J, time_s]`` per unit of work, one trial at a time; both directions are "minimize".

    Args:
        launch_parameters: Levels of each parameter that needs a new process.
        live_parameters: Levels of each parameter that can change while the process runs.
        launch_s: Seconds from a start to the first measured step.
        launch_power: Power during the start, as a share of the configuration's own.
        settle_s: Seconds after a live parameter changed until a measurement begins.
        window_s: Seconds of a measurement.
        seed: Random seed.
    """

    def __init__(
        self,
        launch_parameters: Mapping[str, Sequence[Any]],
        live_parameters: Mapping[str, Sequence[Any]],
        *,
        launch_s: float = 30.0,
        launch_power: float = 0.5,
        settle_s: float = 2.0,
        window_s: float = 5.0,
        seed: int | None = None,
    ) -> None:
        candidates = Candidates.from_configurations(
            Configuration(launch, live)
            for launch in _grid(launch_parameters)
            for live in _grid(live_parameters)
        )
        cost = ProbeCost(
            launch_s=launch_s, settle_s=settle_s, window_s=window_s, launch_power=launch_power
        )
        super().__init__(candidates, cost=cost, seed=seed)

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan the next trials: further live settings of the last launch, or another launch."""
        if state.records:
            *earlier, last = state.records
            running = replace(state, records=earlier)
            plan = self.planner.plan_continuation(running, last)
            if plan is not None:
                return plan
        return super().plan(state)


def _grid(levels: Mapping[str, Sequence[Any]]) -> list[Settings]:
    return [
        Settings(dict(zip(levels, values, strict=True)))
        for values in itertools.product(*levels.values())
    ]
