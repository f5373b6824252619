"""Simulated tables: a truth that the models do not know."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search.__main__ import main
from benchmarks.search.problems import Problem
from benchmarks.search.runner import run
from benchmarks.search.samplers import WITH_MODELS
from benchmarks.search.simulated_tables import OF_MEMORY, DepartedTruth, departed, record
from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.recordings.table import load_table
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space

# A tool of developers, which mypy reads on every push.
pytestmark = pytest.mark.long

JOB, CLUSTER, SPACE = "opt-350m", "a100-8", "parallelism"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("simulated") / "table"
    record(made, JOB, CLUSTER, SPACE, most=12, spread=0.2, of_values=0.05, error=0.03, seed=1)
    return made


def test_every_constant_is_drawn_but_those_of_memory() -> None:
    cluster = load_cluster(CLUSTER)
    believed = constants_of(cluster.device)
    there, constants = departed(cluster, 0.2, seed=3)
    for name in Constants.figures():
        before, after = getattr(believed, name), getattr(constants, name)
        at_most = 1.0 if name.endswith("_efficiency") else math.inf
        if name in OF_MEMORY or before == 0:
            assert after == before, name
        else:
            assert after != before or after == at_most or before == 1.0, name
            assert abs(math.log(after / before)) < 1.0, name
            assert after <= at_most, name
    assert there.device.idle_W != cluster.device.idle_W
    assert there.device.memory_bytes == cluster.device.memory_bytes
    assert departed(cluster, 0.2, seed=3) == (there, constants)
    assert departed(cluster, 0.2, seed=4) != (there, constants)


def test_without_a_spread_the_truth_is_what_the_models_say() -> None:
    cluster = load_cluster(CLUSTER)
    there, constants = departed(cluster, 0.0, seed=3)
    assert (there, constants) == (cluster, constants_of(cluster.device))


def test_a_value_of_a_launch_knob_shifts_every_launch_that_has_it_alike() -> None:
    job, cluster = load_job(JOB), load_cluster(CLUSTER)
    candidates = load_space(SPACE).candidates(job, cluster)
    model = AnalyticModel(job, cluster)
    some = list(candidates.configurations[::40])
    plain, off = model.predict(some), DepartedTruth(model, 0.05, seed=2).predict(some)
    shifts = np.log(off.step_time_s / plain.step_time_s)
    assert np.array_equal(off.memory_bytes, plain.memory_bytes)
    # Knobs add up: the shifts are linear in which values a launch has.
    names = sorted({(n, v) for c in some for n, v in c.launch.items()}, key=str)
    has = np.array([[float(c.launch.get(n) == v) for n, v in names] for c in some])
    left = shifts - has @ np.linalg.lstsq(has, shifts, rcond=None)[0]
    assert np.ptp(shifts) > 0.05
    assert np.abs(left).max() < 1e-9


def test_a_table_names_the_job_and_the_cluster_that_predict_it(folder: Path) -> None:
    read = load_table(folder)
    assert read.predicted_by is not None
    assert (read.predicted_by.job.name, read.predicted_by.cluster.name) == (JOB, CLUSTER)
    assert len({point.configuration.launch for point in read.groups[0].points}) == 12
    assert read.estimated


@pytest.mark.long
def test_ours_runs_with_the_models_of_what_was_recorded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = load_table(folder).groups[0].name
    made = run(Problem(folder, group), WITH_MODELS, seed=0)
    assert made.found
    assert made.curve != run(Problem(folder, group), "joulefront", seed=0).curve
    main([str(folder), "--samplers", WITH_MODELS, "random", "--seeds", "1", "--jackknife", "0"])
    told = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "figure " in line]
    assert "joulefront_with_models_front_regret_mean_recorded" in told
    other = tmp_path / "other"
    other.mkdir()
    toml = (folder / "table.toml").read_text()
    begin, end = toml.index("[predicted_by]"), toml.index("[noise]")
    (other / "table.toml").write_text(toml[:begin] + toml[end:])
    (other / "table.csv").write_text((folder / "table.csv").read_text())
    with pytest.raises(SystemExit, match=r"needs \[predicted_by\]"):
        main([str(other), "--samplers", WITH_MODELS, "--seeds", "1", "--jackknife", "0"])


def test_the_drawn_cluster_is_valid() -> None:
    cluster = replace(load_cluster("gh200-32"), host_W=300.0, supply_loss=0.1)
    for seed in range(20):
        there, constants = departed(cluster, 0.5, seed)
        assert there.host_W > 0
        assert constants.voltage_knee < 1
        assert constants.lowest_voltage < 1
