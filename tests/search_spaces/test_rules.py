"""Every validity rule, on both sides of its border."""

from dataclasses import replace

import pytest

from tuner.search_spaces.cluster import Cluster, Device, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.declared import Knob
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.lora import LoRA
from tuner.search_spaces.program import Program
from tuner.search_spaces.rules import _COMPUTED, _LIMITS, RULES, broken_rules, unrunnable

H100 = load_cluster("h100-32")
CORE = Device("core", "cpu", 4 << 30, 5e10, 1e10, 2.0, 8.0)
QWEN = load_job("qwen2.5-7b")  # 28 heads, 4 key-value heads, 28 layers, global batch 128
OLMOE = load_job("olmoe-1b-7b")  # 16 heads, 64 experts
TINY = load_job("tiny-gpt")  # global batch 8
DRIVE = replace(H100, nvme_path="/nvme")


def machine(cores: int) -> Cluster:
    return Cluster("this-machine", CORE, cores)


# (rule, what breaks it, what does not); each a job, a cluster and knobs.
CASES = [
    (
        "lora_degrees",
        (replace(TINY, lora=LoRA(4)), machine(4), {"tensor_parallel": 2}),
        (replace(TINY, lora=LoRA(4)), machine(4), {"sequence_parallel": 2, "zero_stage": 1}),
    ),
    (
        "lora_precision",
        (replace(QWEN, lora=LoRA(16)), H100, {"fp8": "tensorwise"}),
        (QWEN, H100, {"fp8": "tensorwise"}),
    ),
    (
        "sequence_chunks",
        (
            replace(TINY, sequence_length=62),
            machine(2),
            {"sequence_parallel": 2, "sequence_method": "all_gather"},
        ),
        (  # more ranks than heads
            TINY,
            machine(16),
            {"sequence_parallel": 16, "sequence_method": "all_gather"},
        ),
    ),
    (
        "fp8_device",
        (QWEN, load_cluster("a100-8"), {"fp8": "rowwise"}),
        (QWEN, H100, {"fp8": "rowwise"}),
    ),
    (
        "fp8_device",  # a Hopper has no scales for blocks
        (QWEN, H100, {"fp8": "mx"}),
        (QWEN, load_cluster("b200-8"), {"fp8": "mx"}),
    ),
    (
        "fp8_device",
        (replace(TINY, precision="bf16"), machine(2), {"fp8": "tensorwise"}),
        (TINY, machine(2), {}),
    ),
    (
        "fp8_precision",
        (replace(QWEN, precision="fp16"), H100, {"fp8": "tensorwise"}),
        (QWEN, H100, {"fp8": "tensorwise"}),
    ),
    (
        "fp8_sides",
        (replace(QWEN, sequence_length=24), H100, {"fp8": "tensorwise"}),
        (replace(QWEN, sequence_length=24), H100, {"fp8": "tensorwise", "micro_batch": 2}),
    ),
    (
        "schedule_pipeline",
        (TINY, machine(4), {"pipeline_schedule": "zero_bubble"}),
        (TINY, machine(4), {"pipeline_schedule": "zero_bubble", "pipeline_parallel": 2}),
    ),
    (
        "schedule_virtual_stages",
        (TINY, machine(4), {"pipeline_parallel": 2, "virtual_stages": 2}),
        (
            TINY,
            machine(4),
            {"pipeline_parallel": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved"},
        ),
    ),
    (
        "virtual_layers",
        (
            QWEN,
            H100,
            {"pipeline_parallel": 8, "virtual_stages": 4, "pipeline_schedule": "interleaved"},
        ),
        (
            QWEN,
            H100,
            {"pipeline_parallel": 4, "virtual_stages": 4, "pipeline_schedule": "interleaved"},
        ),
    ),
    (
        "schedule_rounds",  # 5 micro-batches are not 2 rounds
        (
            replace(QWEN, global_batch=5),
            H100,
            {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"},
        ),
        (
            replace(QWEN, global_batch=6),
            H100,
            {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"},
        ),
    ),
    (
        "precision",
        (replace(TINY, precision="fp16"), machine(2), {}),
        (replace(TINY, precision="bf16"), machine(2), {}),
    ),
    (
        "positions",
        (replace(load_job("opt-350m"), sequence_length=4096), H100, {}),
        (load_job("opt-350m"), H100, {}),
    ),
    (
        "selective_offload",
        (QWEN, H100, {"activation_checkpointing": "selective", "activation_offload": "sync"}),
        (QWEN, H100, {"activation_checkpointing": "full", "activation_offload": "sync"}),
    ),
    (
        "sharding_stage",
        (QWEN, H100, {"data_parallel": 8, "sharding": "fsdp2", "zero_stage": 1}),
        (QWEN, H100, {"data_parallel": 8, "sharding": "fsdp2"}),
    ),
    (
        "hsdp_sharding",
        (QWEN, H100, {"data_parallel": 8, "hsdp_replicas": 2}),
        (QWEN, H100, {"data_parallel": 8, "hsdp_replicas": 2, "sharding": "fsdp2"}),
    ),
    (
        "hsdp_groups",
        (QWEN, H100, {"data_parallel": 8, "hsdp_replicas": 8, "sharding": "fsdp2"}),
        (QWEN, H100, {"data_parallel": 8, "hsdp_replicas": 4, "sharding": "fsdp2"}),
    ),
    (
        "sharding_experts",
        (OLMOE, H100, {"data_parallel": 8, "sharding": "fsdp2", "expert_parallel": 2}),
        (OLMOE, H100, {"data_parallel": 8, "sharding": "fsdp2"}),
    ),
    (
        "sharding_precision",
        (replace(QWEN, precision="fp16"), H100, {"data_parallel": 8, "sharding": "fsdp2"}),
        (replace(QWEN, precision="fp16"), H100, {"data_parallel": 8}),
    ),
    (
        "ranks_fit",
        (TINY, machine(1), {"data_parallel": 2}),
        (TINY, machine(2), {"data_parallel": 2}),
    ),
    (
        "whole_nodes",
        (replace(QWEN, global_batch=120), H100, {"data_parallel": 12}),
        (replace(QWEN, global_batch=120), H100, {"data_parallel": 24}),
    ),
    (
        "global_batch",
        (TINY, machine(2), {"data_parallel": 2, "micro_batch": 8}),
        (TINY, machine(2), {"data_parallel": 2, "micro_batch": 4}),
    ),
    (
        "batch_known",
        (TINY, machine(2), {"global_batch": 16}),
        (replace(TINY, steps_at={8: TINY.steps, 16: 150}), machine(2), {"global_batch": 16}),
    ),
    (
        "nvme_stage",
        (QWEN, DRIVE, {"data_parallel": 2, "optimizer_offload": "nvme", "zero_stage": 2}),
        (QWEN, DRIVE, {"data_parallel": 2, "optimizer_offload": "nvme", "zero_stage": 3}),
    ),
    (
        "nvme_path",
        (QWEN, H100, {"data_parallel": 2, "parameter_offload": "nvme", "zero_stage": 3}),
        (QWEN, DRIVE, {"data_parallel": 2, "parameter_offload": "nvme", "zero_stage": 3}),
    ),
    (
        "tensor_in_node",
        (OLMOE, H100, {"tensor_parallel": 16}),
        (OLMOE, H100, {"tensor_parallel": 8}),
    ),
    ("tensor_heads", (QWEN, H100, {"tensor_parallel": 8}), (QWEN, H100, {"tensor_parallel": 4})),
    (
        "pipeline_layers",
        (QWEN, H100, {"pipeline_parallel": 32}),
        (QWEN, H100, {"pipeline_parallel": 16}),
    ),
    (
        "sequence_heads",
        (QWEN, H100, {"sequence_parallel": 8}),
        (QWEN, H100, {"sequence_parallel": 4}),
    ),
    (
        "sequence_heads",  # tensor parallelism leaves 7 of the 28 heads to each rank
        (QWEN, H100, {"sequence_parallel": 2, "tensor_parallel": 4}),
        (QWEN, H100, {"sequence_parallel": 2, "tensor_parallel": 2}),
    ),
    (
        "sequence_length",
        (replace(QWEN, sequence_length=4095), H100, {"sequence_parallel": 2}),
        (QWEN, H100, {"sequence_parallel": 2}),
    ),
    (
        "experts",
        (QWEN, H100, {"expert_parallel": 2, "data_parallel": 2}),
        (OLMOE, H100, {"expert_parallel": 2, "data_parallel": 2}),
    ),
    (
        "experts",  # 3 does not divide 64
        (replace(OLMOE, global_batch=1023), H100, {"expert_parallel": 3, "data_parallel": 3}),
        (OLMOE, H100, {"expert_parallel": 4, "data_parallel": 4}),
    ),
    (
        "expert_groups",
        (OLMOE, H100, {"expert_parallel": 4, "data_parallel": 2}),
        (OLMOE, H100, {"expert_parallel": 4, "data_parallel": 2, "sequence_parallel": 2}),
    ),
    (
        "zero_replicas",
        (TINY, machine(2), {"zero_stage": 1}),
        (TINY, machine(2), {"zero_stage": 1, "data_parallel": 2}),
    ),
    (
        "zero_replicas",
        (TINY, machine(2), {"zero_stage": 2, "optimizer_offload": "cpu"}),
        (TINY, machine(2), {"zero_stage": 1, "optimizer_offload": "cpu"}),
    ),
    (
        "zero_replicas",  # Ulysses ranks hold full copies, so ZeRO has something to shard
        (QWEN, H100, {"zero_stage": 3}),
        (QWEN, H100, {"zero_stage": 3, "sequence_parallel": 2}),
    ),
    (
        "offloaded_states",
        (
            replace(QWEN, program=Program(optimizer="adamw_8bit")),
            H100,
            {"data_parallel": 2, "zero_stage": 1, "optimizer_offload": "cpu"},
        ),
        (QWEN, H100, {"data_parallel": 2, "zero_stage": 1, "optimizer_offload": "cpu"}),
    ),
    (
        "zero_pipeline",
        (QWEN, H100, {"pipeline_parallel": 2, "data_parallel": 2, "zero_stage": 2}),
        (QWEN, H100, {"pipeline_parallel": 2, "data_parallel": 2, "zero_stage": 1}),
    ),
    (
        "zero_tensor",
        (QWEN, H100, {"tensor_parallel": 2, "data_parallel": 2, "zero_stage": 3}),
        (QWEN, H100, {"tensor_parallel": 2, "data_parallel": 2, "zero_stage": 2}),
    ),
    (
        "zero_experts",
        (OLMOE, H100, {"expert_parallel": 2, "data_parallel": 2, "zero_stage": 3}),
        (OLMOE, H100, {"expert_parallel": 2, "data_parallel": 2, "zero_stage": 2}),
    ),
    (
        "offload_zero",
        (TINY, machine(2), {"data_parallel": 2, "optimizer_offload": "cpu"}),
        (TINY, machine(2), {"data_parallel": 2, "optimizer_offload": "cpu", "zero_stage": 2}),
    ),
    (
        "async_device",
        (TINY, machine(2), {"data_parallel": 2, "optimizer_offload": "async", "zero_stage": 3}),
        (QWEN, H100, {"data_parallel": 2, "optimizer_offload": "async", "zero_stage": 3}),
    ),
    (
        "async_stage",
        (QWEN, H100, {"data_parallel": 2, "optimizer_offload": "async", "zero_stage": 2}),
        (QWEN, H100, {"optimizer_offload": "async", "zero_stage": 3}),  # one superchip is enough
    ),
    (
        "parameter_stage",
        (TINY, machine(2), {"data_parallel": 2, "zero_stage": 2, "parameter_offload": "cpu"}),
        (TINY, machine(2), {"data_parallel": 2, "zero_stage": 3, "parameter_offload": "cpu"}),
    ),
    (
        "zero_replicas",  # one rank keeps ZeRO 3 where its parameters are offloaded
        (TINY, machine(1), {"zero_stage": 3, "optimizer_offload": "cpu"}),
        (TINY, machine(1), {"zero_stage": 3, "parameter_offload": "cpu"}),
    ),
    (
        "checkpointed_blocks",  # 6 layers
        (TINY, machine(1), {"activation_checkpointing": "every_8"}),
        (TINY, machine(1), {"activation_checkpointing": "every_4"}),
    ),
    (
        "activation_device",
        (TINY, machine(1), {"activation_offload": "sync"}),
        (QWEN, H100, {"activation_offload": "async", "activation_checkpointing": "full"}),
    ),
    ("clock_control", (TINY, machine(1), {"clock_MHz": 1200}), (TINY, machine(1), {})),
    (
        "clock_control",  # the device offers clocks, the machine does not permit them
        (QWEN, replace(H100, clock_control=False), {"clock_MHz": 1980}),
        (QWEN, H100, {"clock_MHz": 1980}),
    ),
    ("clock_offered", (QWEN, H100, {"clock_MHz": 1201}), (QWEN, H100, {"clock_MHz": 1200})),
    (
        "clock_offered",
        (QWEN, H100, {"clock_MHz": [1980, 2000], "pipeline_parallel": 2}),
        (QWEN, H100, {"clock_MHz": [1980, 1950], "pipeline_parallel": 2}),
    ),
    (
        "clock_stages",
        (QWEN, H100, {"clock_MHz": [1980, 1950]}),
        (QWEN, H100, {"clock_MHz": [1980, 1950], "pipeline_parallel": 2}),
    ),
    (
        "limit_control",
        (TINY, machine(1), {"power_limit_W": 5}),
        (QWEN, H100, {"power_limit_W": 500}),
    ),
    (
        "memory_clock_control",
        (TINY, machine(1), {"memory_clock_MHz": 1593}),
        (QWEN, H100, {"memory_clock_MHz": 1593}),
    ),
    ("limit_range", (QWEN, H100, {"power_limit_W": 199}), (QWEN, H100, {"power_limit_W": 200})),
    ("limit_range", (QWEN, H100, {"power_limit_W": 701}), (QWEN, H100, {"power_limit_W": 700})),
    (
        "limit_stages",
        (QWEN, H100, {"power_limit_W": [300, 400, 500], "pipeline_parallel": 2}),
        (QWEN, H100, {"power_limit_W": [300, 400], "pipeline_parallel": 2}),
    ),
    (
        "one_limiter",
        (QWEN, H100, {"power_limit_W": 500, "clock_MHz": 1200}),
        (QWEN, H100, {"clock_MHz": 1200}),
    ),
]


@pytest.mark.parametrize(("rule", "bad", "good"), CASES)
def test_rule_refuses_what_it_must_and_nothing_else(rule, bad, good):
    (check,) = [r.broken for r in RULES if r.name == rule]
    job, cluster, knobs = bad
    phrase = check(Configuration.of(knobs), job, cluster)
    assert phrase
    # On its wrong side this rule alone speaks, so a user reads one reason for one mistake.
    assert broken_rules(Configuration.of(knobs), job, cluster) == [phrase]
    job, cluster, knobs = good
    assert broken_rules(Configuration.of(knobs), job, cluster) == []


def test_every_rule_is_tested_and_gives_its_reason():
    assert {case[0] for case in CASES} == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.why.endswith((".", ")."))
        assert set(rule.knobs) <= set(KNOBS)


def test_a_rule_reads_only_the_knobs_it_names():
    """The enumeration applies a rule as soon as these are chosen, so it must read no other."""

    class Spy(Configuration):
        def get(self, name):
            read.add(name)
            return super().get(name)

    for rule, bad, good in CASES:
        (found,) = [r for r in RULES if r.name == rule]
        for job, cluster, knobs in (bad, good):
            read: set[str] = set()
            asked = Configuration.of(knobs)
            found.broken(Spy(asked.launch, asked.live), job, cluster)
            assert read <= set(found.knobs), rule


@pytest.mark.parametrize(
    ("job", "cluster", "knobs", "words"),
    [
        (
            TINY,
            machine(1),
            {"data_parallel": 2},
            ["it needs 2 devices, cluster 'this-machine' has 1"],
        ),
        (TINY, machine(2), {"clock_MHz": 900}, ["cannot set clocks here"]),
        (QWEN, H100, {"clock_MHz": 1203}, ["nearest is 1200", "345 to 1980"]),
        (TINY, machine(1), {"micro_batch": 3}, ["micro_batch 3", "= 3", "global batch 8"]),
    ],
)
def test_phrases_name_the_numbers(job, cluster, knobs, words):
    (phrase,) = broken_rules(Configuration.of(knobs), job, cluster)
    assert all(word in phrase for word in words)


@pytest.mark.parametrize(
    ("job", "knobs", "words"),
    [
        (TINY, {"tensor_parallel": 2, "pipeline_parallel": 2}, "aborts inside a pipeline"),
        (TINY, {"tensor_parallel": 2, "sequence_parallel": 2}, "tensor_parallel with sequence"),
        (TINY, {"tensor_parallel": 2, "sharding": "fsdp2"}, "fsdp2 with tensor_parallel"),
        (TINY, {"tensor_parallel": 2, "activation_checkpointing": "selective"}, "in place"),
        (TINY, {"sequence_parallel": 2, "pipeline_parallel": 2}, "take whole sequences"),
        (OLMOE, {"tensor_parallel": 2}, "llama, llava_onevision, opt, qwen2 only, not olmoe"),
        (OLMOE, {"sequence_parallel": 2, "expert_parallel": 2}, "MoE layer fails"),
        (
            TINY,
            {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble", "zero_stage": 1},
            "at zero_stage 0 only",
        ),
        (
            TINY,
            {
                "pipeline_parallel": 2,
                "pipeline_schedule": "zero_bubble",
                "activation_checkpointing": "full",
            },
            "without activation_checkpointing only",
        ),
        (
            replace(TINY, precision="fp16"),
            {
                "pipeline_parallel": 2,
                "pipeline_schedule": "interleaved",
                "virtual_stages": 2,
            },
            "it scales no loss",
        ),
        (
            OLMOE,
            {"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble"},
            "llama, opt, qwen2 only, not olmoe",
        ),
        (TINY, {"compilation": "full", "pipeline_parallel": 2}, "regional compiles its blocks"),
        (
            OLMOE,
            {"sequence_parallel": 2, "sequence_method": "all_gather"},
            "llama, opt, qwen2 only, not olmoe",
        ),
        (
            TINY,
            {
                "sequence_parallel": 2,
                "sequence_method": "all_gather",
                "compilation": "full",
            },
            "without compilation only",
        ),
        (TINY, {"compilation": "regional", "sharding": "fsdp2"}, "with sharding fsdp2"),
        (OLMOE, {"compilation": "regional"}, "dense models of type llama, opt, qwen2 only"),
        (
            TINY,
            {"compilation": "regional", "activation_offload": "sync"},
            "where torch's hooks do not see them",
        ),
        (
            replace(TINY, model={**TINY.model, "model_type": "gpt2"}),
            {"pipeline_parallel": 2},
            "not gpt2",
        ),
    ],
)
def test_what_the_built_in_program_cannot_be_given_is_said(job, knobs, words):
    (phrase,) = unrunnable(Configuration.of(knobs), job)
    assert words in phrase
    # Other layers could, so for planning and recorded tables it is a configuration like any other.
    many = {"data_parallel": 2 if "sharding" in knobs else 1, **knobs}
    assert not any(
        "built-in" in phrase for phrase in broken_rules(Configuration.of(many), job, H100)
    )


def test_limits_of_the_program_that_need_no_job():
    (phrase,) = unrunnable(Configuration.of(compilation="full", expert_parallel=2))
    assert "compilation full with expert_parallel" in phrase
    # Without a job nothing is said of its model or precision.
    interleaved = {"pipeline_parallel": 2, "pipeline_schedule": "interleaved", "zero_stage": 0}
    assert unrunnable(Configuration.of(interleaved)) == []


def test_the_catalogue_names_what_exists():
    named = {name for case, _ in _LIMITS for name in case.names}
    assert named <= {*KNOBS, "job_precision"}
    assert set(_COMPUTED) == {
        name for name, table in catalogue("knobs")["rules"].items() if "reads" in table
    }
    for knob in KNOBS.values():
        assert knob.choices or knob.minimum
        assert (knob.kind == "live") == bool(knob.device)


@pytest.mark.parametrize(
    ("job", "knobs"),
    [
        (TINY, {"data_parallel": 2, "zero_stage": 3, "optimizer_offload": "cpu", "clock_MHz": 900}),
        (TINY, {"tensor_parallel": 2, "data_parallel": 4, "activation_checkpointing": "every_2"}),
        (TINY, {"zero_stage": 3, "parameter_offload": "cpu", "sequence_parallel": 4}),
        (TINY, {"optimizer_offload": "async", "activation_offload": "async", "zero_stage": 3}),
        (OLMOE, {"pipeline_parallel": 2, "data_parallel": 2, "expert_parallel": 2}),
        (OLMOE, {"data_parallel": 4, "sharding": "fsdp2", "hsdp_replicas": 2}),
    ],
)
def test_what_is_run_is_not_refused(job, knobs):
    assert unrunnable(Configuration.of(knobs), job) == []
    assert unrunnable(Configuration.of(knobs)) == []


def test_a_deepspeed_key_is_not_varied_where_deepspeed_does_not_shard():
    knob = Knob("bucket", (1, 2), how="deepspeed:zero_optimization.reduce_bucket_size")
    job = replace(TINY, knobs=(knob,))
    asked = {"data_parallel": 2, "sharding": "fsdp2"}
    (phrase,) = unrunnable(Configuration(Settings(asked, bucket=2)), job)
    assert "bucket" in phrase
    assert unrunnable(Configuration(Settings(asked)), job) == []
    assert unrunnable(Configuration(Settings(data_parallel=2, bucket=2)), job) == []


def test_a_tables_own_knob_is_none_of_the_programs():
    assert "not a knob" in unrunnable(Configuration(Settings(batch_size=3)))[0]
