"""The table `[program]` of a job: what predictions take its training program to do."""

from dataclasses import replace
from pathlib import Path

import pytest

from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.program import Program

QWEN = load_job("qwen2.5-7b")
TEXT = """
sequence_length = 2048
global_batch = 64
steps = 10
[model]
config = "qwen2.5-7b"
"""


def test_a_job_file_states_its_program_and_predictions_follow(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(TEXT + "[program]\nsequence_sharded = true\nfp32_gradients = true\n")
    job = TrainingJob.from_toml(path)
    assert job.program == Program(sequence_sharded=True, fp32_gradients=True)
    assert TrainingJob.from_json(job.to_json()) == job
    assert "program" not in QWEN.to_json()  # as in studies from before there was one
    launch = [Configuration.of(micro_batch=1, tensor_parallel=4, data_parallel=8, zero_stage=1)]
    cluster = load_cluster("h100-32")
    plain = AnalyticModel(replace(job, program=Program()), cluster).predict(launch)
    stated = AnalyticModel(job, cluster).predict(launch)
    assert stated.memory_bytes[0] != plain.memory_bytes[0]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("[program]\nsequence_shard = true\n", "sequence_shard"),
        ("[program]\nsequence_sharded = 1\n", "true or false"),
        ('[program]\ndropout = "some"\n', "one of none, hidden, all"),
        ("[program]\ncopies = -1\n", "an integer"),
        ("program = 3\n", "a table"),
    ],
)
def test_a_wrong_program_is_refused(tmp_path: Path, table: str, sentence: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(table + TEXT if table.startswith("program") else TEXT + table)
    with pytest.raises(InputError, match=sentence):
        TrainingJob.from_toml(path)
