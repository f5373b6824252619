"""The table `[program]` of a job: what predictions take its training program to do."""

from dataclasses import replace
from pathlib import Path

import pytest

from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import Program, TrainingJob, load_job
from tuner.search_spaces.model_facts import facts_of, job_state_bytes, state_bytes
from tuner.search_spaces.rules import broken_rules, unrunnable
from tuner.search_spaces.space import default_configuration

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


def test_states_are_as_large_as_the_optimizer_makes_them() -> None:
    count = facts_of(QWEN).parameters

    def states(program: Program, **knobs: int | str) -> list[float]:
        job = replace(QWEN, program=program)
        here = Configuration.of({"data_parallel": 8, "zero_stage": 0, **knobs})
        parts = AnalyticModel(job, load_cluster("a100-8")).breakdown(here).memory
        return [parts[name] / count for name in ("parameters", "gradients", "optimizer")]

    pure, small = Program(pure_bf16=True), Program(optimizer="adamw_8bit")
    assert states(Program()) == pytest.approx([2, 2, 12])
    assert states(pure) == pytest.approx([2, 2, 4])
    assert states(pure, zero_stage=1) == pytest.approx([2, 2, 6 / 8])
    assert states(pure, zero_stage=3) == pytest.approx([2 / 8, 2 / 8, 4 / 8])
    assert states(pure, sharding="fsdp2") == pytest.approx([2 / 8, 2 / 8, 4 / 8])
    assert states(small) == pytest.approx([2, 2, 4 + 2.03125])
    assert states(small, sharding="fsdp2") == pytest.approx([4 / 8, 4 / 8, 2.03125 / 8])
    wide = Program(pure_bf16=True, optimizer="adamw_32bit")
    assert states(wide) == pytest.approx([2, 2, 8])
    both = Program(pure_bf16=True, optimizer="adamw_8bit")
    assert states(both) == pytest.approx([2, 2, 2.03125])
    assert job_state_bytes(replace(QWEN, program=both), 0, 8) == 6.03125 * count


def test_torch_keeps_pure_bf16_states_of_eight_bytes() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    kept = [v for v in optimizer.state[weight].values() if v.numel() > 1]
    each = state_bytes(Program(pure_bf16=True), "bf16")
    assert sum(v.numel() * v.element_size() for v in kept) == each.moments * 4096
    assert weight.grad.element_size() == each.gradients


def test_pure_bf16_needs_bf16_and_8_bit_states_no_offload() -> None:
    with pytest.raises(InputError, match='needs precision = "bf16", not fp16'):
        replace(QWEN, precision="fp16", program=Program(pure_bf16=True))
    job, cluster = replace(QWEN, program=Program(optimizer="adamw_8bit")), load_cluster("a100-8")
    here = Configuration.of(data_parallel=8, zero_stage=2, optimizer_offload="cpu")
    (phrase,) = broken_rules(here, job, cluster)
    assert "without 8-bit states" in phrase
    assert broken_rules(here, QWEN, cluster) == []
    (phrase,) = unrunnable(Configuration.of(data_parallel=8), job)
    assert "8-bit moments" in phrase
    # A model that is far too large for a GPU is not offloaded by default.
    one = replace(cluster, devices_per_node=1)
    assert default_configuration(job, one).get("optimizer_offload") == "none"
    assert default_configuration(QWEN, one).get("optimizer_offload") == "cpu"


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("[program]\nsequence_shard = true\n", "sequence_shard"),
        ("[program]\nsequence_sharded = 1\n", "true or false"),
        ('[program]\ndropout = "some"\n', "one of none, hidden, all"),
        ("[program]\ncopies = -1\n", "an integer"),
        ("program = 3\n", "a table"),
        ('[program]\noptimizer = "adam8"\n', "one of adamw, adamw_32bit, adamw_8bit"),
        ("[program]\npure_bf16 = true\nfp32_gradients = true\n", "exclude each other"),
    ],
)
def test_a_wrong_program_is_refused(tmp_path: Path, table: str, sentence: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(table + TEXT if table.startswith("program") else TEXT + table)
    with pytest.raises(InputError, match=sentence):
        TrainingJob.from_toml(path)
