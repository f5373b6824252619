"""A trainer with Megatron's flags, really looked at and probed: what a driver writes arrives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.scripts import inspected
from tuner.search_spaces.configuration import Configuration
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.records.probe import ProbeRequest, WindowPolicy
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.inspection import blank_job

CLUSTER = detect_cluster()
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,  # imports torch and DeepSpeed once, then three launches
    pytest.mark.usefixtures("one_fork_server"),
    pytest.mark.skipif(CLUSTER.devices_per_node < 2, reason="needs two cores"),
]
MEGATRON = Path(__file__).parents[3] / "scripts" / "megatron"
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 "
    "--micro-batch-size 1 --global-batch-size 16 --train-iters 1000000 --save nowhere"
)


def test_transformers_own_parser_takes_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "sft.py").write_text("from transformers import HfArgumentParser\n")
    text = "output_dir: out\nuse_cpu: true\nper_device_train_batch_size: 4 # fits\n"
    (tmp_path / "sft.yaml").write_text(text)
    script = Script("sft.py sft.yaml", cwd=tmp_path)
    blank = blank_job(script, replace(CLUSTER, devices_per_node=2))
    job = replace(blank, frame=replace(blank.frame, kind="torch"))
    other = Configuration.of(
        {**job.baseline.launch, "micro_batch": 2, "activation_checkpointing": "full"}
    )
    file = job.start(other, tmp_path / "probe").words[-1]
    from transformers import HfArgumentParser, TrainingArguments

    (read,) = HfArgumentParser(TrainingArguments).parse_yaml_file(file)
    assert (read.per_device_train_batch_size, read.gradient_accumulation_steps) == (2, 2)
    assert read.gradient_checkpointing


@pytest.mark.quiet
def test_the_flags_arrive_and_a_larger_micro_batch_is_faster(tmp_path: Path) -> None:
    cluster = replace(CLUSTER, devices_per_node=2)
    script = Script(f"pretrain_gpt.py {FLAGS}", cwd=MEGATRON)
    with inspected(script, cluster, tmp_path) as (runner, job):
        times = {}
        for name, knobs in {
            "today": {},
            "other": {"data_parallel": 1, "tensor_parallel": 2, "micro_batch": 16},
        }.items():
            launch = Configuration.of({**job.baseline.launch, **knobs}).launch
            window = WindowPolicy(min_s=0.2, min_steps=3, max_s=0.5)
            record = runner.run(ProbeRequest(name, launch, window=window, time_limit_s=60.0))
            assert record.ok, record.failure
            times[name] = record.measurements[0].step_time_s
    assert (job.global_batch, job.steps, job.frame.kind) == (16, 1_000_000, "torch")
    printed = {name: (tmp_path / "probes" / name / "rank0.log").read_text() for name in times}
    assert "--tensor-model-parallel-size" not in printed["today"]
    assert "--micro-batch-size 16 --global-batch-size 16" in printed["other"]
    assert "--tensor-model-parallel-size 2" in printed["other"]
    assert "--save" not in printed["other"]  # a probe writes no checkpoint
    # Each micro-batch costs 20 ms beside its samples: 8 of them against one. Their ratio is not
    # asked for, since steps took 60 ms more on a busy machine.
    assert times["other"] < times["today"]
