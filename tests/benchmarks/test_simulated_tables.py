"""The simulated tables: a truth that the models do not know, and that says how far they are off."""

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
from benchmarks.simulated_tables import (
    OF_MEMORY,
    DepartedTruth,
    Recorded,
    departed,
    prior_error,
    record,
)
from tuner.models.analytic.constants import Constants, constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.job import load_job
from tuner.search_spaces.space import load_space
from tuner.workload.table import load_table

JOB, CLUSTER, SPACE = "opt-350m", "a100-8", "parallelism"


def recorded(folder: Path, **other: float) -> Recorded:
    said = {"spread": 0.2, "of_values": 0.05, "error": 0.03, **other}
    return record(folder, JOB, CLUSTER, SPACE, most=12, seed=1, **said)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorded]:
    folder = tmp_path_factory.mktemp("simulated") / "table"
    return folder, recorded(folder)


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


def test_beyond_the_kernel_knobs_interact_and_their_effect_depends_on_the_clock() -> None:
    job, cluster = load_job(JOB), load_cluster(CLUSTER)
    candidates = load_space(SPACE).candidates(job, cluster)
    model, highest = AnalyticModel(job, cluster), max(cluster.device.clocks_MHz)
    truth = DepartedTruth(model, 0.0, seed=2, beyond=0.1, highest_MHz=highest)
    some = [
        candidates[i]
        for one in candidates.launches[::40]
        for i in candidates.indices_of_launch(one)
    ]
    shifts = np.log(truth.predict(some).step_time_s / model.predict(some).step_time_s)
    names = sorted({(n, v) for c in some for n, v in c.launch.items()}, key=str)
    has = np.array([[float(c.launch.get(n) == v) for n, v in names] for c in some])
    left = shifts - has @ np.linalg.lstsq(has, shifts, rcond=None)[0]
    assert np.abs(left).max() > 0.01
    # In one launch the shift is linear in the log of the clock.
    first = [i for i, c in enumerate(some) if c.launch == some[0].launch]
    clocks = np.log([float(some[i].get("clock_MHz") or highest) for i in first])
    assert np.ptp(clocks) > 0.1
    slope, level = np.polyfit(clocks, shifts[first], 1)
    assert abs(slope) > 0.01
    assert shifts[first] == pytest.approx(slope * clocks + level, abs=1e-9)
    # Without it nothing departs.
    still = DepartedTruth(model, 0.0, seed=2).predict(some)
    assert np.array_equal(still.step_time_s, model.predict(some).step_time_s)


def test_a_table_says_what_it_recorded_and_how_far_off_the_models_are(
    table: tuple[Path, Recorded],
) -> None:
    folder, made = table
    read = load_table(folder)
    assert read.predicted_by is not None
    assert (read.predicted_by.job.name, read.predicted_by.cluster.name) == (JOB, CLUSTER)
    points = read.groups[0].points
    assert len(points) == made.configurations
    assert read.estimated
    rows = [(p.configuration, p.time_s, p.power_W) for p in points]
    assert prior_error(
        read.predicted_by.job, read.predicted_by.cluster, rows
    ).energy == pytest.approx(made.error.energy, rel=1e-5)
    assert 0.01 < made.error.energy[0] < made.error.energy[1]
    assert made.error.sentence in (folder / "table.toml").read_text()


def test_an_error_of_scale_alone_is_none(tmp_path: Path) -> None:
    job, cluster = load_job(JOB), load_cluster(CLUSTER)
    some = list(load_space(SPACE).candidates(job, cluster).configurations[::40])
    said = AnalyticModel(job, cluster).predict(some)
    rows = list(zip(some, 3 * said.step_time_s, 0.5 * said.power_W, strict=True))
    error = prior_error(job, cluster, rows)
    assert max(*error.time, *error.power, *error.energy) < 1e-9
    assert error.time_rank == pytest.approx(1.0)


@pytest.mark.long
def test_ours_runs_with_the_models_of_what_was_recorded(
    table: tuple[Path, Recorded], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = table
    group = load_table(folder).groups[0].name
    made = run(Problem(folder, group), WITH_MODELS, seed=0)
    assert made.found
    assert made.curve != run(Problem(folder, group), "joulefront", seed=0).curve
    main([str(folder), "--samplers", WITH_MODELS, "random", "--seeds", "1", "--jackknife", "0"])
    told = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "figure " in line]
    assert {"joulefront_with_models_over_oracle", "with_models_ratio_best_stock"} <= {*told}
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
