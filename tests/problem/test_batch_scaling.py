"""The global batch as a knob: only where the job says its steps, and then by those steps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.studies import record
from tuner.models.analytic.model import AnalyticModel
from tuner.models.job_prior import AnalyticPrior
from tuner.problem.problem import in_job_steps
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, load_job, steps_a_job_step
from tuner.search_spaces.rules import broken_rules
from tuner.search_spaces.space import SearchSpace, load_space
from tuner.workload.records.probe import ProbeRequest
from tuner.workload.scripts.deepspeed_config import render_deepspeed_config

CLUSTER = load_cluster("a100-8")
JOB = replace(load_job("opt-350m"), global_batch=64, steps=1000, steps_at={32: 1800, 64: 1000})
MODEL = '[model]\nconfig = "tiny-gpt"\n'


def read(folder: Path, text: str) -> TrainingJob:
    path = folder / "job.toml"
    path.write_text(f"sequence_length = 64\nglobal_batch = 32\n{text}")
    return TrainingJob.from_toml(path)


def test_a_table_in_the_job_file(tmp_path: Path) -> None:
    job = read(tmp_path, f"{MODEL}[steps_at]\n16 = 900\n32 = 500\n64 = 300\n")
    assert (job.steps, job.global_batches) == (500, (16, 32, 64))
    assert [job.steps_with(size) for size in (16, 32, 48, 64)] == [900, 500, None, 300]
    # What is written down means the same again.
    assert TrainingJob.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_a_gradient_noise_scale_tells_the_steps_at_every_size(tmp_path: Path) -> None:
    job = read(tmp_path, f"noise_scale = 96\nmin_steps = 100\n{MODEL}")
    assert job.steps == 400  # 100 x (1 + 96 / 32)
    assert job.steps_with(96) == 200  # at the critical batch size, twice the least steps
    assert job.global_batches == (8, 16, 32, 64, 128)
    # Samples to the solution grow with the batch, steps fall: the trade that is searched.
    samples = [size * (job.steps_with(size) or 0) for size in job.global_batches]
    assert samples == sorted(samples)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{MODEL}[steps_at]\n16 = 900\n", "must hold the job's own global batch 32"),
        (f"steps = 5\n{MODEL}[steps_at]\n32 = 900\n", "leave steps and tokens out"),
        (f"{MODEL}[steps_at]\n32 = 900\n64 = 0\n", "an integer of at least 1"),
        (f'{MODEL}[steps_at]\n32 = 900\n"half" = 9\n', "an integer of at least 1"),
        (f"noise_scale = 96\n{MODEL}", "min_steps"),
        (f"noise_scale = -1\nmin_steps = 10\n{MODEL}", "above 0"),
        (f"noise_scale = 9\nmin_steps = 10\n{MODEL}[steps_at]\n32 = 90\n", "not both"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(tmp_path, text)


def test_only_sizes_with_known_steps_are_offered() -> None:
    asked = Configuration.of(data_parallel=8, global_batch=128)
    (phrase,) = broken_rules(asked, JOB, CLUSTER)
    assert "does not give the number of steps at global_batch" in phrase
    assert "32, 64" in phrase
    silent = replace(JOB, steps_at={})
    (phrase,) = broken_rules(Configuration.of(data_parallel=8, global_batch=32), silent, CLUSTER)
    assert "does not give the number of steps" in phrase
    space = SearchSpace("sizes", {"global_batch": load_space("full").choices["data_parallel"]})
    found = space.candidates(JOB, CLUSTER)
    assert [launch["global_batch"] for launch in found.launches] == [32, 64]
    assert [launch["global_batch"] for launch in space.candidates(silent, CLUSTER).launches] == [64]


def test_the_batch_must_still_be_whole_micro_batches() -> None:
    asked = Configuration.of(data_parallel=8, micro_batch=8, global_batch=32)
    (phrase,) = broken_rules(asked, JOB, CLUSTER)
    assert "does not divide the global batch 32" in phrase
    assert broken_rules(Configuration.of({**asked.launch, "micro_batch": 4}), JOB, CLUSTER) == []


def test_a_configuration_is_rendered_at_its_own_batch() -> None:
    asked = Configuration.of(data_parallel=8, micro_batch=2, global_batch=32)
    config = render_deepspeed_config(asked, JOB)
    assert config["train_batch_size"] == 32
    assert config["gradient_accumulation_steps"] == 2
    assert JOB.at(asked).steps == 1800
    assert JOB.at(Configuration.of(data_parallel=8)) is JOB


def test_a_measured_step_counts_as_so_many_steps_of_the_job() -> None:
    asked = Configuration.of(data_parallel=8, global_batch=32)
    halved = record(request=ProbeRequest("p0000", asked.launch))
    told = in_job_steps(halved, JOB)
    assert halved.measurements
    for before, after in zip(halved.measurements, told.measurements, strict=True):
        assert after.step_time_s == pytest.approx(1.8 * before.step_time_s)
        assert after.energy_per_step_J * JOB.steps == pytest.approx(before.energy_per_step_J * 1800)
        assert after.power_W == before.power_W
    plain = record(request=ProbeRequest("p0000", Configuration.of(data_parallel=8).launch))
    assert in_job_steps(plain, JOB) is plain
    assert in_job_steps(halved, None) is halved


def test_the_prior_speaks_of_the_same_steps() -> None:
    asked = [Configuration.of(data_parallel=8, micro_batch=2, global_batch=b) for b in (32, 64)]
    model = AnalyticModel(JOB, CLUSTER)
    raw, told = model.predict(asked), AnalyticPrior(model, JOB).predict(asked)
    assert raw.step_time_s[0] < raw.step_time_s[1]  # half the samples a step
    assert np.allclose(told.step_time_s / raw.step_time_s, [1.8, 1.0])
    assert steps_a_job_step(asked[0], JOB) == 1.8


def test_a_study_answers_in_steps_of_each_configuration(tmp_path: Path) -> None:
    """On a simulated cluster: energy to solution is a measured step's, times the steps there."""
    from tests.support.studies import run_optimize as optimize
    from tuner.api import load_result
    from tuner.workload.records.trace import read_trace

    space = tmp_path / "sizes.toml"
    space.write_text('[knobs]\nglobal_batch = "auto"\ndata_parallel = [8]\nmicro_batch = [2, 4]\n')
    result = optimize(
        JOB,
        cluster=CLUSTER,
        space=str(space),
        executor="simulated",
        max_probes=4,
        runs_dir=tmp_path,
        name="sizes",
        report=False,
    )
    steps = {32: 1800, 64: 1000}
    raw: dict[Configuration, list[float]] = {}
    for made in read_trace(tmp_path / "sizes" / "trace" / "probes.jsonl").records:
        for m in made.measurements:
            configuration = Configuration(made.request.launch, m.live)
            raw.setdefault(configuration, []).append(m.step_time_s)
    assert {c.get("global_batch") for c in raw} == {32, 64}
    assert result.baseline.configuration.get("global_batch") == 64
    for point in result.points:
        size = point.configuration.get("global_batch")
        assert isinstance(size, int)
        expected = steps[size] * float(np.exp(np.mean(np.log(raw[point.configuration]))))
        assert math.isclose(point.time_to_solution_s, expected, rel_tol=0.05)
    again = load_result("sizes", runs_dir=tmp_path)
    for now, then in zip(again.points, result.points, strict=True):
        assert math.isclose(now.time_to_solution_s, then.time_to_solution_s, rel_tol=1e-9)
