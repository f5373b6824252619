"""Optuna's samplers as planners over the candidates, one configuration at a time.

A sampler does not know which combinations are valid: it is asked, in a study in memory, until its
proposal is a candidate not tried yet.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState, create_trial

from tuner.search.observations import Observations
from tuner.search.parameters import ParameterEncoding
from tuner.search.planner import PlanningState, ProbePlan, ProbePlanner
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.space import Candidates

_DIRECTIONS = [StudyDirection.MINIMIZE, StudyDirection.MINIMIZE]
#: Asks, and equal ones in a row, after which the open candidate nearest to the proposal is taken.
MAX_SUGGESTIONS, SAME_SUGGESTIONS = 50, 3


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
            values = [one.power_W * one.step_time_s, one.step_time_s]
            if (running := self._running.pop(one.candidate, None)) is not None:
                self._study.tell(running, values)
            else:  # measured in an earlier session, or as the baseline
                params, of = self._params_of(one.candidate), self._encoding.distributions
                self._study.add_trial(create_trial(values=values, params=params, distributions=of))
        self._reported = len(observations.measured)
        for candidate in self._running.keys() - observations.pending:
            self._study.tell(self._running.pop(candidate), state=TrialState.FAIL)

    def _proposed(self, closed: np.ndarray) -> int:
        refused: list[dict[str, Any]] = []
        while len(refused) < MAX_SUGGESTIONS:
            trial = self._study.ask(self._encoding.distributions)
            candidate = self._encoding.index_of_params(trial.params)
            if candidate is not None and not closed[candidate]:
                self._running[candidate] = trial
                return candidate
            self._study.tell(trial, state=TrialState.FAIL)
            refused.append(trial.params)
            if refused[-SAME_SUGGESTIONS:] == SAME_SUGGESTIONS * [trial.params]:
                break
        candidate = self._nearest(refused[-1], closed)
        self._study.enqueue_trial(self._params_of(candidate))
        self._running[candidate] = self._study.ask(self._encoding.distributions)
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
