"""FSDP2 in the analytic models: its memory, its volume and HSDP's share of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel, Breakdown
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.model_facts import facts_of

JOB = load_job("qwen2.5-7b")
PARAMETERS, HEAD = facts_of(JOB).parameters, facts_of(JOB).head_parameters
NODE, NODES = load_cluster("a100-8"), load_cluster("h100-32")


def broken_down(cluster: Any = NODE, job: Any = JOB, **knobs: Any) -> Breakdown:
    given = {"data_parallel": 8, "activation_checkpointing": "full", **knobs}
    return AnalyticModel(job, cluster).breakdown(Configuration.of(given))


def test_states_are_fp32_on_the_shard_of_a_group() -> None:
    for groups in (1, 2):
        memory = broken_down(sharding="fsdp2", hsdp_replicas=groups).memory
        shard = PARAMETERS * groups / 8
        assert memory["parameters"] == memory["gradients"] == 4 * shard
        assert memory["optimizer"] == 8 * shard


def test_a_micro_batch_of_many_tokens_peaks_at_the_loss() -> None:
    # There the output projection is gathered, in 16 bits, and of the blocks none is.
    assert broken_down(sharding="fsdp2").memory["communication"] == 2 * HEAD
    kept = broken_down(sharding="fsdp2_no_reshard").memory["communication"]
    assert kept == 2 * PARAMETERS


def test_a_short_sequence_peaks_in_a_block() -> None:
    job = replace(JOB, sequence_length=64)
    memory = broken_down(job=job, sharding="fsdp2").memory
    block = facts_of(JOB).block_parameters / facts_of(JOB).layers
    # Gathered, and the next one; gradients, and the last block's on their way in fp32.
    assert memory["communication"] == pytest.approx((2 + 2 + 2 + 4) * block)


def seconds(cluster: Any = NODE, **knobs: Any) -> float:
    return broken_down(cluster, **knobs).time_s["gradients and ZeRO"]


def test_the_volume_of_a_step() -> None:
    # Nothing hides, and rounds take no time, so the seconds are the bytes.
    constants = replace(constants_of(NODE.device), gather_overlap=0.0, link_latency_s=0.0)
    bps = constants.reduce_efficiency * NODE.link_Bps

    def volume(micro_batches: int, **knobs: Any) -> float:
        job = replace(JOB, global_batch=8 * micro_batches)
        model = AnalyticModel(job, NODE, constants=constants)
        told = model.breakdown(Configuration.of(data_parallel=8, **knobs))
        return told.time_s["gradients and ZeRO"] * bps

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
    node = slow.devices_per_node
    assert seconds(slow, **many, hsdp_replicas=32 // node) < seconds(slow, **many)


def test_many_at_once_are_what_each_is_alone() -> None:
    model = AnalyticModel(JOB, NODE)
    every = [
        Configuration.of(data_parallel=8, **knobs)
        for knobs in (
            {"zero_stage": 3},
            {"sharding": "fsdp2"},
            {"zero_stage": 1},
            {"sharding": "fsdp2_no_reshard", "hsdp_replicas": 4},
        )
    ]
    said = model.predict(every)
    alone = [model.predict([configuration]) for configuration in every]
    for name in ("step_time_s", "power_W", "memory_bytes"):
        each = np.concatenate([getattr(one, name) for one in alone])
        assert getattr(said, name) == pytest.approx(each)
