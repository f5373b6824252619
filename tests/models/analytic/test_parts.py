"""The analytic models' parts: collectives, stages, constants, memory, power, and their sum."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuner.models.analytic.compute import activation_bytes_per_token
from tuner.models.analytic.constants import (
    balanced,
    constants_of,
    cut,
    end_weights,
    load_constants,
    read_layout,
)
from tuner.models.analytic.model import AnalyticModel, PowerModel, Program
from tuner.models.analytic.step import (
    Link,
    all_gather_s,
    all_reduce_s,
    link_of,
    step_parts,
    transfer_s,
)
from tuner.search_spaces.cluster import cluster_names, device_names, load_cluster, load_device
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.search_spaces.job import TrainingJob, job_names, load_job
from tuner.search_spaces.model_facts import ModelFacts, facts_of

CLUSTER = load_cluster("gh200-32")
JOB = load_job("opt-350m")
MOE = load_job("olmoe-1b-7b")


def model(job: Any = JOB, cluster: Any = CLUSTER, **more: Any) -> AnalyticModel:
    return AnalyticModel(job, cluster, **more)


def one(array: np.ndarray) -> float:
    return float(array[0])


# Collectives.


def test_an_all_reduce_is_a_reduce_scatter_and_a_gather() -> None:
    link = Link(np.array([1e9]), np.array([0.0]))
    size, ranks = np.array([4e9]), np.array([4.0])
    assert one(all_gather_s(size, ranks, link)) == pytest.approx(3.0)  # (n-1)/n S/B
    assert one(all_reduce_s(size, ranks, link)) == pytest.approx(6.0)
    assert one(all_gather_s(size, np.array([1.0]), link)) == 0.0
    slow = Link(np.array([1e9]), np.array([0.5]))
    assert one(all_gather_s(size, ranks, slow)) == pytest.approx(4.5)  # and n-1 rounds
    assert one(transfer_s(size, slow)) == pytest.approx(4.5)


def test_a_group_that_leaves_the_node_takes_the_network_and_all_its_rails() -> None:
    constants = constants_of(CLUSTER.device)
    spans = np.array([4.0, 8.0])
    inside, between = link_of(CLUSTER, constants, spans, members=4.0).Bps
    assert inside == pytest.approx(constants.link_efficiency * CLUSTER.link_Bps)
    assert between == pytest.approx(constants.network_efficiency * CLUSTER.network_Bps)
    four = link_of(CLUSTER, constants, spans, rails=np.array([4.0, 4.0])).Bps[1]
    assert four == pytest.approx(min(4 * between, inside))  # never faster than inside a node


# Stages.


@pytest.mark.parametrize(("layers", "stages"), [(24, 1), (24, 2), (24, 4), (24, 24), (7, 3)])
def test_every_block_is_in_one_stage(layers: int, stages: int) -> None:
    kinds = cut(layers, stages)
    assert (kinds.blocks * kinds.count).sum() == layers
    assert kinds.count.sum() == stages
    assert (kinds.heads * kinds.count).sum() == (kinds.embeds * kinds.count).sum() == 1
    each = kinds.each()
    assert each.blocks.sum() == layers
    assert each.heads[-1] == each.embeds[0] == 1


@pytest.mark.parametrize("ends", [(0.0, 0.0), (1.0, 1.0), (4.0, 4.0), (0.0, 4.2), (0.3, 0.3)])
@pytest.mark.parametrize(("layers", "stages"), [(7, 3), (24, 4), (24, 5), (24, 16), (2, 2)])
def test_stages_are_cut_as_deepspeed_cuts_them(
    layers: int, stages: int, ends: tuple[float, float]
) -> None:
    utils = pytest.importorskip("deepspeed.runtime.utils")
    cuts = utils.partition_balanced([ends[0], *[1.0] * layers, ends[1]], stages)
    inside = [min(max(int(each) - 1, 0), layers) for each in cuts]
    expected = [after - before for before, after in pairwise(inside)]
    assert list(cut(layers, stages, ends=ends).each().blocks) == expected


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (7, 3), (24, 5), (24, 24), (61, 60)])
def test_blocks_alone_are_partitioned_as_deepspeed_does(layers: int, stages: int) -> None:
    utils = pytest.importorskip("deepspeed.runtime.utils")
    cuts = utils.partition_balanced([1.0] * layers, stages)
    expected = tuple(after - before for before, after in pairwise(cuts))
    assert balanced(layers, stages, 0.0, 0.0) == expected


def test_the_blocks_of_the_deepest_model_are_partitioned_at_once() -> None:
    assert balanced(10_000, 128, 0.0, 0.0) == (79,) * 16 + (78,) * 112


def test_stages_of_any_ends_are_cut_as_deepspeed_cuts_them() -> None:
    utils = pytest.importorskip("deepspeed.runtime.utils")
    draw = random.Random(1)
    for _ in range(60):
        layers = draw.randint(2, 30)
        stages = draw.randint(2, min(layers, 9))
        ends = [draw.choice([0.0, 1 / 3, 7.0, 1e6, 1e-7, 60 * draw.random()]) for _ in range(2)]
        if ends == [0.0, 0.0]:
            continue
        cuts = utils.partition_balanced([ends[0], *[1.0] * layers, ends[1]], stages)
        inside = [min(max(int(each) - 1, 0), layers) for each in cuts]
        expected = tuple(after - before for before, after in pairwise(inside))
        assert balanced(layers, stages, *ends) == expected, (layers, stages, ends)


@pytest.mark.parametrize("ends", [(1.0, 1.0), (300.0, 300.0), (1e8, 1e8), (0.0, 7e3)])
def test_the_deepest_model_with_ends_is_partitioned_in_two_seconds(
    ends: tuple[float, float],
) -> None:
    """Comparing every begin with every end takes minutes; the limit of a test's CPU holds it."""
    inner = balanced(10_000, 128, *ends)[1:-1]
    assert max(inner) - min(inner) <= 1


def test_the_head_of_a_large_vocabulary_takes_the_place_of_blocks() -> None:
    """A rule that counts it as one block gives the last of two stages four blocks too many."""
    config = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16}
    config |= {"intermediate_size": 8192, "vocab_size": 131072, "model_type": "llama"}
    facts = ModelFacts.from_config(config)
    flops = end_weights("flops", facts)
    assert flops[0] == 0.0
    assert flops[1] == pytest.approx(131072 * 2048 / (4 * 2048**2 + 3 * 2048 * 8192))
    assert list(cut(24, 2, ends=flops).each().blocks) == [14, 10]
    assert list(cut(24, 2, ends=end_weights("blocks", facts)).each().blocks) == [12, 12]
    by_parameters = cut(24, 2, ends=end_weights("parameters", facts)).each().blocks
    assert list(by_parameters) == [12, 12]  # the table of the first stage weighs as much


def test_recomputing_a_block_costs_the_host_more_than_its_operators() -> None:
    model = AnalyticModel(JOB, CLUSTER)
    constants = model.constants
    layers = model.facts.layers
    for compiled in ("none", "regional"):
        without, every_other, full = (
            float(
                step_parts(
                    model.setup,
                    read_layout(
                        [Configuration.of(compilation=compiled, activation_checkpointing=mode)],
                        JOB.global_batch,
                    ).launches,
                    cut(layers, 1),
                ).dispatch[0, 0]
            )
            for mode in ("none", "every_2", "full")
        )
        assert full - every_other == pytest.approx(every_other - without)
        own = constants.recompute_operators * constants.operator_s * layers
        assert full - without > own > 0  # compiled blocks are checkpointed by the same code


def test_an_expert_that_every_token_visits_is_kept_beside_the_others() -> None:
    config = {"model_type": "qwen2_moe", "hidden_size": 64, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101}
    config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config |= {"intermediate_size": 96}
    kept = []
    for width in (80, 40):
        model = {**config, "shared_expert_intermediate_size": width}
        job = TrainingJob("moe", model, sequence_length=128, global_batch=8, steps=1)
        setup = AnalyticModel(job, CLUSTER).setup
        kept.append(float(activation_bytes_per_token(setup, np.array([1.0]))[0]))
    # Gate, up, the activated gate and their product, in 16 bits; no router's copies.
    assert kept[0] - kept[1] == 4 * 40 * 2


def test_a_partition_that_does_not_fit_the_model_is_refused() -> None:
    assert list(cut(24, 4, (4, 7, 7, 6)).each().blocks) == [4, 7, 7, 6]
    with pytest.raises(InputError, match="24 layers"):
        cut(24, 4, (4, 7, 7, 7))


# Constants are data.


def test_every_shipped_device_has_constants_with_sources() -> None:
    for name in device_names():
        constants = constants_of(load_device(name))
        assert constants.sources
        assert 0 < constants.matrix_efficiency <= 1


def test_a_user_adds_a_gpu_by_adding_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('like = "cuda"\nmatrix_efficiency = 0.5\n')
    mine, cuda = load_constants(tmp_path / "mine.toml"), load_constants("cuda")
    assert mine.matrix_efficiency == 0.5
    assert mine.link_efficiency == cuda.link_efficiency
    (tmp_path / "wrong.toml").write_text('like = "cuda"\nmatrix_eficiency = 0.5\n')
    with pytest.raises(UnknownName, match="matrix_eficiency"):
        load_constants(tmp_path / "wrong.toml")
    (tmp_path / "little.toml").write_text("matrix_efficiency = 0.5\n")
    with pytest.raises(InputError, match="lack attention_efficiency"):
        load_constants(tmp_path / "little.toml")
    (tmp_path / "bad.toml").write_text('like = "cuda"\nlink_W = -1.0\n')
    with pytest.raises(InvalidValue, match="link_W"):
        load_constants(tmp_path / "bad.toml")


# Layout.


def test_launches_are_read_once_and_lives_apart() -> None:
    launch = Configuration.of(data_parallel=2, micro_batch=4).launch
    lives = [Settings(clock_MHz=1200), Settings(), Settings(clock_MHz=(1200, 1410))]
    layout = read_layout([Configuration(launch, live) for live in lives], 32)
    assert len(layout.launches) == 1
    assert layout.launches.m[0] == 4
    assert layout.clock_MHz[0] == 1200
    assert np.isnan(layout.clock_MHz[1:]).all()
    assert layout.stage_clocks_MHz == {2: (1200, 1410)}
    with pytest.raises(InvalidValue, match="data_parallel"):
        read_layout([Configuration(Settings(data_parallel="two"))], 32)


# The step.


def test_the_breakdown_sums_to_the_prediction() -> None:
    for name, cluster in (("opt-350m", "gh200-32"), ("qwen2.5-7b", "jupiter-32")):
        here = model(load_job(name), load_cluster(cluster))
        for knobs in (
            {"data_parallel": 8, "micro_batch": 2},
            {"data_parallel": 4, "pipeline_parallel": 4, "tensor_parallel": 2},
            {"data_parallel": 8, "zero_stage": 3, "optimizer_offload": "async"},
            {"data_parallel": 8, "zero_stage": 1, "optimizer_offload": "cpu", "micro_batch": 2},
            {"data_parallel": 4, "sequence_parallel": 2, "activation_offload": "sync"},
        ):
            configuration = Configuration.of(knobs)
            said, parts = here.predict([configuration]), here.breakdown(configuration)
            assert parts.step_time_s == pytest.approx(one(said.step_time_s))
            assert parts.power_W == pytest.approx(one(said.power_W))
            assert sum(parts.time_s.values()) == pytest.approx(parts.step_time_s, rel=1e-3)
            assert sum(parts.joules.values()) == pytest.approx(parts.energy_J)
            assert sum(parts.memory.values()) == pytest.approx(one(said.memory_bytes))
            assert parts.host_memory_bytes == pytest.approx(one(said.host_memory_bytes))


def test_zero_traffic_grows_with_accumulation_only_where_it_must() -> None:
    """Stages 0 and 1 reduce once a step; 2 every micro-batch; 3 gathers twice besides."""
    here = model(load_job("qwen2.5-7b"), load_cluster("h100-32"))

    def traffic(stage: int, micro_batch: int) -> float:
        knobs = {"data_parallel": 16, "zero_stage": stage, "micro_batch": micro_batch}
        from tuner.models.analytic.step import step_parts

        layout = read_layout([Configuration.of(knobs)], 128)
        parts = step_parts(here.setup, layout.launches, cut(here.facts.layers, 1))
        return float(parts.sync[0, 0])

    assert traffic(1, 1) == pytest.approx(traffic(1, 8))
    assert traffic(2, 1) == pytest.approx(traffic(2, 8) * 9 / 2, rel=1e-3)
    assert traffic(3, 1) == pytest.approx(traffic(3, 8) * 8, rel=1e-3)


def test_only_arithmetic_feels_the_clock() -> None:
    """Halving the clock at most doubles a step, and leaves the collectives as they are."""
    here = model()
    knobs = {"data_parallel": 4, "tensor_parallel": 4, "micro_batch": 4}
    full = here.breakdown(Configuration.of(knobs, clock_MHz=1980))
    half = here.breakdown(Configuration.of(knobs, clock_MHz=990))
    assert full.step_time_s < half.step_time_s < 2 * full.step_time_s
    assert half.time_s["arithmetic"] == pytest.approx(2 * full.time_s["arithmetic"])
    assert half.time_s["tensor-parallel links"] == full.time_s["tensor-parallel links"]


def test_a_clock_for_every_stage_is_the_clock_for_all() -> None:
    here = model()
    knobs = {"data_parallel": 4, "pipeline_parallel": 4, "micro_batch": 4}
    same, each = here.predict(
        [
            Configuration.of(knobs, clock_MHz=1200),
            Configuration.of(knobs, clock_MHz=(1200, 1200, 1200, 1200)),
        ]
    ).step_time_s
    assert same == pytest.approx(each)


def test_slowing_a_stage_that_waits_saves_energy_at_no_time() -> None:
    """The head makes the last stage the slowest: the others' slack is free."""
    here = model(load_job("qwen2.5-7b"), load_cluster("h100-32"))
    knobs = {"data_parallel": 8, "pipeline_parallel": 4, "micro_batch": 1}
    parts = here.breakdown(Configuration.of(knobs, clock_MHz=1980))
    said = here.predict(
        [
            Configuration.of(knobs, clock_MHz=1980),
            Configuration.of(knobs, clock_MHz=(1800, 1980, 1980, 1980)),
        ]
    )
    assert said.power_W[1] < said.power_W[0]
    # The first stage warms the pipeline up, so at most its own slots' slowdown shows.
    assert said.step_time_s[1] < 1.01 * parts.step_time_s


def test_spreading_experts_saves_memory_and_dispatch() -> None:
    here = model(MOE)
    said = here.predict(
        [Configuration.of(data_parallel=8, zero_stage=1, expert_parallel=e) for e in (1, 4)]
    )
    assert said.memory_bytes[1] < said.memory_bytes[0]
    facts = facts_of(MOE)
    assert 0 < facts.expert_parameters < facts.block_parameters < facts.parameters


def test_without_a_switch_a_group_uses_the_links_between_its_members() -> None:
    constants = constants_of(CLUSTER.device)
    mesh = replace(CLUSTER, devices_per_node=4, link_Bps=450e9, link_mesh=True)
    span = np.array([2.0, 3.0, 4.0])
    inside = constants.link_efficiency * np.array([150e9, 300e9, 450e9])
    assert link_of(mesh, constants, span, members=span).Bps == pytest.approx(inside)
    switched = replace(mesh, link_mesh=False)
    assert link_of(switched, constants, span, members=span).Bps == pytest.approx([inside[2]] * 3)


def test_a_program_without_dropout_or_logits_keeps_less() -> None:
    job = load_job("opt-350m")
    # On one stage in fp32: 4 bytes of 16 scores and query, key, value, input, norms' and MLP's
    # values (24 h bytes with ReLU on one rank of four: see Sailor's counts in published_runs.md).
    job = replace(job, precision="fp32")
    said = {
        dropout: model(
            job, program=Program(fused_attention=False, dropout=dropout, logits=False)
        ).memory_bytes([Configuration.of(data_parallel=2, tensor_parallel=4)])[0]
        for dropout in ("none", "hidden", "all")
    }
    facts, s = facts_of(job), job.sequence_length
    # A block's masks, and its scores once more with a mask; half of a block is in use beside.
    blocks = 1.05 * (facts.layers + 0.5)
    assert said["hidden"] - said["none"] == pytest.approx(blocks * s * 2 * facts.hidden)
    scores = s * s * facts.heads / 4
    assert said["all"] - said["hidden"] == pytest.approx(blocks * scores * 5)
    with_logits = model(job, program=Program(fused_attention=False)).memory_bytes(
        [Configuration.of(data_parallel=2, tensor_parallel=4)]
    )[0]
    assert with_logits > said["all"]


def test_stored_attention_scores_cost_memory_and_time() -> None:
    configuration = [Configuration.of(data_parallel=4, micro_batch=4)]
    fused, stored = (
        model(program=Program(fused_attention=f)).predict(configuration) for f in (True, False)
    )
    assert one(stored.memory_bytes) > one(fused.memory_bytes)
    assert one(stored.step_time_s) > one(fused.step_time_s)


def test_offload_moves_states_from_device_to_host() -> None:
    here = model(load_job("qwen2.5-7b"))
    knobs = {"data_parallel": 8, "zero_stage": 2}
    said = here.predict([Configuration.of(knobs), Configuration.of(knobs, optimizer_offload="cpu")])
    freed = said.memory_bytes[0] - said.memory_bytes[1]
    # 12 bytes of states and 2 of gradient a parameter over eight ranks leave the device.
    assert freed == pytest.approx(14 * facts_of(here.job).parameters / 8)
    assert said.host_memory_bytes[0] == 0
    # The host of four ranks has fp32 gradients, a 16-bit buffer, and the sum of micro-batches.
    each = 4 * facts_of(here.job).parameters / 8
    assert said.host_memory_bytes[1] == pytest.approx((12 + 4 + 2 + 2) * each)
    whole = {**knobs, "micro_batch": here.job.global_batch // 8, "optimizer_offload": "cpu"}
    said = here.predict([Configuration.of(whole), Configuration.of(whole, zero_stage=3)])
    assert said.host_memory_bytes == pytest.approx((12 + 4 + 2) * each)
    drive = here.predict([Configuration.of(whole, zero_stage=3, optimizer_offload="nvme")])
    assert drive.host_memory_bytes == pytest.approx(2 * each)
    pure = model(replace(here.job, program=Program(pure_bf16=True)))
    said = pure.predict([Configuration.of(whole)])
    assert said.host_memory_bytes == pytest.approx((2 + 4 + 2 + 2) * each)
    # Stage 1 keeps its gradients, whole, until the step.
    knobs["zero_stage"] = 1
    said = here.predict([Configuration.of(knobs), Configuration.of(knobs, optimizer_offload="cpu")])
    freed = said.memory_bytes[0] - said.memory_bytes[1]
    assert freed == pytest.approx(12 * facts_of(here.job).parameters / 8)


# Power.


def test_a_limit_lowers_the_clock_until_the_power_fits() -> None:
    cluster, limits = load_cluster("a100-8"), (150, 250, 400)
    bare = replace(cluster, host_W=0.0, supply_loss=0.0)
    asked = [Configuration.of(data_parallel=8, micro_batch=8, power_limit_W=w) for w in limits]
    figures = model(JOB, bare).predict(asked)
    free = model(JOB, bare).predict([Configuration.of(data_parallel=8, micro_batch=8)])
    assert figures.clock_MHz[0] < figures.clock_MHz[1] < figures.clock_MHz[2] == free.clock_MHz[0]
    assert figures.power_W[:2] == pytest.approx([8 * 150, 8 * 250], rel=0.1)
    assert figures.power_W[2] == free.power_W[0]


def test_the_voltage_is_flat_below_the_knee() -> None:
    device = load_device("A100-SXM-80GB")
    constants = constants_of(device)
    power = PowerModel(device, constants)
    low = power.voltage(np.array([0.1, constants.voltage_knee, 1.0]))
    assert low[0] == low[1] == constants.lowest_voltage
    assert low[2] == 1.0


def test_supply_and_host_are_charged_where_a_cluster_states_them() -> None:
    job, jupiter = load_job("qwen2.5-7b"), load_cluster("jupiter-32")
    bare = replace(jupiter, host_W=0.0, supply_loss=0.0)
    configuration = [Configuration.of(data_parallel=8, zero_stage=1)]
    gpus = one(model(job, bare).predict(configuration).power_W)
    module = one(model(job, jupiter).predict(configuration).power_W)
    assert module == pytest.approx(gpus * (1 + jupiter.supply_loss) + 2 * jupiter.host_W)


# Everything that ships can be predicted.


@pytest.mark.parametrize("cluster", cluster_names())
def test_every_job_is_predicted_on_every_cluster(cluster: str) -> None:
    here = load_cluster(cluster)
    configurations = [
        Configuration.of(data_parallel=d, zero_stage=z, activation_checkpointing=a)
        for d in (1, 2)
        for z in range(4)
        for a in ("none", "full")
    ]
    for name in job_names():
        said = model(load_job(name), here).predict(configurations)
        for values in (said.step_time_s, said.power_W, said.memory_bytes):
            assert np.isfinite(values).all()
            assert (values > 0).all()


@pytest.mark.parametrize("some", ["every_2", "selective"])
def test_recomputing_a_part_lies_between_all_and_none(some: str) -> None:
    here = model(load_job("qwen2.5-7b"))
    launches = [
        Settings(data_parallel=8, zero_stage=1, activation_checkpointing=mode)
        for mode in ("none", some, "full")
    ]
    said = here.predict([Configuration(launch) for launch in launches])
    assert (np.diff(said.step_time_s) > 0).all()
    assert (np.diff(said.memory_bytes) < 0).all()


def test_selective_checkpointing_repeats_no_product() -> None:
    here = model(load_job("qwen2.5-7b"))
    none, some = (
        here.breakdown(Configuration.of(data_parallel=8, activation_checkpointing=mode)).time_s
        for mode in ("none", "selective")
    )
    assert some["arithmetic"] == pytest.approx(none["arithmetic"])
    assert some["memory traffic"] > none["memory traffic"]


def test_parameters_on_the_host_free_memory_and_cost_traffic() -> None:
    here = model(load_job("qwen2.5-7b"))
    knobs = {"data_parallel": 8, "zero_stage": 3}
    on_device, on_host = (
        Configuration(Settings(knobs, **more)) for more in ({}, {"parameter_offload": "cpu"})
    )
    said = here.predict([on_device, on_host])
    assert said.memory_bytes[0] - said.memory_bytes[1] == pytest.approx(
        2 * facts_of(here.job).parameters / 8
    )
    assert said.step_time_s[1] > said.step_time_s[0]
