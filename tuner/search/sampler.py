"""Optuna sampler around this project's planner, for studies that others drive.

`study.optimize` and `study.ask` get the configurations that the planner would probe next. Records
are made of the study's finished trials: its two values are the joules and the seconds of one unit
of work.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from tuner.problem.problem import ProbeCost
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.parameters import ParameterEncoding
from tuner.search.planner import PlanningState, ProbePlan
from tuner.search_spaces.configuration import Configuration
from tuner.workload.records.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest

if TYPE_CHECKING:
    from optuna.study import Study

    from tuner.search_spaces.space import Candidates

_METER = MeterInfo("study", "gpu", "the values of its trials")


class CandidateSampler(BaseSampler):
    """Optuna sampler that proposes the next probe of a planner.

    Args:
        candidates: the valid configurations, whose knobs that vary are the parameters.
        cost: cost of a launch and of a window.
        seed: of the planner, and of parameters that are not of the candidates.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        cost: ProbeCost | None = None,
        seed: int | None = None,
    ) -> None:
        self.planner = CandidatePlanner(candidates, seed=seed)
        self._cost = cost or ProbeCost()
        self._encoding = ParameterEncoding(candidates)
        self._random = RandomSampler(seed=seed)
        self._lock = threading.RLock()

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return one distribution per knob that varies, to call `study.ask` with."""
        return dict(self._encoding.distributions)

    def params_of(self, configuration: Configuration) -> dict[str, Any]:
        """Return a configuration as trial parameters, one per knob of `distributions`."""
        return self._encoding.params_of(configuration)

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan the configuration of the next trial; None if no candidate is left."""
        return self.planner.plan(state)

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the distributions of the candidates' knobs."""
        return self.distributions()

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the parameters of the next planned configuration, others drawn at random."""
        params: dict[str, Any] = {}
        knobs = self._encoding.distributions
        if knobs and all(search_space.get(name) == knobs[name] for name in knobs):
            with self._lock:
                if plan := self.plan(self._state_of(study)):
                    params = self.params_of(plan.configurations[0])
        for name, distribution in search_space.items():
            if name not in params:
                params[name] = self.sample_independent(study, trial, name, distribution)
        return params

    def sample_independent(self, *given: Any, **named: Any) -> Any:
        # It is no knob of the candidates, or none is left.
        return self._random.sample_independent(*given, **named)

    def _state_of(self, study: Study) -> PlanningState:
        states = (TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING)
        records: list[ProbeRecord] = []
        in_flight: list[Configuration] = []
        for trial in study.get_trials(deepcopy=False, states=states):
            encoded = self._encoding.knobs and set(self._encoding.knobs) <= trial.params.keys()
            index = self._encoding.index_of_params(trial.params) if encoded else None
            if index is None:
                continue
            configuration = self._encoding.configurations[index]
            if trial.state == TrialState.RUNNING:
                in_flight.append(configuration)
            else:
                values = trial.values if trial.state == TrialState.COMPLETE else ()
                records.append(record_of(f"t{trial.number}", configuration, values))
        return PlanningState(records, in_flight, cost=self._cost)


def record_of(name: str, configuration: Configuration, values: Sequence[float]) -> ProbeRecord:
    """Return the record of a trial: energy and time if it has two positive values, else nothing
    measured, for which the configuration is not proposed again."""
    request = ProbeRequest(name, configuration.launch, (configuration.live,))
    if len(values) != 2 or not all(value > 0 for value in values):
        return ProbeRecord(request, (), _METER)
    energy_J, time_s = values
    window = Measurement(
        live=configuration.live,
        steps=1,
        window_s=time_s,
        step_time_s=time_s,
        energy_J=energy_J,
        power_W=energy_J / time_s,
    )
    return ProbeRecord(request, (window,), _METER)
