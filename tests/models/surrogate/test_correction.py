"""The prior mean learns the program: the first launches correct the model's constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.models.job_prior import AnalyticPrior, prior_of
from tuner.models.prior import Prediction
from tuner.models.surrogate.features import CORRECTING, FeatureMap
from tuner.models.surrogate.surrogates import Surrogates
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import Candidates

JOB, CLUSTER = load_job("opt-350m"), load_cluster("a100-8")
BASE = constants_of(CLUSTER.device)
#: A program whose host dispatches four times as slowly.
TRUTH = AnalyticModel(JOB, CLUSTER, constants=replace(BASE, operator_s=4 * BASE.operator_s))
EVERY = [
    Configuration.of(data_parallel=8 // t, tensor_parallel=t, micro_batch=b, clock_MHz=clock)
    for t in (1, 2, 4)
    for b in (1, 2, 4, 8)
    for clock in (1410, 1050)
]


class Opaque:
    """The model's figures without its constants."""

    def predict(self, configurations: Sequence[Configuration]) -> Prediction:
        """Predict as the model."""
        return AnalyticModel(JOB, CLUSTER).predict(configurations)


def feature_map(prior: AnalyticPrior | Opaque | None = None) -> FeatureMap:
    prior = prior_of(JOB, CLUSTER) if prior is None else prior
    return FeatureMap(Candidates.from_configurations(EVERY), prior=prior, learns_program=True)


def logs(configurations: Sequence[Configuration]) -> np.ndarray:
    figures = TRUTH.predict(configurations)
    return np.log(np.column_stack([figures.step_time_s, figures.power_W]))


def test_after_one_launch_the_mean_is_that_of_the_program() -> None:
    features = feature_map()
    before = np.abs(features.prior_log(EVERY) - logs(EVERY))[:, 0].mean()
    assert features.correct(EVERY[:1], logs(EVERY[:1]))
    after = np.abs(features.prior_log(EVERY) - logs(EVERY))[:, 0].mean()
    assert after < before / 3


def test_later_launches_leave_it_and_no_rows_take_it_back() -> None:
    features, launches = feature_map(), EVERY[::2]
    plain = features.prior_log(EVERY)
    assert not features.correct([], np.empty((0, 2)))
    assert features.correct(launches[:CORRECTING], logs(launches[:CORRECTING]))
    assert not features.correct(launches[: CORRECTING + 2], logs(launches[: CORRECTING + 2]))
    assert features.correct([], np.empty((0, 2)))
    assert (features.prior_log(EVERY) == plain).all()


def test_a_prior_without_constants_stays() -> None:
    features = feature_map(Opaque())
    plain = features.prior_log(EVERY)
    assert not features.correct(EVERY[:1], logs(EVERY[:1]))
    assert (features.prior_log(EVERY) == plain).all()


def test_a_resumed_search_predicts_as_an_uninterrupted_one() -> None:
    step, resumed = (Surrogates(feature_map()) for _ in range(2))
    measured = np.exp(logs(EVERY))
    for n in (1, 3, 5):
        step.fit(EVERY[:n], measured[:n, 0], measured[:n, 1])
    resumed.fit(EVERY[:5], measured[:5, 0], measured[:5, 1])
    assert np.allclose(step.predict(EVERY).log_time, resumed.predict(EVERY).log_time)
