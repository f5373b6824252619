"""The user's own DeepSpeed JSON and flags as the baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tuner
from tests.support.studies import FormulaRunner, run_optimize
from tuner.executors.simulated_time import SimulatedExecutor
from tuner.problem.from_job import baseline_of, read_baseline
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError, InvalidConfiguration
from tuner.search_spaces.job import load_job

JOB, CPU = load_job("tiny-gpt"), load_cluster("cpu-2")


def config(folder: Path, **settings: object) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(settings))
    return path


def test_knobs_are_read_and_the_rest_is_said(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        train_batch_size=64,
        train_micro_batch_size_per_gpu=2,
        zero_optimization={
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "overlap_comm": True,
        },
        optimizer={"type": "Adam"},
        fp16={"enabled": True},
    )
    read = read_baseline([path], JOB, CPU)
    wanted = {
        "data_parallel": 2,
        "micro_batch": 2,
        "zero_stage": 2,
        "optimizer_offload": "cpu",
    }
    assert dict(read.configuration.launch) == wanted
    assert read.name == "yours: ds_config.json"
    said = " ".join(read.notes)
    assert f"global batch of 64; the job's {JOB.global_batch}" in said
    assert "trains in fp16" in said
    assert "no knob, so the job's own holds: optimizer" in said
    assert "overlap_comm" in said


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, train_micro_batch_size_per_gpu=1)
    read = read_baseline([path, "tensor_parallel=2", "micro_batch=4"], JOB, CPU)
    assert read.configuration.tensor_parallel == 2
    assert read.configuration.data_parallel == 1
    assert read.configuration.micro_batch == 4
    assert read.name == "yours: ds_config.json, tensor_parallel=2, micro_batch=4"


def test_super_offload_is_asynchronous(tmp_path: Path) -> None:
    offload = {"device": "cpu", "super_offload": True}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": {"device": "nvme"}}
    path = config(tmp_path, train_micro_batch_size_per_gpu=1, zero_optimization=zero)
    read = read_baseline([path, "data_parallel=4"], JOB, load_cluster("jupiter-32"))
    assert read.configuration.get("optimizer_offload") == "async"
    assert read.configuration.get("parameter_offload") == "cpu"
    assert any("offloads to nvme" in note for note in read.notes)


def test_without_a_micro_batch_it_is_the_ranks_share(tmp_path: Path) -> None:
    read = read_baseline([config(tmp_path, gradient_accumulation_steps=2)], JOB, CPU)
    assert read.configuration.micro_batch == JOB.global_batch // 4


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("[1]", InputError, "holds no object"),
        ("{", InputError, "is not a valid DeepSpeed configuration"),
        ('{"zero_optimization": {"stage": 5}}', InputError, "stage is 5"),
        ('{"train_micro_batch_size_per_gpu": 3}', InvalidConfiguration, "batch"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, text: str, error: type, words: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(error, match=words):
        read_baseline([path], JOB, CPU)


def test_two_files_and_a_missing_one_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="second file"):
        read_baseline(["a.json", "b.json"], JOB, CPU)
    with pytest.raises(InputError, match="cannot read"):
        read_baseline([tmp_path / "no.json"], JOB, CPU)


def test_what_runs_today_is_measured_though_no_search_would_try_it(tmp_path: Path) -> None:
    """ZeRO over one rank shards nothing, and DeepSpeed trains with it all the same."""
    path = config(tmp_path, train_micro_batch_size_per_gpu=1, zero_optimization={"stage": 1})
    result = run_optimize(
        executor=SimulatedExecutor(FormulaRunner()),
        baseline=[path, "data_parallel=1"],
        runs_dir=tmp_path / "runs",
        cluster="cpu-2",
        max_probes=3,
    )
    today = result.baseline.configuration
    assert (today.zero_stage, today.data_parallel) == (1, 1)
    others = [point.configuration for point in result.points if point.configuration != today]
    assert others
    plain = [each for each in others if each.get("optimizer_offload") == "none"]
    assert not any(each.zero_stage and each.world_size == 1 for each in plain)


def test_a_study_measures_it_and_names_it(tmp_path: Path) -> None:
    path = config(tmp_path, train_micro_batch_size_per_gpu=1, zero_optimization={"stage": 1})
    options = {"runs_dir": tmp_path / "runs", "cluster": "cpu-2", "report": False, "max_probes": 2}
    result = run_optimize(
        executor=SimulatedExecutor(FormulaRunner()), baseline=[path], name="mine", **options
    )
    assert result.baseline.configuration.zero_stage == 1
    assert result.baseline.configuration.micro_batch == 1
    assert result.baseline_name == "yours: ds_config.json"
    assert tuner.load_result(result.run_dir).baseline_name == "yours: ds_config.json"
    plain = run_optimize(executor=SimulatedExecutor(FormulaRunner()), name="plain", **options)
    assert plain.baseline_name.startswith("the default: data parallelism over 2 devices")


@pytest.mark.extra("tuner.search_spaces.model_reading")
@pytest.mark.parametrize(
    ("job", "cluster", "default"),
    [
        ("qwen2.5-7b", "a100-8", "dp8 mb1 zero1"),  # the rough estimate is right
        ("qwen2.5-7b", "h100-32", "dp32 mb1 zero1"),  # 110 of 85.5 GB with mb2
        ("qwen2.5-7b", "b200-8", "dp8 mb2 zero1"),  # 197 of 192 GB without ZeRO
        ("olmoe-1b-7b", "a100-40gb-8", "dp8 mb1 zero2 ckpt-full"),  # ZeRO-3 takes twice as long
        ("lmm-72b", "h100-32", "dp32 mb1 zero3 ckpt-full"),  # nothing lighter but offload
    ],
)
def test_the_default_is_the_fastest_plain_one_that_the_models_fit(
    job: str, cluster: str, default: str
) -> None:
    found = baseline_of(None, load_job(job), load_cluster(cluster))
    assert found.configuration.short == default
    assert found.name.startswith("the default: ")


def test_what_the_user_runs_is_kept_although_it_does_not_fit() -> None:
    given = Configuration.of(data_parallel=32, micro_batch=2, zero_stage=1)
    found = baseline_of(given, load_job("qwen2.5-7b"), load_cluster("h100-32"))
    assert found.configuration == given
