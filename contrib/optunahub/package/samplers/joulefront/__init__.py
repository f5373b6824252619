"""Sampler for energy and time where some parameters need a new launch and others do not."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial
from optuna.trial import TrialState
from tuner.problem.probe_cost import ProbeCost
from tuner.search.planner import ProbePlan
from tuner.search.sampler import CandidateSampler
from tuner.search_spaces.candidates import Candidates
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.configuration import Settings
from tuner.workload.probe import MeterInfo
from tuner.workload.probe import ProbeRecord
from tuner.workload.probe import ProbeRequest


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

    def plan(self, study: Study) -> ProbePlan | None:
        """Plan the next trials: further live settings of the last launch, or another launch."""
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if finished:
            last = self.configuration_of(finished[-1].params)
            request = ProbeRequest("last", last.launch, (last.live,))
            meter = MeterInfo("study", "gpu", "the values of its trials")
            plan = self.plan_continuation(study, ProbeRecord(request, (), meter))
            if plan is not None:
                return self._enqueue(plan)
        return super().plan(study)

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Store step time and power, which the surrogates learn, from energy and time."""
        super().after_trial(study, trial, state, values)
        if state != TrialState.COMPLETE or values is None:
            return
        energy_J, time_s = values
        measured = {"step_time_s": time_s, "power_W": energy_J / time_s}
        for name, value in measured.items():
            study._storage.set_trial_user_attr(trial._trial_id, name, value)


def _grid(levels: Mapping[str, Sequence[Any]]) -> list[Settings]:
    return [
        Settings(dict(zip(levels, values, strict=True)))
        for values in itertools.product(*levels.values())
    ]
