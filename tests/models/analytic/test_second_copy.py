"""ZeRO++'s second copy of the parameters in the analytic models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel, Breakdown
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.model_facts import facts_of

NODES = load_cluster("h100-32")
JOB = replace(load_job("qwen2.5-7b"), global_batch=128)
PARAMETERS = facts_of(JOB).parameters
# Nothing hides and rounds take no time, so that the seconds are the bytes.
CONSTANTS = replace(
    constants_of(NODES.device),
    gather_overlap=0.0,
    link_latency_s=0.0,
    network_latency_s=0.0,
    reduce_over_network=1.0,
)


def broken_down(job: Any = JOB, **knobs: Any) -> Breakdown:
    model = AnalyticModel(job, NODES, constants=CONSTANTS)
    return model.breakdown(Configuration.of(data_parallel=32, zero_stage=3, **knobs))


def spared_s(job: Any, **knobs: Any) -> float:
    near = broken_down(job, zero_hpz_partition_size=8, **knobs).time_s["gradients and ZeRO"]
    return broken_down(job, **knobs).time_s["gradients and ZeRO"] - near


def test_each_device_of_a_node_keeps_a_share_of_the_second_copy() -> None:
    more = broken_down(zero_hpz_partition_size=8).memory["parameters"]
    assert more - broken_down().memory["parameters"] == pytest.approx(2 * PARAMETERS / 8)


def test_only_the_first_gather_of_a_step_leaves_the_node() -> None:
    one, two, four = (spared_s(replace(JOB, global_batch=32 * m), micro_batch=1) for m in (1, 2, 4))
    # Each micro-batch gathers once and somewhat more: what is not freed is not gathered again.
    each = two - one
    assert four - two == pytest.approx(2 * each)
    assert 0 < one < each


def test_a_slow_network_makes_it_worth_its_memory() -> None:
    """Rails of 400 Gbit/s for each device leave little to spare; a tenth of them, much."""
    slow = replace(NODES, network_Bps=NODES.network_Bps / 10)
    model = AnalyticModel(JOB, slow)
    far, near = (
        model.breakdown(
            Configuration.of(
                data_parallel=32, zero_stage=3, micro_batch=1, zero_hpz_partition_size=ranks
            )
        ).time_s["gradients and ZeRO"]
        for ranks in (1, 8)
    )
    assert near < 0.6 * far


def test_within_one_node_nothing_is_spared_by_a_copy_of_the_node() -> None:
    model = AnalyticModel(JOB, load_cluster("a100-8"))
    far, near = (
        model.breakdown(
            Configuration.of(data_parallel=8, zero_stage=3, zero_hpz_partition_size=ranks)
        ).time_s["gradients and ZeRO"]
        for ranks in (1, 8)
    )
    assert near == pytest.approx(far)
