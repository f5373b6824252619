"""Communication: the cost of a collective, and the collectives of a step.

Algorithms are rings, as NCCL uses for large messages; a group inside a node uses the links between
its devices, a group across nodes each device's share of the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.constants import Constants, Setup
from tuner.models.analytic.layout import Launches, Stages
from tuner.models.analytic.memory import LIVE_PARAMETERS, fsdp_units, stage_parameters, trained
from tuner.search_spaces.cluster import Cluster


@dataclass(frozen=True)
class Link:
    """Link between the ranks of a group; arrays, one entry per group."""

    Bps: np.ndarray
    latency_s: np.ndarray


def link_of(
    cluster: Cluster,
    constants: Constants,
    span: np.ndarray,
    *,
    rails: np.ndarray | float = 1.0,
    members: np.ndarray | float = 2.0,
    efficiency: tuple[float, float] | None = None,
) -> Link:
    """Return the slowest link that groups of this span cross.

    Args:
        span: number of devices from a group's first rank to its last.
        rails: members of the group on each node: a ring leaves and enters a node once, over all of
            their shares of the network together, as NCCL's multi-rail rings do.
        members: members of the group on each node. Without a switch each pair has links of its own,
            and NCCL's rings together use those between members: (members - 1) / (devices - 1) of a
            device's links. All-reduce of 235 MB on GH200 reaches 111 GB/s among 2 of 4 and 313 GB/s
            among 4 (Sailor's profiles of operators).
        efficiency: efficiencies of the link and of the network; by default the constants'.
    """
    inner, outer = efficiency or (constants.link_efficiency, constants.network_efficiency)
    # A machine that states no link (a CPU) communicates through its memory: write and read.
    every = cluster.link_Bps or cluster.device.memory_bandwidth_Bps / 2
    between = cluster.network_Bps or every
    peers = max(1, cluster.devices_per_node - 1) if cluster.link_mesh else 1
    inside = every * np.clip((np.asarray(members) - 1) / peers, 1 / peers, 1.0)
    leaves = np.asarray(span) > cluster.devices_per_node
    return Link(
        Bps=np.where(
            leaves,
            np.minimum(outer * between * rails, inner * inside),
            inner * inside,
        ),
        latency_s=np.where(leaves, constants.network_latency_s, constants.link_latency_s),
    )


def all_gather_s(total_bytes: np.ndarray, ranks: np.ndarray, link: Link) -> np.ndarray:
    """Return the seconds to gather or reduce-scatter `total_bytes`: (n-1)/n S/B + (n-1) a."""
    return np.asarray(
        (ranks - 1) / ranks * total_bytes / link.Bps
        + np.where(total_bytes > 0, (ranks - 1) * link.latency_s, 0.0)
    )


def all_reduce_s(total_bytes: np.ndarray, ranks: np.ndarray, link: Link) -> np.ndarray:
    """Return the seconds of a reduce-scatter and a gather, 2(n-1)/n S/B + 2(n-1) a."""
    return 2 * all_gather_s(total_bytes, ranks, link)


def all_to_all_s(local_bytes: np.ndarray, ranks: np.ndarray, link: Link) -> np.ndarray:
    """Return the seconds to exchange the bytes of each rank: (n-1)/n S/B + (n-1) a."""
    return all_gather_s(local_bytes, ranks, link)


def transfer_s(message_bytes: np.ndarray, link: Link) -> np.ndarray:
    """Return the seconds of one message from rank to rank: S/B + a."""
    return np.asarray(message_bytes / link.Bps + link.latency_s)


def collectives_s(
    setup: Setup, column: Launches, stages: Stages, activation: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the seconds of a micro-batch's collectives: (tensor, sequence, experts, transfer).

    `activation` is the bytes between blocks, per rank.
    """
    facts, cluster, constants = setup.facts, setup.cluster, setup.constants
    d, t, u, e = column.d, column.t, column.u, column.e
    tokens = column.b * setup.job.sequence_length / u

    # Tensor parallelism: two all-reduces per block forward, two backward, two more to recompute
    # (Megatron-LM, arXiv 1909.08053), of the whole activation.
    again = column.recomputed + column.selective  # collectives are kept by neither
    reduces = (4.0 + 2.0 * again) * stages.blocks
    # Adjacent ranks form a group; one that spans nodes leaves each over all of its members' rails.
    local = np.minimum(t, cluster.devices_per_node)
    tensor_link = link_of(cluster, constants, t, rails=local, members=local)
    tensor = reduces * np.where(t > 1, all_reduce_s(activation, t, tensor_link), 0.0)
    # Ulysses: q, k and v before attention, its output after, each pass (arXiv 2309.14509).
    turns = (2.0 + again) * stages.blocks
    heads = 2 * facts.heads * facts.head_dim + 2 * facts.kv_heads * facts.head_dim
    exchanged = tokens * heads * setup.element / t
    # Context parallelism: k and v of all ranks, gathered in the forward pass and reduced to their
    # owners in the backward pass (Llama 3, arXiv 2407.21783, section 3.3.2).
    whole = tokens * u * 2 * facts.kv_heads * facts.head_dim * setup.element / t
    # Its ring, too, leaves a node once over the rails of all of its members there; each member's
    # exchange of heads has its own share of the network alone.
    local = np.clip(cluster.devices_per_node / t, 1.0, u)
    ring = link_of(cluster, constants, u * t, rails=local, members=local)
    between = link_of(cluster, constants, u * t, members=u)
    once = np.where(
        column.gathered, all_gather_s(whole, u, ring), all_to_all_s(exchanged, u, between)
    )
    sequence = turns * np.where(u > 1, once, 0.0)
    # Experts: tokens out and back, to each expert that they visit.
    visited = 2 * max(facts.experts_per_token, 1) * activation
    experts = turns * np.where(
        e > 1, all_to_all_s(visited, e, link_of(cluster, constants, e * t, members=e)), 0.0
    )
    # Pipeline: an activation to the next stage, its gradient back, and the schedule itself. The
    # next stage's ranks are d t u devices away. Each tensor-parallel rank sends its part, and the
    # parts are gathered on arrival (DeepSpeed's PipelineEngine: `pipe_partitioned` and
    # `grad_partitioned`, on by default; Megatron-LM scatters and gathers alike).
    inside = (constants.link_efficiency, constants.transfer_efficiency)
    next_stage = link_of(cluster, constants, 2 * d * t * u, efficiency=inside)
    gathered = np.where(t > 1, all_gather_s(activation, t, tensor_link), 0.0)
    transfer = np.where(
        column.p > 1,
        # Each of a rank's virtual stages has a neighbour of its own.
        column.v * (2 * (transfer_s(activation / t, next_stage) + gathered) + constants.stage_s),
        0.0,
    )
    return tensor, sequence, experts, transfer


def sync_s(setup: Setup, launches: Launches, stages: Stages) -> np.ndarray:
    """Return the seconds of a step's collectives of gradients and ZeRO, hidden or not."""
    # Stages 0 and 1 reduce once per step (and stage 1 gathers the updated parameters); stage 2
    # reduces every micro-batch and gathers once; stage 3 gathers and reduces every micro-batch
    # (DeepSpeed's engine refuses no_sync for stages 2 and 3). Parameters on the host are
    # transferred for each gather.
    cluster, constants, element = setup.cluster, setup.constants, setup.element
    column = launches[:, None]
    facts, host_link = setup.facts, setup.host_link_Bps
    plain, experts = stage_parameters(setup, launches, stages)
    reduced = trained(setup, launches, stages)
    if facts.lora is not None:
        plain = plain + reduced[0]
    inside = constants.reduce_efficiency
    usual = (inside, inside * constants.reduce_over_network)
    gathers = _gathers(setup, column, stages, plain + experts)
    seconds = np.zeros_like(plain)
    for parameters, updated, ranks, apart in (
        (plain, reduced[0], column.replicas, column.t),
        (experts, reduced[1], np.maximum(1.0, column.replicas / column.e), column.t * column.e),
    ):
        rails = np.clip(cluster.devices_per_node / apart, 1.0, ranks)
        link = link_of(
            cluster, constants, ranks * apart, rails=rails, members=rails, efficiency=usual
        )
        once = all_gather_s(parameters * element, ranks, link)
        rounds = np.select(
            [column.z <= 1, column.z == 2],
            [2.0 * np.ones_like(column.m), column.m + 1],
            (gathers + 1) * column.m,
        )
        # ZeRO-3 gathers block by block: its rounds are each block's.
        blocks = np.where(column.z == 3, np.maximum(stages.blocks, 1.0) - 1, 0.0)
        waiting = rounds * blocks * (ranks - 1) * link.latency_s
        moved = rounds * once
        if facts.lora is not None:  # frozen weights are gathered by ZeRO-3, and never reduced
            shared = all_gather_s(updated * element, ranks, link)
            third = column.m * (gathers * once + shared)
            moved = np.where(column.z == 3, third, rounds * shared)
        seconds = seconds + np.where(ranks > 1, moved + waiting, 0.0)
        # All ranks of a node share its drive; the link to the host is each rank's own.
        on_node = np.minimum(column.ranks, cluster.devices_per_node)
        drive = np.minimum(constants.nvme_Bps / on_node, host_link)
        source = np.where(column.parameters_nvme, drive, host_link)
        fetched = gathers * column.m * parameters / ranks * element / source
        seconds = seconds + np.where(column.parameters_offloaded & (column.z == 3), fetched, 0.0)
    if column.fsdp.any():
        by_torch = _fsdp_sync(setup, column, stages, plain + experts, reduced[0] + reduced[1])
        seconds = np.where(column.fsdp, by_torch, seconds)
    if (column.second_copy > 1).any():
        seconds = seconds - _kept_near_s(setup, column, stages, plain + experts, gathers)
    return seconds


def _kept_near_s(
    setup: Setup, column: Launches, stages: Stages, parameters: np.ndarray, gathers: np.ndarray
) -> np.ndarray:
    # What ZeRO++ spares (arXiv 2306.10209, section 3.2): the first gather of a step leaves a copy
    # in each group of ranks, from which the others are made until the optimizer changes the
    # parameters (DeepSpeed 0.19.8: ds_secondary_tensor in partition_parameters.py, which stage3.py
    # invalidates after a step).
    inside = setup.constants.reduce_efficiency
    usual = (inside, inside * setup.constants.reduce_over_network)
    each = []
    for ranks in (column.replicas, column.second_copy):
        rails = np.clip(setup.cluster.devices_per_node, 1.0, ranks)
        link = link_of(
            setup.cluster, setup.constants, ranks, rails=rails, members=rails, efficiency=usual
        )
        waiting = np.maximum(stages.blocks - 1, 0.0) * (ranks - 1) * link.latency_s
        each.append(all_gather_s(parameters * setup.element, ranks, link) + waiting)
    spared = (gathers * column.m - 1) * (each[0] - each[1])
    return np.where(column.second_copy > 1, spared, 0.0)


def _gathers(setup: Setup, column: Launches, stages: Stages, parameters: np.ndarray) -> np.ndarray:
    # Each parameter is gathered for the forward pass, and again for the backward pass unless it is
    # among the last `LIVE_PARAMETERS` of the forward pass. Recomputation shares its gather with the
    # backward pass of its block, but for what exceeds `LIVE_PARAMETERS` of that block.
    facts = setup.facts
    plain = facts.block_elements(setup.element) - facts.expert_parameters
    block = (plain + facts.expert_parameters / column.e) / facts.layers / column.t
    again = np.maximum(0.0, 1 - LIVE_PARAMETERS / parameters)
    third = stages.blocks * np.maximum(0.0, block - LIVE_PARAMETERS) / parameters
    return np.asarray(1 + again + column.recomputed * third)


def sync_share(constants: Constants, column: Launches) -> np.ndarray:
    """Return the number of slots of compute that `sync_s` can hide behind."""
    last_backward = constants.reduce_overlap * 2 / 3
    return np.select(
        [column.fsdp, column.z <= 1, column.z == 2],
        [
            constants.gather_overlap * column.m,
            last_backward * np.ones_like(column.m),
            last_backward * column.m,
        ],
        constants.gather_overlap * column.m,
    )


def _fsdp_sync(
    setup: Setup, column: Launches, stages: Stages, parameters: np.ndarray, updated: np.ndarray
) -> np.ndarray:
    # In every micro-batch parameters are gathered for the forward pass, those that were freed again
    # for the backward pass (recomputation shares that), and gradients are reduce-scattered, all
    # within a group of HSDP. The groups sum their shards of the gradients once a step. Gradients
    # are those of the `updated` parameters, which are not frozen.
    cluster, constants = setup.cluster, setup.constants
    inside = constants.reduce_efficiency
    usual = (inside, inside * constants.reduce_over_network)
    shards = column.shards
    rails = np.clip(cluster.devices_per_node / column.t, 1.0, shards)
    span = shards * column.t
    link = link_of(cluster, constants, span, rails=rails, members=rails, efficiency=usual)
    _, kept = fsdp_units(setup, column, stages, parameters)
    gathered = parameters + np.where(column.reshard, parameters - kept, 0.0)
    once = all_gather_s(setup.element * gathered, shards, link)
    once = once + all_gather_s(setup.updated_element * updated, shards, link)
    # Rounds are each block's own.
    rounds = (2.0 + column.reshard) * np.maximum(0.0, stages.blocks - 1)
    each = once + rounds * (shards - 1) * link.latency_s
    apart = shards * column.t
    rails = np.clip(cluster.devices_per_node / apart, 1.0, column.groups)
    span = column.groups * apart
    across = link_of(cluster, constants, span, rails=rails, members=rails, efficiency=usual)
    summed = all_reduce_s(setup.updated_element * updated / shards, column.groups, across)
    return np.asarray(column.m * each + np.where(column.groups > 1, summed, 0.0))
