"""Every validity rule, on both sides of its border."""

from dataclasses import replace
from typing import Any

import pytest

from tuner.search_spaces.cluster import Cluster, Device, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.job import LoRA, Program, TrainingJob, load_job
from tuner.search_spaces.knob_declarations import Knob
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.rules import (
    _COMPUTED,
    _LIMITS,
    RULES,
    broken_rules,
    unrunnable,
    why_it_cannot_run,
)

H100 = load_cluster("h100-32")
CORE = Device("core", "cpu", 4 << 30, 5e10, 1e10, 2.0, 8.0)
QWEN = load_job("qwen2.5-7b")  # 28 heads, 4 key-value heads, 28 layers, global batch 128
OLMOE = load_job("olmoe-1b-7b")  # 16 heads, 64 experts
QWEN_LORA = replace(QWEN, lora=LoRA(16))
QWEN_FP16 = replace(QWEN, precision="fp16")
QWEN_8_BIT = replace(QWEN, program=Program(optimizer="adamw_8bit"))
TINY = load_job("tiny-gpt")  # global batch 8
TINY_FP16 = replace(TINY, precision="fp16")
TINY_BF16 = replace(TINY, precision="bf16")
TINY_OF_TWO = replace(TINY, steps_at={8: TINY.steps, 16: 150})
OPT = load_job("opt-350m")  # 2048 positions
DRIVE = replace(H100, nvme_path="/nvme")
CLOCKED_CORE = replace(CORE, clocks_MHz=(1500, 2500), min_limit_W=4.0)
CLOCKED = Cluster("this-machine", CLOCKED_CORE, 2, clock_control=True)


def machine(cores: int) -> Cluster:
    return Cluster("this-machine", CORE, cores)


def case(
    rule: str, job: TrainingJob, cluster: Cluster, bad: str, good: str, /, **other: Any
) -> tuple[str, tuple[Any, ...], tuple[Any, ...]]:
    """Return a rule, what breaks it and what does not (with `other` as its job and cluster)."""
    return rule, (job, cluster, bad), (other.get("job", job), other.get("cluster", cluster), good)


CASES = [
    case("lora_degrees", replace(TINY, lora=LoRA(4)), machine(4), "tp2", "sp2 zero1"),
    case("lora_precision", QWEN_LORA, H100, "fp8-tensorwise", "fp8-tensorwise", job=QWEN),
    # more ranks than heads
    case(
        "sequence_chunks",
        replace(TINY, sequence_length=62),
        machine(2),
        "sp2 seq-all_gather",
        "sp16 seq-all_gather",
        job=TINY,
        cluster=machine(16),
    ),
    case("fp8_device", QWEN, load_cluster("a100-8"), "fp8-rowwise", "fp8-rowwise", cluster=H100),
    # a Hopper has no scales for blocks
    case("fp8_device", QWEN, H100, "fp8-mx", "fp8-mx", cluster=load_cluster("b200-8")),
    case("fp8_device", TINY_BF16, machine(2), "fp8-tensorwise", "", job=TINY),
    case("fp8_precision", QWEN_FP16, H100, "fp8-tensorwise", "fp8-tensorwise", job=QWEN),
    case(
        "fp8_sides", replace(QWEN, sequence_length=24), H100, "fp8-tensorwise", "mb2 fp8-tensorwise"
    ),
    case("schedule_pipeline", TINY, machine(4), "pipe-zero_bubble", "pp2 pipe-zero_bubble"),
    case("schedule_virtual_stages", TINY, machine(4), "pp2 vs2", "pp2 pipe-interleaved vs2"),
    case("virtual_layers", QWEN, H100, "pp8 pipe-interleaved vs4", "pp4 pipe-interleaved vs4"),
    # 5 micro-batches are not 2 rounds
    case(
        "schedule_rounds",
        replace(QWEN, global_batch=5),
        H100,
        "pp2 pipe-zero_bubble",
        "pp2 pipe-zero_bubble",
        job=replace(QWEN, global_batch=6),
    ),
    case("precision", TINY_FP16, machine(2), "", "", job=TINY_BF16),
    case("positions", replace(OPT, sequence_length=4096), H100, "", "", job=OPT),
    case("selective_offload", QWEN, H100, "ckpt-selective act-sync", "ckpt-full act-sync"),
    case("sharding_stage", QWEN, H100, "dp8 zero1 fsdp2", "dp8 fsdp2"),
    case("second_copy", QWEN, H100, "dp32 zero2 hpz8", "dp32 zero3 hpz8"),
    case("second_copy_in_node", QWEN, H100, "dp32 zero3 hpz4", "dp32 zero3 hpz8"),
    case("second_copy_in_node", QWEN, H100, "dp8 zero3 hpz8", "dp16 zero3 hpz8"),
    case("second_copy_in_node", QWEN, H100, "dp16 zero3 hpz8 param-cpu", "dp16 zero3 param-cpu"),
    case("hsdp_sharding", QWEN, H100, "dp8 hsdp2", "dp8 fsdp2 hsdp2"),
    case("hsdp_groups", QWEN, H100, "dp8 fsdp2 hsdp8", "dp8 fsdp2 hsdp4"),
    case("sharding_experts", OLMOE, H100, "dp8 ep2 fsdp2", "dp8 fsdp2"),
    case("sharding_precision", QWEN_FP16, H100, "dp8 fsdp2", "dp8"),
    case("ranks_fit", TINY, machine(1), "dp2", "dp2", cluster=machine(2)),
    case("whole_nodes", replace(QWEN, global_batch=120), H100, "dp12", "dp24"),
    case("global_batch", TINY, machine(2), "dp2 mb8", "dp2 mb4"),
    case("batch_known", TINY, machine(2), "gb16", "gb16", job=TINY_OF_TWO),
    case("nvme_stage", QWEN, DRIVE, "dp2 zero2 optim-nvme", "dp2 zero3 optim-nvme"),
    case("nvme_path", QWEN, H100, "dp2 zero3 param-nvme", "dp2 zero3 param-nvme", cluster=DRIVE),
    case("tensor_in_node", OLMOE, H100, "tp16", "tp8"),
    case("tensor_heads", QWEN, H100, "tp8", "tp4"),
    case("pipeline_layers", QWEN, H100, "pp32", "pp16"),
    case("sequence_heads", QWEN, H100, "sp8", "sp4"),
    # tensor parallelism leaves 7 of the 28 heads to each rank
    case("sequence_heads", QWEN, H100, "tp4 sp2", "tp2 sp2"),
    case("sequence_length", replace(QWEN, sequence_length=4095), H100, "sp2", "sp2", job=QWEN),
    case("experts", QWEN, H100, "dp2 ep2", "dp2 ep2", job=OLMOE),
    # 3 does not divide 64
    case("experts", replace(OLMOE, global_batch=1023), H100, "dp3 ep3", "dp4 ep4", job=OLMOE),
    case("expert_groups", OLMOE, H100, "dp2 ep4", "dp2 sp2 ep4"),
    case("zero_replicas", TINY, machine(2), "zero1", "dp2 zero1"),
    case("zero_replicas", TINY, machine(2), "zero2 optim-cpu", "zero1 optim-cpu"),
    # Ulysses ranks hold full copies, so ZeRO has something to shard
    case("zero_replicas", QWEN, H100, "zero3", "sp2 zero3"),
    case(
        "offloaded_states", QWEN_8_BIT, H100, "dp2 zero1 optim-cpu", "dp2 zero1 optim-cpu", job=QWEN
    ),
    case("zero_pipeline", QWEN, H100, "dp2 pp2 zero2", "dp2 pp2 zero1"),
    case("zero_tensor", QWEN, H100, "dp2 tp2 zero3", "dp2 tp2 zero2"),
    case("zero_experts", OLMOE, H100, "dp2 ep2 zero3", "dp2 ep2 zero2"),
    case("offload_zero", TINY, machine(2), "dp2 optim-cpu", "dp2 zero2 optim-cpu"),
    case(
        "async_device",
        TINY,
        machine(2),
        "dp2 zero3 optim-async",
        "dp2 zero3 optim-async",
        job=QWEN,
        cluster=H100,
    ),
    # one superchip is enough
    case("async_stage", QWEN, H100, "dp2 zero2 optim-async", "zero3 optim-async"),
    case("parameter_stage", TINY, machine(2), "dp2 zero2 param-cpu", "dp2 zero3 param-cpu"),
    # one rank keeps ZeRO 3 where its parameters are offloaded
    case("zero_replicas", TINY, machine(1), "zero3 optim-cpu", "zero3 param-cpu"),
    # 6 layers
    case("checkpointed_blocks", TINY, machine(1), "ckpt-every_8", "ckpt-every_4"),
    case(
        "activation_device",
        TINY,
        machine(1),
        "act-sync",
        "ckpt-full act-async",
        job=QWEN,
        cluster=H100,
    ),
    case("clock_control", TINY, machine(1), "1200MHz", ""),
    # the device offers clocks, the machine does not permit them
    case(
        "clock_control",
        QWEN,
        replace(H100, clock_control=False),
        "1980MHz",
        "1980MHz",
        cluster=H100,
    ),
    case("clock_offered", QWEN, H100, "1201MHz", "1200MHz"),
    case("clock_offered", QWEN, H100, "pp2 1980,2000MHz", "pp2 1980,1950MHz"),
    case("clock_stages", QWEN, H100, "1980,1950MHz", "pp2 1980,1950MHz"),
    case("limit_control", TINY, machine(1), "5W", "500W", job=QWEN, cluster=H100),
    case(
        "memory_clock_control", TINY, machine(1), "mem1593MHz", "mem1593MHz", job=QWEN, cluster=H100
    ),
    case("limit_range", QWEN, H100, "199W", "200W"),
    case("limit_range", QWEN, H100, "701W", "700W"),
    case("limit_stages", QWEN, H100, "pp2 300,400,500W", "pp2 300,400W"),
    case("stages_of_cores", TINY, CLOCKED, "pp2 1500,2500MHz", "pp2 2500MHz"),
    case("stages_of_cores", TINY, CLOCKED, "pp2 2500,2500MHz", "pp2 2500MHz"),
    case("stages_of_cores", TINY, CLOCKED, "pp2 4,5W", "pp2 5W"),
    case("one_limiter", QWEN, H100, "1200MHz 500W", "1200MHz"),
]


@pytest.mark.extra("tuner.search_spaces.model_reading")
@pytest.mark.parametrize(("rule", "bad", "good"), CASES)
def test_rule_refuses_what_it_must_and_nothing_else(rule, bad, good):
    (check,) = [r.broken for r in RULES if r.name == rule]
    job, cluster, knobs = bad
    phrase = check(Configuration.parse(knobs), job, cluster)
    assert phrase
    # On its wrong side this rule alone speaks, so a user reads one reason for one mistake.
    assert broken_rules(Configuration.parse(knobs), job, cluster) == [phrase]
    job, cluster, knobs = good
    assert broken_rules(Configuration.parse(knobs), job, cluster) == []


@pytest.mark.extra("tuner.search_spaces.model_reading")
@pytest.mark.parametrize(("rule", "bad", "good"), CASES)
def test_what_runs_today_may_be_what_no_search_would_try(rule, bad, good):
    job, cluster, knobs = bad
    runs = rule in ("zero_replicas", "tensor_in_node", "second_copy_in_node")
    assert bool(why_it_cannot_run(Configuration.parse(knobs), job, cluster)) is not runs


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
            asked = Configuration.parse(knobs)
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
        (TINY, "tp2 pp2", "aborts inside a pipeline"),
        (TINY, "tp2 sp2", "tensor_parallel with sequence"),
        (TINY, "tp2 fsdp2", "fsdp2 with tensor_parallel"),
        (TINY, "tp2 ckpt-selective", "in place"),
        (TINY, "pp2 sp2", "take whole sequences"),
        (OLMOE, "tp2", "llama, llava_onevision, opt, qwen2 only, not olmoe"),
        (OLMOE, "sp2 ep2", "MoE layer fails"),
        (TINY, "pp2 pipe-zero_bubble zero1", "at zero_stage 0 only"),
        (TINY, "pp2 pipe-zero_bubble ckpt-full", "without activation_checkpointing only"),
        (TINY_FP16, "pp2 pipe-interleaved vs2", "it scales no loss"),
        (OLMOE, "pp2 pipe-zero_bubble", "llama, opt, qwen2 only, not olmoe"),
        (TINY, "pp2 compile-full", "regional compiles its blocks"),
        (OLMOE, "sp2 seq-all_gather", "llama, opt, qwen2 only, not olmoe"),
        (TINY, "sp2 seq-all_gather compile-full", "without compilation only"),
        (TINY, "fsdp2 compile-regional", "with sharding fsdp2"),
        (OLMOE, "compile-regional", "dense models of type llama, opt, qwen2 only"),
        (TINY, "act-sync compile-regional", "where torch's hooks do not see them"),
        (replace(TINY, model={**TINY.model, "model_type": "gpt2"}), "pp2", "not gpt2"),
    ],
)
def test_what_the_built_in_program_cannot_be_given_is_said(job, knobs, words):
    (phrase,) = unrunnable(Configuration.parse(knobs), job)
    assert words in phrase
    # Other layers could, so for planning and recorded tables it is a configuration like any other.
    many = Configuration.parse(f"{knobs} dp2" if "fsdp2" in knobs else knobs)
    assert not any("built-in" in phrase for phrase in broken_rules(many, job, H100))


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
