"""Optuna's samplers and this project's planner, each in the other's place.

`CandidateSampler` proposes in a study of the user's what the planner would probe next.
`StockPlanner` lets an Optuna sampler plan a search, one configuration at a time, by a study in
memory. It does not know which combinations are valid, or that a repetition tells nothing, so the
open candidate nearest to its proposal is taken.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from tuner.models.surrogate.features import feature_knobs
from tuner.problem.problem import ProbeCost
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.evidence import Observations
from tuner.search.planner import PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, UnknownName
from tuner.search_spaces.knobs import KNOBS
from tuner.workload.records.probe import Measurement, MeterInfo, ProbeRecord, ProbeRequest

if TYPE_CHECKING:
    from optuna.study import Study

    from tuner.search_spaces.space import Candidates

_METER = MeterInfo("study", "gpu", "the values of its trials")
_DIRECTIONS = [StudyDirection.MINIMIZE, StudyDirection.MINIMIZE]


class ParameterEncoding:
    """Mapping between candidates and their Optuna parameters, the knobs that vary.

    Integers at even steps are integer ranges, which stock samplers and the dashboard can order. A
    live knob that may be left to the device has the level None.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.configurations = candidates.configurations
        whole = candidates.whole.configurations
        self.knobs = feature_knobs(whole)
        levels = {
            name: list(dict.fromkeys(_as_param(c.get(name)) for c in whole)) for name in self.knobs
        }
        self.distributions = {name: _distribution(name, each) for name, each in levels.items()}
        self._of_params: dict[tuple[Any, ...], int] = {}
        for i, configuration in enumerate(self.configurations):
            params = self.params_of(configuration)
            self._of_params.setdefault(tuple(params[name] for name in self.knobs), i)

    def params_of(self, configuration: Configuration) -> dict[str, Any]:
        """Return a configuration as trial parameters, one per knob of `distributions`."""
        return {name: _as_param(configuration.get(name)) for name in self.knobs}

    def index_of_params(self, params: Mapping[str, Any]) -> int | None:
        """Return the number of the candidate with these parameters, or None."""
        for name in self.knobs:
            if name not in params:
                raise UnknownName("parameter", name, params)
        return self._of_params.get(tuple(params[name] for name in self.knobs))


def _as_param(value: object) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _distribution(name: str, levels: list[Any]) -> BaseDistribution:
    integers = all(isinstance(v, int) and not isinstance(v, bool) for v in levels)
    if integers and not (name in KNOBS and KNOBS[name].scale == "category"):
        steps = {b - a for a, b in zip(sorted(levels)[:-1], sorted(levels)[1:], strict=True)}
        if len(steps) == 1:
            return IntDistribution(min(levels), max(levels), step=steps.pop())
    return CategoricalDistribution(sorted(levels, key=_level_order))


def _level_order(level: Any) -> tuple[int, float, str]:
    if level is None:
        return (0, 0.0, "")
    if isinstance(level, int | float):
        return (1, float(level), "")
    return (2, 0.0, str(level))


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
        """Plan the configuration of the next trial; None if no candidate is left.

        The sampler in contrib/optunahub overrides it, to stay at a launch.
        """
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


class StockPlanner(ProbePlanner):
    """Planner that follows an Optuna sampler for two objectives, one configuration a probe."""

    def __init__(self, candidates: Candidates, stock: BaseSampler, *, seed: int = 0) -> None:
        super().__init__(candidates, seed=seed)
        self._reason = f"proposed by {type(stock).__name__}"
        self._encoding = ParameterEncoding(candidates)
        self._study = optuna.create_study(directions=_DIRECTIONS, sampler=stock)
        self._running: dict[int, Trial] = {}  # the trial of each proposed candidate
        self._reported = 0  # number of measurements that the study has

    def plan(self, state: PlanningState) -> ProbePlan | None:
        """Plan the next open candidate that the stock sampler proposes; None if none is open."""
        observations = self._observe(state)
        closed = self._closed(observations)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._report(observations)
            return None if closed.all() else self._plan_of([self._proposed(closed)], self._reason)

    def _report(self, observations: Observations) -> None:
        for one in observations.measured[self._reported :]:
            time_s = one.window.step_time_s
            values = [one.window.power_W * time_s, time_s]
            if (running := self._running.pop(one.candidate, None)) is not None:
                self._study.tell(running, values)
            else:  # measured in an earlier session, or as the baseline
                params, of = self._params_of(one.candidate), self._encoding.distributions
                self._study.add_trial(create_trial(values=values, params=params, distributions=of))
        self._reported = len(observations.measured)
        for candidate in self._running.keys() - observations.pending:
            self._study.tell(self._running.pop(candidate), state=TrialState.FAIL)

    def _proposed(self, closed: np.ndarray) -> int:
        trial = self._study.ask(self._encoding.distributions)
        candidate = self._encoding.index_of_params(trial.params)
        if candidate is None or closed[candidate]:
            self._study.tell(trial, state=TrialState.FAIL)
            candidate = self._nearest(trial.params, closed)
            self._study.enqueue_trial(self._params_of(candidate))
            trial = self._study.ask(self._encoding.distributions)
        self._running[candidate] = trial
        return candidate

    def _params_of(self, candidate: int) -> dict[str, Any]:
        return self._encoding.params_of(self._configurations[candidate])

    def _nearest(self, params: dict[str, Any], closed: np.ndarray) -> int:
        every = map(self._params_of, range(len(closed)))
        changed = np.array([sum(params[n] != v for n, v in each.items()) for each in every])
        return int(self._rng.choice(np.flatnonzero(~closed & (changed == changed[~closed].min()))))


def check_stock(sampler: object) -> None:
    """Raise InputError if this is not an Optuna sampler that can minimise two objectives."""
    if not isinstance(sampler, BaseSampler):
        raise InputError(
            f"sampler is {sampler!r:.80}; give an Optuna sampler, such as TPESampler()"
        )
    try:  # a copy is asked, so that the sampler proposes what it would have proposed
        study = optuna.create_study(directions=_DIRECTIONS, sampler=copy.deepcopy(sampler))
        study.ask({"level": optuna.distributions.IntDistribution(0, 1)})
    except ValueError as error:
        raise InputError(
            f"{type(sampler).__name__} cannot search for two objectives, as TPESampler can: {error}"
        ) from error
