"""FP8 in the analytic models: its rate, its casts, and what stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tuner.models.analytic import compute
from tuner.models.analytic.model import AnalyticModel, Breakdown
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.model_facts import facts_of

JOB = load_job("qwen2.5-7b")
H100 = load_cluster("h100-32")
#: Llama 3.1 8B, from its published config.json.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def told(scaling: str, cluster: Cluster = H100, job: TrainingJob = JOB, **knobs: Any) -> Breakdown:
    given = {"data_parallel": 8, "micro_batch": 4, "zero_stage": 3, **knobs}
    return AnalyticModel(job, cluster).breakdown(Configuration.of(given, fp8=scaling))


def test_the_rate_is_that_of_the_data_sheet_and_casts_are_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = dict.fromkeys(compute.FP8, ((0.0,) * 3,) * 2)
    monkeypatch.setattr(compute, "CAST_BYTES", nothing)
    plain, free = told("none"), told("tensorwise")
    gone = plain.time_s["arithmetic"] - free.time_s["arithmetic"]
    facts, device = facts_of(JOB), H100.device
    linear = 6 * (facts.matmul_parameters - facts.head_parameters)
    tokens = JOB.global_batch * JOB.sequence_length / 8
    share = AnalyticModel(JOB, H100).constants.matrix_efficiency
    rates = 1 / device.peak_flops - 1 / device.fp8_flops
    assert gone == pytest.approx(linear * tokens * rates / share, rel=1e-6)
    assert free.time_s["memory traffic"] == pytest.approx(plain.time_s["memory traffic"])


def test_the_traffic_of_casts() -> None:
    plain, by_operator = told("none"), told("tensorwise")
    fused = told("tensorwise", compilation="regional")
    moved = {
        name: said.time_s["memory traffic"] - plain.time_s["memory traffic"]
        for name, said in (("by operator", by_operator), ("fused", fused))
    }
    # Qwen2.5-7B: hidden 3584, 28 heads and 4 of keys and values of 128, intermediate 18944.
    each = 20 * (3 * 3584 + 3584 + 2 * 3584 + 18944 + (3584 + 2 * 512) + 3584 + 2 * 18944 + 3584)
    once = 6 * (3584 + 3584 + 3584 + 18944) + 4 * (3584 + 2 * 512 + 3584 + 2 * 18944 + 3584)
    facts, model = facts_of(JOB), AnalyticModel(JOB, H100)
    rate = model.constants.memory_efficiency * H100.device.memory_bandwidth_Bps
    tokens = JOB.global_batch * JOB.sequence_length / 8
    rounds = JOB.global_batch / 8 / 4
    weights = facts.block_parameters * rounds
    assert moved["by operator"] == pytest.approx(
        (each * tokens * facts.layers + 20 * weights) / rate, rel=1e-6
    )
    assert moved["fused"] == pytest.approx(
        (once * tokens * facts.layers + 10 * weights) / rate, rel=1e-6
    )


def test_memory_and_collectives_are_as_without() -> None:
    plain, rowwise = told("none"), told("rowwise")
    assert rowwise.memory == plain.memory
    name = "gradients and ZeRO"
    assert rowwise.time_s[name] <= plain.time_s[name] * 1.05
    assert (
        told("mx", load_cluster("b200-8")).step_time_s
        < told("none", load_cluster("b200-8")).step_time_s
    )


@pytest.mark.parametrize(("gpus", "measured"), [(8, 8532 / 6667), (128, 8380 / 6514)])
def test_the_gain_that_torchtitan_published(gpus: int, measured: float) -> None:
    """Llama 3.1 8B under FSDP2, compiled, 16 384 tokens a GPU; nothing is fitted to it.

    benchmarks/llama3_h100_202412_torchtitan.md of its repository, tables 1 and 3, on H100 of
    2.4 TB/s limited to 500 W. What is predicted is 7 % too little, so this bounds the error.
    """
    device = replace(H100.device, memory_bandwidth_Bps=2.4e12, max_W=500.0)
    cluster = replace(H100, device=device, nodes=gpus // 8)
    job = TrainingJob("llama", LLAMA, 8192, 2 * gpus, 100)
    knobs = {"data_parallel": gpus, "micro_batch": 2, "sharding": "fsdp2", "zero_stage": 0}
    knobs |= {"activation_checkpointing": "selective", "compilation": "regional"}
    plain, compiled = (told(s, cluster, job, **knobs) for s in ("none", "tensorwise"))
    assert plain.step_time_s / compiled.step_time_s == pytest.approx(measured, rel=0.08)
    eager = told("tensorwise", cluster, job, **{**knobs, "compilation": "none"})
    assert eager.step_time_s > plain.step_time_s  # unfused casts cost more than FP8 saves
