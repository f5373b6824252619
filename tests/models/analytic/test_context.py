"""Context parallelism over gathered keys and values: volume, memory and work, beside Ulysses."""

from __future__ import annotations

import pytest

from tuner.models.analytic.constants import constants_of
from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.model_facts import facts_of

CLUSTER, JOB = load_cluster("h100-32"), load_job("qwen2.5-7b")
FACTS, CONSTANTS = facts_of(JOB), constants_of(CLUSTER.device)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_gathered_keys_and_values_cost_their_links_and_their_memory(checkpointing: str) -> None:
    model, degree = AnalyticModel(JOB, CLUSTER), 4
    knobs = {"sequence_parallel": degree, "activation_checkpointing": checkpointing}
    ulysses, gathered = (
        Configuration.of(knobs, sequence_method=method) for method in ("ulysses", "all_gather")
    )
    one, other = model.breakdown(ulysses), model.breakdown(gathered)
    # Two matrices of the key-value heads' width, of all tokens, in 16 bits.
    whole = JOB.sequence_length * 2 * FACTS.kv_heads * FACTS.head_dim * 2
    rate = CONSTANTS.link_efficiency * CLUSTER.link_Bps
    each = (degree - 1) / degree * whole / rate + (degree - 1) * CONSTANTS.link_latency_s
    passes = 2 + (checkpointing == "full")
    count = ulysses.accumulation(JOB.global_batch) * passes * FACTS.layers
    assert other.time_s["sequence links"] == pytest.approx(count * each)
    # The same work; a power limit lowers the clock of the one that waits less.
    cycles = [each.time_s["arithmetic"] * each.clock_MHz for each in (one, other)]
    assert cycles[0] == pytest.approx(cycles[1])
    # Few key-value heads: less is sent than by Ulysses, which moves queries and outputs too.
    assert other.time_s["sequence links"] < one.time_s["sequence links"]
    kept = FACTS.layers * (degree - 1) / degree * whole * (1 + CONSTANTS.memory_overhead)
    more = other.memory["activations"] - one.memory["activations"]
    assert more == pytest.approx(kept if checkpointing == "none" else 0.0)


@pytest.mark.parametrize(("tensor", "rails"), [(1, 8), (4, 2)])
def test_a_gathered_sequence_that_spans_nodes_has_all_its_members_rails(
    tensor: int, rails: int
) -> None:
    """One adapter of a node would be charged eight times too slow; a rank's own exchange is not."""
    degree = 16 // tensor
    knobs = {"sequence_parallel": degree, "tensor_parallel": tensor}
    gathered = Configuration.of(knobs, sequence_method="all_gather")
    found = AnalyticModel(JOB, CLUSTER).breakdown(gathered).time_s["sequence links"]
    whole = JOB.sequence_length * 2 * FACTS.kv_heads * FACTS.head_dim * 2 / tensor
    rate = min(
        rails * CONSTANTS.network_efficiency * CLUSTER.network_Bps,
        CONSTANTS.link_efficiency * CLUSTER.link_Bps,
    )
    each = (degree - 1) / degree * whole / rate + (degree - 1) * CONSTANTS.network_latency_s
    count = gathered.accumulation(JOB.global_batch) * 2 * FACTS.layers
    assert found == pytest.approx(count * each)
