"""Sharding in the analytic models: FSDP2, HSDP, ZeRO++'s second copy, and LoRA's frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel, Breakdown
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import LoRA, TrainingJob, load_job
from tuner.search_spaces.model_facts import facts_of

JOB = load_job("qwen2.5-7b")
PARAMETERS, HEAD = facts_of(JOB).parameters, facts_of(JOB).head_parameters
ADAPTED = replace(JOB, lora=LoRA(16))
ADAPTERS = facts_of(ADAPTED).trainable_parameters
NODE, NODES = load_cluster("a100-8"), load_cluster("h100-32")


def silent(cluster: Cluster, **more: float) -> dict[str, Any]:
    """Return the model's constants where nothing hides and rounds take no time."""
    quiet = {"gather_overlap": 0.0, "link_latency_s": 0.0, "network_latency_s": 0.0}
    return {"constants": replace(constants_of(cluster.device), **quiet, **more)}


def broken_down(
    job: TrainingJob = JOB, cluster: Cluster = NODE, given: Any = None, **knobs: Any
) -> Breakdown:
    """Break a step on 8 ranks down, or on others; `given` are options of the model."""
    model = AnalyticModel(job, cluster, **(given or {}))
    return model.breakdown(Configuration.of({"data_parallel": 8, **knobs}))


def collectives_s(*where: Any, **knobs: Any) -> float:
    return broken_down(*where, **knobs).time_s["gradients and ZeRO"]


def volume_of(job: TrainingJob, **more: float) -> Callable[..., float]:
    """Return a function of micro-batches and knobs: the bytes that a rank sends in a step."""
    given = silent(NODE, **more)
    rate_Bps = given["constants"].reduce_efficiency * NODE.link_Bps

    def volume(micro_batches: int, **knobs: Any) -> float:
        sized = replace(job, global_batch=8 * micro_batches)
        return collectives_s(sized, NODE, given, **knobs) * rate_Bps

    return volume


# ---- FSDP2


def test_states_are_fp32_on_the_shard_of_a_group() -> None:
    for groups in (1, 2):
        knobs = {"sharding": "fsdp2", "hsdp_replicas": groups}
        memory = broken_down(**knobs, activation_checkpointing="full").memory
        shard = PARAMETERS * groups / 8
        assert memory["parameters"] == memory["gradients"] == 4 * shard
        assert memory["optimizer"] == 8 * shard


@pytest.mark.parametrize(
    ("job", "sharding", "bytes_"),
    [
        # Many tokens peak at the loss. There the output projection is gathered, in 16 bits, and of
        # the blocks none is.
        pytest.param(JOB, "fsdp2", 2 * HEAD, id="many tokens"),
        pytest.param(JOB, "fsdp2_no_reshard", 2 * PARAMETERS, id="kept"),
        # Few peak in a block: gathered, and the next one; gradients, and the last block's on their
        # way in fp32.
        pytest.param(
            replace(JOB, sequence_length=64),
            "fsdp2",
            (2 + 2 + 2 + 4) * facts_of(JOB).block_parameters / facts_of(JOB).layers,
            id="few tokens",
        ),
    ],
)
def test_what_is_gathered_at_the_peak(job: TrainingJob, sharding: str, bytes_: float) -> None:
    memory = broken_down(job, sharding=sharding, activation_checkpointing="full").memory
    assert memory["communication"] == pytest.approx(bytes_)


def test_the_volume_of_a_step() -> None:
    volume = volume_of(JOB)
    # Of n ranks each sends (n - 1) / n: 2 bytes a parameter to gather, 4 to reduce, and 2 to
    # gather again for the backward pass, but for the projection, which is not freed.
    kept, freed = 6 * PARAMETERS, 6 * PARAMETERS + 2 * (PARAMETERS - HEAD)
    assert volume(1, sharding="fsdp2_no_reshard") == pytest.approx(7 / 8 * kept)
    assert volume(3, sharding="fsdp2") == pytest.approx(3 * 7 / 8 * freed)
    # Two groups of 4: an all-reduce of each rank's quarter of the gradients, once a step.
    groups = volume(3, sharding="fsdp2", hsdp_replicas=2)
    assert groups == pytest.approx(3 * 3 / 4 * freed + 2 * 1 / 2 * 4 * PARAMETERS / 4)


def test_groups_within_nodes_gather_faster_across_slow_networks() -> None:
    slow = replace(NODES, network_Bps=NODES.network_Bps / 50)
    many = {"data_parallel": 32, "sharding": "fsdp2", "micro_batch": 1}
    many |= {"activation_checkpointing": "full"}
    groups = collectives_s(JOB, slow, **many, hsdp_replicas=32 // slow.devices_per_node)
    assert groups < collectives_s(JOB, slow, **many)


# ---- LoRA: memory, arithmetic and volume are those of what is trained


@pytest.mark.parametrize(
    ("knobs", "parameters", "gradients", "optimizer"),
    [
        ({"zero_stage": 0}, 2 * PARAMETERS + 2 * ADAPTERS, 2 * ADAPTERS, 12 * ADAPTERS),
        ({"zero_stage": 1}, 2 * PARAMETERS + 2 * ADAPTERS, 2 * ADAPTERS, 12 * ADAPTERS / 8),
        ({"zero_stage": 2}, 2 * PARAMETERS + 2 * ADAPTERS, 2 * ADAPTERS / 8, 12 * ADAPTERS / 8),
        (
            {"zero_stage": 3},
            (2 * PARAMETERS + 2 * ADAPTERS) / 8,
            2 * ADAPTERS / 8,
            12 * ADAPTERS / 8,
        ),
        (
            {"sharding": "fsdp2"},
            (2 * PARAMETERS + 4 * ADAPTERS) / 8,
            4 * ADAPTERS / 8,
            8 * ADAPTERS / 8,
        ),
    ],
)
def test_only_adapters_have_gradients_and_states(
    knobs: dict[str, Any], parameters: float, gradients: float, optimizer: float
) -> None:
    memory = broken_down(ADAPTED, **knobs).memory
    assert memory["parameters"] == pytest.approx(parameters)
    assert memory["gradients"] == pytest.approx(gradients)
    assert memory["optimizer"] == pytest.approx(optimizer)


def test_a_frozen_product_keeps_no_input() -> None:
    attention, every, whole = (
        broken_down(job, zero_stage=3).memory["activations"]
        for job in (ADAPTED, replace(JOB, lora=LoRA(16, "all-linear")), JOB)
    )
    assert attention < every < whole


def test_frozen_weights_are_gathered_and_never_reduced() -> None:
    volume = volume_of(ADAPTED, reduce_overlap=0.0)
    # Gradients are reduced and shared again, once a step; frozen weights never move.
    assert volume(3, zero_stage=0) == pytest.approx(7 / 8 * 2 * 2 * ADAPTERS)
    assert volume(3, zero_stage=2) == pytest.approx(7 / 8 * (3 + 1) * 2 * ADAPTERS)
    # Sharded, they are gathered for the forward pass and, but for what stays, the backward pass.
    every = PARAMETERS + ADAPTERS
    third = 2 * (every + every - 1e9) + 2 * ADAPTERS
    assert volume(3, zero_stage=3) == pytest.approx(3 * 7 / 8 * third)
    by_torch = 2 * every + 2 * (every - HEAD) + 4 * ADAPTERS
    assert volume(3, sharding="fsdp2") == pytest.approx(3 * 7 / 8 * by_torch)


@pytest.mark.parametrize(
    ("checkpointing", "least", "most"), [("none", 2 / 3, 0.85), ("full", 3 / 4, 0.9)]
)
def test_a_step_is_shorter_by_the_gradients_of_frozen_weights(
    checkpointing: str, least: float, most: float
) -> None:
    """Two passes of three over the products, or three of four; attention and traffic stay."""
    adapted_s, whole_s = (
        broken_down(job, zero_stage=3, activation_checkpointing=checkpointing).time_s["arithmetic"]
        for job in (ADAPTED, JOB)
    )
    assert least < adapted_s / whole_s < most


# ---- ZeRO++'s second copy of the parameters

NEAR = {"zero_hpz_partition_size": 8}
BATCH = replace(JOB, global_batch=128)
STAGE_3 = {"data_parallel": 32, "zero_stage": 3}
SILENT = silent(NODES, reduce_over_network=1.0)


def test_each_device_of_a_node_keeps_a_share_of_the_second_copy() -> None:
    with_copy, without = (
        broken_down(BATCH, NODES, SILENT, **STAGE_3, **copy).memory["parameters"]
        for copy in (NEAR, {})
    )
    assert with_copy - without == pytest.approx(2 * PARAMETERS / 8)


def test_only_the_first_gather_of_a_step_leaves_the_node() -> None:
    def spared_s(micro_batches: int) -> float:
        where = replace(JOB, global_batch=32 * micro_batches), NODES, SILENT
        far, near = (collectives_s(*where, **STAGE_3, micro_batch=1, **copy) for copy in ({}, NEAR))
        return far - near

    one, two, four = map(spared_s, (1, 2, 4))
    # Each micro-batch gathers once and somewhat more: what is not freed is not gathered again.
    each = two - one
    assert four - two == pytest.approx(2 * each)
    assert 0 < one < each


def test_a_slow_network_makes_it_worth_its_memory() -> None:
    """Rails of 400 Gbit/s for each device leave little to spare; a tenth of them, much."""
    slow = replace(NODES, network_Bps=NODES.network_Bps / 10)
    far_s, near_s = (
        collectives_s(BATCH, slow, **STAGE_3, micro_batch=1, **copy) for copy in ({}, NEAR)
    )
    assert near_s < 0.6 * far_s


def test_within_one_node_nothing_is_spared_by_a_copy_of_the_node() -> None:
    far_s, near_s = (collectives_s(BATCH, zero_stage=3, **copy) for copy in ({}, NEAR))
    assert near_s == pytest.approx(far_s)
