"""Costs as PyTorch and DeepSpeed execute them: precision, masks, gathers, offload, waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tuner.models.analytic.compute import Passes
from tuner.models.analytic.constants import constants_of, cut, read_layout
from tuner.models.analytic.model import AnalyticModel, Program
from tuner.models.analytic.step import StepParts, step_parts
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.model_facts import facts_of

JOB = load_job("qwen2.5-7b")
CLUSTER = load_cluster("h100-32")


def parts_of(
    job: TrainingJob = JOB, cluster: Cluster = CLUSTER, *, fused: bool = True, **knobs: object
) -> StepParts:
    model = AnalyticModel(job, cluster, program=Program(fused_attention=fused))
    launches = read_layout([Configuration.of(**knobs)], job.global_batch).launches
    return step_parts(model.setup, launches, cut(model.facts.layers, int(launches.p[0])))


# Precision.


def test_fp32_runs_without_tensor_cores() -> None:
    """PyTorch keeps TF32 off for matrix products unless the program allows it."""
    job = replace(JOB, precision="fp32")
    a100 = load_cluster("a100-8")
    assert AnalyticModel(job, a100).setup.peak_flops == 19.5e12
    unknown = replace(a100, device=replace(a100.device, fp32_flops=0.0))
    assert AnalyticModel(job, unknown).setup.peak_flops == pytest.approx(312e12 / 16)
    assert AnalyticModel(JOB, a100).setup.peak_flops == 312e12
    # NVIDIA's containers allow TF32, which has half the rate of bf16.
    assert AnalyticModel(job, a100, program=Program(tf32=True)).setup.peak_flops == 156e12
    # A CPU's stated peak is that of fp32.
    cpu = load_cluster("cpu-2")
    assert AnalyticModel(job, cpu).setup.peak_flops == cpu.device.peak_flops


# The causal mask.


def test_fused_attention_skips_half_of_the_scores() -> None:
    facts = facts_of(JOB)
    launches = read_layout([Configuration.of(data_parallel=8)], JOB.global_batch).launches
    fused, stored = (
        Passes(
            AnalyticModel(JOB, CLUSTER, program=Program(fused_attention=f)).setup, launches
        ).block()
        for f in (True, False)
    )
    tokens = JOB.sequence_length * launches.b
    scores = 4.0 * JOB.sequence_length * facts.heads * facts.head_dim * tokens
    setup = AnalyticModel(JOB, CLUSTER).setup
    assert stored.arithmetic_s - fused.arithmetic_s == pytest.approx(scores / setup.flops_per_s)
    rate = setup.constants.attention_efficiency * setup.peak_flops
    assert fused.attention_s == pytest.approx(0.5 * scores / rate)
    assert not stored.attention_s.any()


def test_fused_attention_computes_its_scores_again_for_the_backward_pass() -> None:
    """Two products forward, five backward; recomputation of the block adds two."""
    launches = read_layout([Configuration.of(data_parallel=8)], JOB.global_batch).launches
    slow = replace(constants_of(CLUSTER.device), attention_efficiency=0.1)
    fast = replace(slow, attention_efficiency=0.2)
    for checkpointing, forward_passes in (("none", 3.5), ("full", 4.5)):
        seconds = [
            step_parts(
                AnalyticModel(JOB, CLUSTER, constants=constants).setup,
                read_layout(
                    [Configuration.of(data_parallel=8, activation_checkpointing=checkpointing)],
                    JOB.global_batch,
                ).launches,
                cut(facts_of(JOB).layers, 1),
            ).arithmetic
            for constants in (slow, fast)
        ]
        one = Passes(AnalyticModel(JOB, CLUSTER, constants=fast).setup, launches).block()
        expected = forward_passes * facts_of(JOB).layers * one.attention_s[0]
        assert seconds[0] - seconds[1] == pytest.approx(expected)


def test_an_encoder_of_frames_has_no_causal_mask() -> None:
    job = load_job("lmm-7b")
    launches = read_layout([Configuration.of(data_parallel=8)], job.global_batch).launches
    fused, stored = (
        Passes(
            AnalyticModel(job, CLUSTER, program=Program(fused_attention=f)).setup, launches
        ).encoder()
        for f in (True, False)
    )
    assert fused.arithmetic_s[0] > 0
    assert fused.arithmetic_s == pytest.approx(stored.arithmetic_s)


# Gradients on their way to a host optimizer.


@pytest.mark.parametrize(
    ("stage", "micro_batches", "transfers"),
    [
        # 16-bit copies of the gradients, beside the fp32 gradients (two 16-bit copies' bytes) and
        # the new parameters (one), once a step.
        (1, 1, 0),
        (1, 8, 2),
        (2, 1, 0),
        (2, 8, 15),
        (3, 1, 2),
        (3, 8, 16),
    ],
)
def test_offload_moves_gradients_as_deepspeed_does(
    stage: int, micro_batches: int, transfers: int
) -> None:
    job = replace(JOB, global_batch=4 * micro_batches)
    knobs = {"data_parallel": 4, "micro_batch": 1, "zero_stage": stage}
    parts = parts_of(job, optimizer_offload="cpu", **knobs)
    setup = AnalyticModel(job, CLUSTER).setup
    once = facts_of(job).parameters / 4 * 2 / setup.host_link_Bps
    moved = parts.offload + parts.offload_behind - parts.host_update
    assert moved[0, 0] == pytest.approx((3 + transfers) * once, rel=1e-6)
    # Stages 1 and 2 copy on the stream that computes, stage 3 on one of its own.
    assert (parts.offload_behind[0, 0] > 0) == (stage == 3)


def test_accumulation_makes_offload_slower() -> None:
    knobs = {"data_parallel": 4, "zero_stage": 2, "activation_checkpointing": "full"}
    few, many = (
        parts_of(micro_batch=b, optimizer_offload="cpu", **knobs).offload[0, 0] for b in (8, 1)
    )
    assert many > 3 * few


# Parameters gathered by ZeRO-3.


def rounds(job: TrainingJob, **knobs: object) -> float:
    """Gathers and reductions of a micro-batch in units of one gather of all parameters."""
    silent = replace(constants_of(CLUSTER.device), link_latency_s=0.0, network_latency_s=0.0)
    model = AnalyticModel(job, CLUSTER, constants=silent)
    sync = []
    for stage in (1, 3):  # stage 1 reduces and gathers once each
        configuration = Configuration.of(data_parallel=8, zero_stage=stage, **knobs)
        launches = read_layout([configuration], job.global_batch).launches
        parts = step_parts(model.setup, launches, cut(model.facts.layers, 1))
        sync.append(parts.sync[0, 0] / launches.m[0] ** (stage == 3))
    return float(2 * sync[1] / sync[0])


def test_stage_3_keeps_the_last_parameters_of_the_forward_pass() -> None:
    """DeepSpeed keeps 1e9 parameters live, so that a small model is gathered once."""
    small, large = load_job("opt-350m"), load_job("qwen2.5-7b")
    assert facts_of(small).parameters < 1e9
    assert rounds(small, micro_batch=1) == pytest.approx(2.0)
    kept = 1e9 / facts_of(large).parameters
    assert rounds(large, micro_batch=1) == pytest.approx(3.0 - kept)


def test_recomputation_gathers_again_only_what_does_not_stay_live() -> None:
    full = {"micro_batch": 1, "activation_checkpointing": "full"}
    assert rounds(JOB, **full) == pytest.approx(rounds(JOB, micro_batch=1))
    wide = {**JOB.model, "hidden_size": 16384, "intermediate_size": 53248}
    wide |= {"num_attention_heads": 128, "num_key_value_heads": 8, "num_hidden_layers": 4}
    giant = replace(JOB, model=wide)
    facts = facts_of(giant)
    block = facts.block_parameters / 4
    assert block > 2e9
    more = rounds(giant, **full) - rounds(giant, micro_batch=1)
    assert more == pytest.approx(4 * (block - 1e9) / facts.parameters)
    half = rounds(giant, micro_batch=1, activation_checkpointing="every_2")
    assert half - rounds(giant, micro_batch=1) == pytest.approx(more / 2)


# Power while waiting.


def test_waiting_draws_more_than_being_awake() -> None:
    """A kernel that waits for other ranks spins; the time of a step does not change."""
    constants = constants_of(CLUSTER.device)
    assert constants.wait_W > 0
    none = replace(constants, wait_W=0.0)
    alone = [Configuration.of(micro_batch=1)]
    pipeline = [Configuration.of(pipeline_parallel=4, data_parallel=2, micro_batch=8)]
    small = load_job("opt-350m")
    for configurations, waits in ((alone, False), (pipeline, True)):
        here, quiet = (
            AnalyticModel(small, CLUSTER, constants=c).predict(configurations)
            for c in (constants, none)
        )
        assert here.step_time_s == pytest.approx(quiet.step_time_s)
        if waits:
            assert here.power_W[0] > 1.001 * quiet.power_W[0]
        else:
            assert here.power_W[0] == pytest.approx(quiet.power_W[0])


def test_waiting_is_what_a_step_leaves_of_its_own_work() -> None:
    """In a pipeline of equal stages the bubble is (p - 1) slots of every device."""
    job = replace(load_job("opt-350m"), global_batch=16)
    silent = replace(
        constants_of(CLUSTER.device), step_s=0.0, stage_s=0.0, link_latency_s=0.0, wait_W=0.1
    )
    model = AnalyticModel(job, CLUSTER, constants=silent)
    configuration = Configuration.of(pipeline_parallel=4, micro_batch=1, clock_MHz=1980)
    launches = read_layout([configuration], 16).launches
    stages = cut(model.facts.layers, 4)
    parts = step_parts(model.setup, launches, stages)
    slot = parts.slot_s(np.ones((1, len(stages.count))), silent)
    step = parts.step_s(slot, stages, silent)
    waiting = parts.waiting_s(slot, step, silent)
    own = parts.m * (slot - parts.links) + parts.update
    assert waiting + own == pytest.approx(np.repeat(step[:, None], slot.shape[1], axis=1))
    assert (waiting > 0).all()


def _parts(program: Program, **knobs: int) -> Mapping[str, float]:
    """Return the bytes of each part of the fullest rank's memory."""
    model = AnalyticModel(load_job("qwen2.5-7b"), load_cluster("h100-32"), program=program)
    return model.breakdown(Configuration.of(micro_batch=1, zero_stage=1, **knobs)).memory


def test_sequence_parallelism_divides_activations_over_tensor_parallel_ranks_alone() -> None:
    """Of a block's 34 h bytes a token all are divided (arXiv 2205.05198, equation 4)."""
    whole, divided = Program(fused_blocks=True), Program(fused_blocks=True, sequence_sharded=True)
    alone = _parts(whole)["activations"]
    assert _parts(divided)["activations"] == alone
    assert _parts(divided, tensor_parallel=4)["activations"] == pytest.approx(alone / 4)
    assert _parts(whole, tensor_parallel=4)["activations"] > 1.2 * alone / 4


def test_gradients_in_fp32_take_twice_the_bytes_and_no_buckets() -> None:
    plain, fp32 = (_parts(Program(fp32_gradients=f), data_parallel=8) for f in (False, True))
    assert fp32["gradients"] == pytest.approx(2 * plain["gradients"])
    assert plain["communication"] > 0
    assert "communication" not in fp32
