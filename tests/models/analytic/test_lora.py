"""LoRA in the analytic models: memory, arithmetic and volume are those of what is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel, Breakdown
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import LoRA, load_job
from tuner.search_spaces.model_facts import facts_of

PLAIN = load_job("qwen2.5-7b")
JOB = replace(PLAIN, lora=LoRA(16))
BASE, ADAPTERS = facts_of(JOB).parameters, facts_of(JOB).trainable_parameters
NODE = load_cluster("a100-8")


def broken_down(job: Any = JOB, **knobs: Any) -> Breakdown:
    return AnalyticModel(job, NODE).breakdown(Configuration.of(data_parallel=8, **knobs))


@pytest.mark.parametrize(
    ("knobs", "parameters", "gradients", "optimizer"),
    [
        ({"zero_stage": 0}, 2 * BASE + 2 * ADAPTERS, 2 * ADAPTERS, 12 * ADAPTERS),
        ({"zero_stage": 1}, 2 * BASE + 2 * ADAPTERS, 2 * ADAPTERS, 12 * ADAPTERS / 8),
        ({"zero_stage": 2}, 2 * BASE + 2 * ADAPTERS, 2 * ADAPTERS / 8, 12 * ADAPTERS / 8),
        ({"zero_stage": 3}, (2 * BASE + 2 * ADAPTERS) / 8, 2 * ADAPTERS / 8, 12 * ADAPTERS / 8),
        ({"sharding": "fsdp2"}, (2 * BASE + 4 * ADAPTERS) / 8, 4 * ADAPTERS / 8, 8 * ADAPTERS / 8),
    ],
)
def test_only_adapters_have_gradients_and_states(
    knobs: dict[str, Any], parameters: float, gradients: float, optimizer: float
) -> None:
    memory = broken_down(**knobs).memory
    assert memory["parameters"] == pytest.approx(parameters)
    assert memory["gradients"] == pytest.approx(gradients)
    assert memory["optimizer"] == pytest.approx(optimizer)


def test_a_frozen_product_keeps_no_input() -> None:
    whole = broken_down(PLAIN, zero_stage=3).memory["activations"]
    every = broken_down(replace(JOB, lora=LoRA(16, "all-linear")), zero_stage=3)
    attention = broken_down(zero_stage=3)
    assert attention.memory["activations"] < every.memory["activations"] < whole


def test_the_volume_of_a_step() -> None:
    # Nothing hides, and rounds take no time, so the seconds are the bytes.
    constants = replace(
        constants_of(NODE.device), gather_overlap=0.0, reduce_overlap=0.0, link_latency_s=0.0
    )
    bps = constants.reduce_efficiency * NODE.link_Bps

    def volume(micro_batches: int, **knobs: Any) -> float:
        job = replace(JOB, global_batch=8 * micro_batches)
        model = AnalyticModel(job, NODE, constants=constants)
        told = model.breakdown(Configuration.of(data_parallel=8, **knobs))
        return told.time_s["gradients and ZeRO"] * bps

    # Gradients are reduced and shared again, once a step; frozen weights never move.
    assert volume(3, zero_stage=0) == pytest.approx(7 / 8 * 2 * 2 * ADAPTERS)
    assert volume(3, zero_stage=2) == pytest.approx(7 / 8 * (3 + 1) * 2 * ADAPTERS)
    # Sharded, they are gathered for the forward pass and, but for what stays, the backward pass.
    every, kept = BASE + ADAPTERS, facts_of(JOB).head_parameters
    third = 2 * (every + every - 1e9) + 2 * ADAPTERS
    assert volume(3, zero_stage=3) == pytest.approx(3 * 7 / 8 * third)
    by_torch = 2 * every + 2 * (every - kept) + 4 * ADAPTERS
    assert volume(3, sharding="fsdp2") == pytest.approx(3 * 7 / 8 * by_torch)


def test_a_step_is_shorter_by_the_gradients_of_frozen_weights() -> None:
    def arithmetic_s(job: Any, checkpointing: str) -> float:
        told = broken_down(job, zero_stage=3, activation_checkpointing=checkpointing)
        return told.time_s["arithmetic"]

    # Two passes of three over the products, or three of four; attention and traffic stay.
    assert 2 / 3 < arithmetic_s(JOB, "none") / arithmetic_s(PLAIN, "none") < 0.85
    assert 3 / 4 < arithmetic_s(JOB, "full") / arithmetic_s(PLAIN, "full") < 0.9
