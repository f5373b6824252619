"""Parts of one optimizer step: per micro-batch of each kind of stage, and once per step.

A micro-batch's slot is arithmetic (which the SM clock scales), memory traffic, the host's dispatch,
collectives inside the layers and the transfer to the next stage (which it does not). Algorithms of
collectives are rings, as NCCL uses for large messages; a group inside a node uses the links between
its devices, a group across nodes each device's share of the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.compute import ATTENTION_BACKWARD, OPERATORS_PER_PRODUCT, Passes
from tuner.models.analytic.constants import Constants, Launches, Rows, Setup, Stages
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
    column = launches.column
    facts, host_link = setup.facts, setup.host_link_Bps
    plain, experts = stage_parameters(setup, launches, stages)
    reduced = trained(setup, launches, stages)
    if facts.lora is not None:
        plain = plain + reduced[0]
    inside = constants.reduce_efficiency
    usual = (inside, inside * constants.reduce_over_network)
    gathers = _gathers(setup, column, stages, plain + experts)
    below = np.where(column.z == 2, column.m + 1, 2.0)
    rounds = np.where(column.z == 3, (gathers + 1) * column.m, below)
    # ZeRO-3 gathers block by block: its rounds are each block's.
    blocks = np.where(column.z == 3, np.maximum(stages.blocks, 1.0) - 1, 0.0)
    # All ranks of a node share its drive; the link to the host is each rank's own.
    on_node = np.minimum(column.ranks, cluster.devices_per_node)
    drive = np.minimum(constants.nvme_Bps / on_node, host_link)
    source = np.where(column.parameters_nvme, drive, host_link)
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
        waiting = rounds * blocks * (ranks - 1) * link.latency_s
        moved = rounds * once
        if facts.lora is not None:  # frozen weights are gathered by ZeRO-3, and never reduced
            shared = all_gather_s(updated * element, ranks, link)
            third = column.m * (gathers * once + shared)
            moved = np.where(column.z == 3, third, rounds * shared)
        seconds = seconds + np.where(ranks > 1, moved + waiting, 0.0)
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
    below = last_backward * np.where(column.z == 2, column.m, 1.0)
    gathered = column.fsdp | (column.z == 3)
    return np.where(gathered, constants.gather_overlap * column.m, below)


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


#: Host memory bandwidth of a node if the cluster states none, bytes per second: an estimate
#: for a two-socket DDR5 server.
HOST_MEMORY_BPS = 3e11
#: Constants that no part of a step depends on: of power, and of how the parts add up.
OUTSIDE_PARTS = (
    *("compute_W", "memory_W", "awake_W", "wait_W", "lowest_voltage", "voltage_knee"),
    *("dispatch_hidden", "step_s"),
)


@dataclass(frozen=True)
class StepParts(Rows):
    """Everything of a step but the clock, seconds; arrays of shape (launches, kinds of stage)."""

    arithmetic: np.ndarray
    operands: np.ndarray
    stream: np.ndarray
    dispatch: np.ndarray
    # tensor, sequence, experts, transfer: collectives of a micro-batch: tensor-parallel reductions,
    # Ulysses' and experts' all-to-all, and the transfer to the next stage.
    tensor: np.ndarray
    sequence: np.ndarray
    experts: np.ndarray
    transfer: np.ndarray
    units: np.ndarray  # the host's work on collectives of blocks, in which the device waits
    # host_now, host_behind: transfer of a micro-batch's activations to the host and back, exposed
    # or hidden behind the rest of its slot.
    host_now: np.ndarray
    host_behind: np.ndarray
    # sync, sync_share: collectives of gradients and ZeRO in a step, and the number of slots of
    # compute that they can hide behind.
    sync: np.ndarray
    sync_share: np.ndarray
    # seconds of a slot behind which they cannot hide: a host that is still dispatching a block has
    # not asked for the next one's parameters.
    sync_late: np.ndarray
    update: np.ndarray
    # offload, offload_behind: gradients to the host, its optimizer, parameters back: the exposed
    # part, and the part that hides behind compute if there is enough.
    offload: np.ndarray
    offload_behind: np.ndarray
    host_update: np.ndarray
    m: np.ndarray  # number of micro-batches, shape (launches, 1)
    bubble: np.ndarray  # the schedule's idle time as a share of that of 1F1B, shape (launches, 1)
    # the memory's clock as a share of the one its bandwidth is stated for, shape (launches, 1);
    # power is drawn by the traffic, which it does not change.
    memory_rate: np.ndarray

    def device_s(self, clock: np.ndarray, constants: Constants) -> np.ndarray:
        """Return the seconds of a micro-batch's arithmetic and memory traffic at a clock."""
        memory = np.maximum(1.0, constants.bandwidth_clock / clock) / self.memory_rate
        return np.asarray(
            np.maximum(self.arithmetic / clock, self.operands * memory) + self.stream * memory
        )

    def dispatch_s(self, clock: np.ndarray, constants: Constants) -> np.ndarray:
        """Return the seconds of dispatch that the device's work does not hide."""
        hidden = np.minimum(self.dispatch, self.device_s(clock, constants))
        return self.dispatch - constants.dispatch_hidden * hidden

    def host_s(self, clock: np.ndarray, constants: Constants) -> np.ndarray:
        """Return the seconds that moving activations to the host adds to a slot."""
        behind = self.device_s(clock, constants) + self.tensor + self.sequence + self.experts
        return self.host_now + np.maximum(0.0, self.host_behind - behind)

    @property
    def links(self) -> np.ndarray:
        """Seconds of a micro-batch's collectives and transfers."""
        return self.tensor + self.sequence + self.experts + self.transfer

    def slot_s(self, clock: np.ndarray, constants: Constants) -> np.ndarray:
        """Return the seconds of one micro-batch on one stage, forward and backward."""
        return np.asarray(
            self.device_s(clock, constants)
            + self.dispatch_s(clock, constants)
            + self.links
            + self.units
            + self.host_s(clock, constants)
        )

    def sync_s(self, slot: np.ndarray, constants: Constants) -> np.ndarray:
        """Return the seconds that collectives of gradients and ZeRO add to the step."""
        hidden = self._hidden_s(slot)
        return np.asarray(self.sync - hidden + constants.overlap_slowdown * hidden)

    def _hidden_s(self, slot: np.ndarray) -> np.ndarray:
        behind = np.maximum(0.0, slot - self.sync_late)
        return np.asarray(np.minimum(self.sync, self.sync_share * behind))

    def offload_s(self, slot: np.ndarray) -> np.ndarray:
        """Return the seconds that the optimizer's offload adds to the step."""
        return self.offload + np.maximum(0.0, self.offload_behind - self.m * slot * 2 / 3)

    def step_s(self, slot: np.ndarray, stages: Stages, constants: Constants) -> np.ndarray:
        """Return the seconds of a step, shape (n,).

        Of 1F1B it is (m-1) slots of the slowest stage, one of each, and the terms that occur once
        (Sailor, SOSP'25; Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Another schedule
        has the share `bubble` of what exceeds m slots of the slowest stage.
        """
        slowest = slot.max(axis=1)
        idle = (slot * stages.count).sum(axis=1) - slowest
        pipeline = self.m[:, 0] * slowest + self.bubble[:, 0] * idle
        update = self.update / self.memory_rate
        once = self.sync_s(slot, constants) + update + self.offload_s(slot)
        return np.asarray(pipeline + once.max(axis=1) + constants.step_s)

    def waiting_s(self, slot: np.ndarray, step: np.ndarray, constants: Constants) -> np.ndarray:
        """Return the seconds of a step in which a device waits for others, shape of `slot`."""
        hidden = self._hidden_s(slot)
        own = (
            self.m * (slot - self.links)
            + constants.overlap_slowdown * hidden
            + self.update / self.memory_rate
            + self.offload_s(slot)
            + constants.step_s
        )
        return np.asarray(np.maximum(0.0, step[:, None] - own))


def step_parts(setup: Setup, launches: Launches, stages: Stages) -> StepParts:
    """Return everything of a step but the clock."""
    forward = Passes(setup, launches)
    block, head, encoder = forward.block(), forward.head(), forward.encoder()
    adapters = forward.adapters()
    column = launches.column
    constants = setup.constants
    passes = 3.0 + column.recomputed  # forward 1, backward 2, recomputation 1
    # The backward pass of a frozen product is of its input alone: one pass less.
    frozen = float(setup.facts.lora is not None)
    streams = passes + column.selective  # which is of all but the matrix products, if by operator
    # Fused code drops the casts for products whose outputs are kept.
    casts = passes + (column.selective & ~column.compiled)
    shape = np.zeros((len(launches), len(stages.blocks)))
    activation = (
        column.b * setup.job.sequence_length / column.u * setup.facts.hidden * setup.element
    )
    tensor, sequence, experts, transfer = collectives_s(setup, column, stages, activation)
    kept = (column.recomputed + (1.0 - column.recomputed) * 17.0 / column.t) * activation
    moved = np.where(column.activations, 2 * kept * stages.blocks / setup.host_link_Bps, 0.0)
    offload, behind, host_update, update = _optimizer(setup, launches, stages)

    def over_passes(name: str, passes: np.ndarray, fewer: float = 0.0) -> np.ndarray:
        """Return a figure of a stage's micro-batch over all passes, `fewer` of the frozen part."""
        # The head is never recomputed. Frames are encoded on the stage that embeds tokens, by
        # blocks that are recomputed as the others.
        here = getattr(block, name)[:, None] * stages.blocks * (passes - fewer)
        here = here + getattr(encoder, name)[:, None] * stages.embeds * passes
        if adapters is not None:
            here = here + getattr(adapters, name)[:, None] * stages.blocks * passes
        return np.asarray(here + (3.0 - fewer) * getattr(head, name)[:, None] * stages.heads)

    backward = passes - 2.0 + ATTENTION_BACKWARD
    dispatch = over_passes("operators", streams, frozen / OPERATORS_PER_PRODUCT) * np.where(
        column.compiled, constants.compiled_operator_s, constants.operator_s
    )
    dispatch = dispatch + _recomputation_s(setup, column) * stages.blocks
    units = _units_s(setup, column, stages)
    attention = block.attention_s[:, None] * stages.blocks * backward
    return StepParts(
        arithmetic=over_passes("arithmetic_s", passes, frozen) + attention,
        operands=over_passes("operand_s", passes, frozen),
        stream=over_passes("stream_s", streams) + forward.cast_s()[:, None] * stages.blocks * casts,
        dispatch=dispatch,
        tensor=tensor + shape,
        sequence=sequence + shape,
        experts=experts + shape,
        transfer=transfer + shape,
        units=units,
        host_now=np.where(column.activations_async, 0.0, moved),
        host_behind=np.where(column.activations_async, moved, 0.0),
        sync=sync_s(setup, launches, stages),
        sync_share=sync_share(constants, column) + shape,
        sync_late=np.where(column.fsdp | (column.z == 3), dispatch + units, 0.0),
        update=update,
        offload=offload,
        offload_behind=behind,
        host_update=host_update,
        m=column.m,
        bubble=_bubble(column),
        memory_rate=np.ones_like(column.m),
    )


def _recomputation_s(setup: Setup, column: Launches) -> np.ndarray:
    # Checkpointing's own work on the host, a block and micro-batch, which no compiler sees.
    constants = setup.constants
    return np.asarray(column.recomputed * constants.recompute_operators * constants.operator_s)


def _units_s(setup: Setup, column: Launches, stages: Stages) -> np.ndarray:
    # Each block is gathered for the forward pass and again for the backward pass, unless it stays
    # gathered, and its gradients are reduced.
    rounds = np.where(column.fsdp, 2.0 + column.reshard, np.where(column.z == 3, 3.0, 0.0))
    ranks = np.where(column.fsdp, column.shards, column.replicas)
    return np.asarray(np.where(ranks > 1, rounds, 0.0) * stages.blocks * setup.constants.unit_s)


def _bubble(column: Launches) -> np.ndarray:
    # Interleaving over v virtual stages leaves 1/v: (p - 1) / (v m) of the step (Narayanan et al.
    # 2021, arXiv 2104.04473, section 2.2). With the gradients of weights computed apart, a stage
    # waits for (p - 1) (F + B - W) instead of (p - 1) (F + B + W) (Qi et al. 2023, arXiv
    # 2401.10241, table 1, ZB-H1), where forward F, gradients of inputs B and of weights W take the
    # same time and recomputation adds a forward pass to B.
    passes = 3.0 + column.recomputed
    apart = np.where(column.zero_bubble, (passes - 2.0) / passes, 1.0)
    return np.asarray(apart / column.v)


def _optimizer(
    setup: Setup, launches: Launches, stages: Stages
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    # Returns (exposed offload, hideable offload, host update, update).
    cluster, constants = setup.cluster, setup.constants
    column = launches.column
    plain, experts = trained(setup, launches, stages)
    shards = np.where(column.z >= 1, column.replicas, np.where(column.fsdp, column.shards, 1.0))
    share = plain / shards + experts / np.maximum(1.0, shards / column.e)
    # Weights, moments and gradients are read, the first two written: 28 bytes with fp32 states.
    in_and_out = 2 * (setup.updated_element + setup.states.moments)
    moved = in_and_out + setup.updated_element
    update = moved * share / setup.bandwidth_Bps
    if not cluster.device.has_own_memory:
        none = np.zeros_like(share)
        return none, none, none, update
    on_node = np.minimum(column.ranks, cluster.devices_per_node)
    memory = constants.host_memory_efficiency * (cluster.host_memory_Bps or HOST_MEMORY_BPS)
    adam = moved * share * on_node / memory
    parameters = share * setup.element / setup.host_link_Bps  # one way
    gradients = share * _gradient_bytes(setup, column) / setup.host_link_Bps
    offloaded, later, stage3 = column.offload, column.offload_async, column.z == 3
    # Synchronously gradients go to the host, Adam runs, parameters come back. Stages 1 and 2 copy
    # gradients on the stream that computes; stage 3 on another, behind the backward pass.
    now = adam + parameters + np.where(stage3, 0.0, gradients)
    # Asynchronously (SuperOffload) all but the last bucket hides behind the backward pass, and the
    # parameters are moved in fp32, cast on the device.
    now = np.where(offloaded & ~later, now, np.where(later, 0.1 * parameters, 0.0))
    # All but gradients (ZeRO-Infinity, arXiv 2104.07857).
    swapped = in_and_out * share * on_node / constants.nvme_Bps
    now = now + np.where(column.offload_nvme, swapped, 0.0)
    behind = np.where(offloaded & stage3, gradients, 0.0)
    fp32 = share * 4 / setup.host_link_Bps
    behind = np.where(later, gradients + fp32 + adam, behind)
    return now, behind, np.where(offloaded, adam, 0.0), np.where(offloaded, 0.0, update)


def _gradient_bytes(setup: Setup, column: Launches) -> np.ndarray:
    # As in DeepSpeed 0.19.8. The sum crosses once in fp32. Under accumulation, stage 2 stores each
    # micro-batch's sum on the host and loads it again for the next one
    # (`async_accumulate_grad_in_cpu_via_gpu` in stage_1_and_2.py), 2 m - 1 times; stage 1 loads and
    # stores it once. Stage 3 crosses twice a micro-batch (`partition_grads` in stage3.py).
    below = np.where(column.m <= 1, 0.0, np.where(column.z == 2, 2 * column.m - 1, 2.0))
    crossed = np.where(column.z == 3, 2 * column.m, below)
    return np.asarray(4.0 + setup.element * crossed)
