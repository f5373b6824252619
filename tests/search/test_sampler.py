"""The Optuna sampler around the planner, in studies that others drive."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)
from optuna.trial import Trial, TrialState

from tests.search.test_candidate_planner import CANDIDATES, TRUTH, by_chance, gap, paid_J, truth
from tuner.problem.problem import ProbeCost
from tuner.search.sampler import CandidateSampler, record_of
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.space import Candidates

optuna.logging.set_verbosity(optuna.logging.ERROR)

FEW = Candidates.from_configurations(
    Configuration.of(data_parallel=d, clock_MHz=c) for d in (1, 2, 4) for c in (900, 1200, 1400)
)


class TestContract(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    """Optuna's own contract for samplers."""

    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return lambda: CandidateSampler(FEW, seed=0)


def study_of(sampler: CandidateSampler) -> optuna.Study:
    return optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)


def test_it_serves_study_optimize_without_a_driver() -> None:
    sampler = CandidateSampler(CANDIDATES, seed=0)
    study = study_of(sampler)
    visited: list[Configuration] = []
    of_params = {tuple(sampler.params_of(c).items()): c for c in CANDIDATES.configurations}

    def objective(trial: Trial) -> tuple[float, float]:
        params = {
            name: trial.suggest_int(name, d.low, d.high, step=d.step)
            if isinstance(d, IntDistribution)
            else trial.suggest_categorical(name, d.choices)  # type: ignore[attr-defined]
            for name, d in sampler.distributions().items()
        }
        configuration = of_params[tuple(params.items())]  # always valid
        visited.append(configuration)
        seconds, watts = truth(configuration)
        trial.suggest_float("something_else", 0, 1)
        return seconds * watts, seconds

    study.optimize(objective, n_trials=20)
    assert len(set(visited)) == 20
    cost = ProbeCost()
    joules = sum(paid_J(TRUTH, cost, [each]) for each in visited)  # a trial launches anew
    chance = [by_chance(TRUTH, joules=joules, seed=seed, cost=cost) for seed in range(20)]
    assert gap(TRUTH, set(visited)) < np.median(chance)


def test_failed_and_running_trials_are_not_proposed_again() -> None:
    sampler = CandidateSampler(FEW, seed=0)
    study = study_of(sampler)
    first = study.ask(sampler.distributions())
    study.tell(first, state=TrialState.FAIL)
    asked = [study.ask(sampler.distributions()).params for _ in range(len(FEW) - 1)]
    every = [first.params, *asked]
    assert len({tuple(sorted(params.items())) for params in every}) == len(FEW)


def test_a_trial_without_two_positive_values_teaches_nothing() -> None:
    configuration = FEW.configurations[0]
    window = record_of("t0", configuration, (30.0, 2.0)).measurements[0]
    assert (window.step_time_s, window.power_W) == (2.0, 15.0)
    for values in ((), (1.0,), (0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0)):
        assert record_of("t0", configuration, values).measurements == ()
