"""Evaluation of every configuration: exact fronts, whatever the blocks."""

import numpy as np
import pytest

from tuner.models.analytic.model import AnalyticModel
from tuner.pareto import nondominated
from tuner.planner import evaluate as module
from tuner.planner.evaluate import Evaluation, evaluate
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.space import load_space


@pytest.fixture(scope="module")
def job() -> TrainingJob:
    return load_job("lmm-7b")


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("gh200-32")


def _costs(found: Evaluation) -> set[tuple[float, float]]:
    on = nondominated(found.log_energy, found.log_time)
    both = np.round(np.column_stack([found.log_energy, found.log_time])[on], 9)
    return {(float(e), float(t)) for e, t in both}


def test_the_front_is_that_of_all_configurations_that_fit(
    job: TrainingJob, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = load_space("default").candidates(job, cluster).configurations
    said = AnalyticModel(job, cluster).predict(every)
    fits = said.memory_bytes <= cluster.device.memory_bytes
    fits &= said.host_memory_bytes <= cluster.host_memory_bytes
    time, power = np.log(said.step_time_s[fits]), np.log(said.power_W[fits])
    on = nondominated(time + power, time)
    wanted = np.round(np.column_stack([(time + power)[on], time[on]]), 9)
    monkeypatch.setattr(module, "BLOCK", 100)  # a front gathered over many blocks
    found = evaluate(job, cluster, load_space("default"), slack=0.1)
    assert (found.count, found.fitting) == (len(every), int(fits.sum()))
    assert _costs(found) == {(float(e), float(t)) for e, t in wanted}
    assert found.least_bytes == said.memory_bytes.min()


def test_the_least_power_at_each_time_is_kept_for_a_power_cap(
    job: TrainingJob, cluster: Cluster
) -> None:
    found = evaluate(job, cluster, load_space("default"), slack=0.0)
    every = load_space("default").candidates(job, cluster).configurations
    said = AnalyticModel(job, cluster).predict(every)
    fits = said.memory_bytes <= cluster.device.memory_bytes
    cap = float(np.median(said.power_W[fits]))
    fastest = said.step_time_s[fits & (said.power_W <= cap)].min()
    under = found.listed & (np.exp(found.log_power) <= cap * (1 + 1e-9))
    assert np.exp(found.log_time[under]).min() == pytest.approx(fastest)


def test_equal_predictions_are_listed_once(job: TrainingJob, cluster: Cluster) -> None:
    found = evaluate(job, cluster, load_space("default"), slack=0.0)
    on = np.flatnonzero(nondominated(found.log_energy, found.log_time) & found.listed)
    figures = {
        (round(float(found.log_time[i]), 9), round(float(found.log_power[i]), 9)) for i in on
    }
    assert len(figures) == len(on)


def test_only_the_number_of_gpus_asked_for(job: TrainingJob, cluster: Cluster) -> None:
    found = evaluate(job, cluster, load_space("default"), gpus=16, slack=0.1)
    assert {c.world_size for c in found.configurations} == {16}


def test_groups_predict_what_configurations_do(job: TrainingJob, cluster: Cluster) -> None:
    groups = list(load_space("full").groups(job, cluster))[::40]
    model = AnalyticModel(job, cluster)
    by_group = model.predict_groups(groups)
    one_by_one = model.predict([Configuration(la, li) for la, lives in groups for li in lives])
    for name in ("step_time_s", "power_W", "memory_bytes", "host_memory_bytes", "clock_MHz"):
        assert np.array_equal(getattr(by_group, name), getattr(one_by_one, name)), name
