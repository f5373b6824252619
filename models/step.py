"""One optimizer step, taken apart: what each kind of stage spends on a micro-batch, and what is
paid once a step.

`StepParts` holds everything that does not depend on the clock; `slot_s` and `step_s` add the clock.
A micro-batch's slot is arithmetic (which the SM clock scales), memory traffic, the host's dispatch,
collectives inside the layers and the transfer to the next stage (which it does not). A 1F1B
pipeline takes (m - 1) slots of its slowest stage and one of every stage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from models.collectives import all_gather_s, all_reduce_s, all_to_all_s, link_of, transfer_s
from models.compute import Pass, Passes
from models.constants import Constants
from models.layout import Launches
from models.memory import stage_parameters
from models.stages import Stages
from search_spaces.cluster import Cluster
from search_spaces.job import TrainingJob
from search_spaces.model_facts import ModelFacts

__all__ = ["StepParts", "step_parts"]

#: Bytes a parameter that one Adam step moves: fp32 weight, two moments and gradient read, three
#: written (4 x 4 + 3 x 4).
ADAM_BYTES = 28.0
#: Bytes a parameter that one step moves to and from a node's drive: fp32 weight and two moments, in
#: and out again (ZeRO-Infinity, arXiv 2104.07857; gradients stay in host memory).
NVME_BYTES = 24.0
#: Host memory bandwidth of one node where the cluster states none, bytes per second: an estimate
#: for a two-socket DDR5 server.
HOST_MEMORY_BPS = 3e11


@dataclass(frozen=True)
class StepParts:
    """Everything of a step but the clock, seconds; arrays of shape (launches, kinds of stage).

    Attributes:
        arithmetic, operands, stream, dispatch: a micro-batch's, over all its passes.
        tensor, sequence, experts, transfer: a micro-batch's collectives: tensor-parallel
            reductions, Ulysses' and experts' all-to-all, and what goes to the next stage.
        host_now, host_behind: a micro-batch's activations to the host and back, exposed or hidden
            behind the rest of its slot.
        sync, sync_share: gradients' and ZeRO's collectives of a step, all of it, and how many slots
            of compute it can hide behind.
        update: the optimizer on the device.
        offload, offload_behind: gradients down, the optimizer on the host, parameters up: the part
            that is exposed, and the part that hides behind compute where there is enough.
        host_update: seconds of a step that the host optimizer runs (it draws power).
        m: micro-batches, shape (launches, 1).
        memory_rate: the memory's clock as a share of the one its bandwidth is stated for, shape
            (launches, 1); what draws power is the traffic, which it does not change.
    """

    arithmetic: np.ndarray
    operands: np.ndarray
    stream: np.ndarray
    dispatch: np.ndarray
    tensor: np.ndarray
    sequence: np.ndarray
    experts: np.ndarray
    transfer: np.ndarray
    host_now: np.ndarray
    host_behind: np.ndarray
    sync: np.ndarray
    sync_share: np.ndarray
    update: np.ndarray
    offload: np.ndarray
    offload_behind: np.ndarray
    host_update: np.ndarray
    m: np.ndarray
    memory_rate: np.ndarray

    def __getitem__(self, rows: Any) -> StepParts:
        return StepParts(*(getattr(self, field.name)[rows] for field in fields(self)))

    # -- with the clock ------------------------------------------------------------------------

    def device_s(self, clock: np.ndarray, constants: Constants) -> np.ndarray:
        """A micro-batch's arithmetic and memory on the device, seconds at a clock."""
        memory = np.maximum(1.0, constants.bandwidth_clock / clock) / self.memory_rate
        return np.asarray(
            np.maximum(self.arithmetic / clock, self.operands * memory) + self.stream * memory
        )

    def dispatch_s(self, clock: np.ndarray, constants: Constants) -> np.ndarray:
        """What dispatch adds: all of it, or only what the device's work does not hide."""
        hidden = np.minimum(self.dispatch, self.device_s(clock, constants))
        return self.dispatch - constants.dispatch_hidden * hidden

    def host_s(self, clock: np.ndarray, constants: Constants) -> np.ndarray:
        """What moving activations to the host adds to a slot."""
        behind = self.device_s(clock, constants) + self.tensor + self.sequence + self.experts
        return self.host_now + np.maximum(0.0, self.host_behind - behind)

    @property
    def links(self) -> np.ndarray:
        """A micro-batch's collectives and transfers, seconds."""
        return self.tensor + self.sequence + self.experts + self.transfer

    def slot_s(self, clock: np.ndarray, constants: Constants) -> np.ndarray:
        """One micro-batch on one stage, forward and backward."""
        return np.asarray(
            self.device_s(clock, constants)
            + self.dispatch_s(clock, constants)
            + self.links
            + self.host_s(clock, constants)
        )

    def sync_s(self, slot: np.ndarray, constants: Constants) -> np.ndarray:
        """What gradients' and ZeRO's collectives add to the step, given the slots."""
        hidden = np.minimum(self.sync, self.sync_share * slot)
        return np.asarray(self.sync - hidden + constants.overlap_slowdown * hidden)

    def offload_s(self, slot: np.ndarray) -> np.ndarray:
        """What the optimizer's offload adds to the step."""
        return self.offload + np.maximum(0.0, self.offload_behind - self.m * slot * 2 / 3)

    def step_s(self, slot: np.ndarray, stages: Stages, constants: Constants) -> np.ndarray:
        """Seconds of a step, shape (n,): (m-1) slots of the slowest stage, one of each, and what is
        paid once (Sailor, SOSP'25; 1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
        pipeline = (self.m[:, 0] - 1) * slot.max(axis=1) + (slot * stages.count).sum(axis=1)
        update = self.update / self.memory_rate
        once = self.sync_s(slot, constants) + update + self.offload_s(slot)
        return np.asarray(pipeline + once.max(axis=1) + constants.step_s)


def _over_passes(
    name: str, block: Pass, head: Pass, encoder: Pass, stages: Stages, passes: np.ndarray
) -> np.ndarray:
    """One figure of a stage's micro-batch over all passes (the head is never recomputed). Frames
    are encoded where tokens are embedded, by blocks that are recomputed as the others."""
    here = getattr(block, name)[:, None] * stages.blocks * passes
    here = here + getattr(encoder, name)[:, None] * stages.embeds * passes
    return np.asarray(here + 3.0 * getattr(head, name)[:, None] * stages.heads)


def step_parts(
    job: TrainingJob,
    facts: ModelFacts,
    cluster: Cluster,
    constants: Constants,
    launches: Launches,
    stages: Stages,
    *,
    peak_flops: float,
    element: float,
    fused_attention: bool,
) -> StepParts:
    """Everything of a step but the clock.

    Args:
        peak_flops: of the job's precision.
        element: bytes an activation, a gradient or a communicated parameter.
    """
    forward = Passes(
        job,
        facts,
        cluster.device,
        constants,
        launches,
        peak_flops=peak_flops,
        element=element,
        fused_attention=fused_attention,
    )
    block, head, encoder = forward.block(), forward.head(), forward.encoder()
    column = launches[:, None]
    d, t, u, e = column.d, column.t, column.u, column.e
    passes = 3.0 + column.recomputed  # forward 1, backward 2, recomputation 1
    tokens = column.b * job.sequence_length / u
    activation = tokens * facts.hidden * element
    shape = np.zeros((len(launches), len(stages.blocks)))

    # Tensor parallelism: two all-reduces a block forward, two backward, two more to recompute
    # (Megatron-LM, arXiv 1909.08053), of the whole activation.
    reduces = (4.0 + 2.0 * column.recomputed) * stages.blocks
    tensor = reduces * np.where(
        t > 1, all_reduce_s(activation, t, link_of(cluster, constants, t)), 0.0
    )
    # Ulysses: q, k and v before attention, its output after, each pass (arXiv 2309.14509).
    turns = (2.0 + column.recomputed) * stages.blocks
    heads = 2 * facts.heads * facts.head_dim + 2 * facts.kv_heads * facts.head_dim
    exchanged = tokens * heads * element / t
    sequence = turns * np.where(
        u > 1, all_to_all_s(exchanged, u, link_of(cluster, constants, u * t)), 0.0
    )
    # Experts: tokens out and back, to each expert that they visit.
    visited = 2 * max(facts.experts_per_token, 1) * activation
    experts = turns * np.where(
        e > 1, all_to_all_s(visited, e, link_of(cluster, constants, e * t)), 0.0
    )
    # Pipeline: an activation to the next stage, its gradient back, and the schedule itself. The
    # next stage's ranks are d t u devices away. Each tensor-parallel rank sends its part, and the
    # parts are gathered on arrival (DeepSpeed's PipelineEngine: `pipe_partitioned` and
    # `grad_partitioned`, on by default; Megatron-LM scatters and gathers alike).
    inside = (constants.link_efficiency, constants.transfer_efficiency)
    next_stage = link_of(cluster, constants, 2 * d * t * u, efficiency=inside)
    gathered = np.where(t > 1, all_gather_s(activation, t, link_of(cluster, constants, t)), 0.0)
    transfer = np.where(
        column.p > 1,
        2 * (transfer_s(activation / t, next_stage) + gathered) + constants.stage_s,
        0.0,
    )

    host_link = constants.host_link_efficiency * (cluster.host_link_Bps or 2.5e10)
    kept = (column.recomputed + (1.0 - column.recomputed) * 17.0 / t) * activation
    moved = np.where(column.activations, 2 * kept * stages.blocks / host_link, 0.0)
    offload, behind, host_update, update = _optimizer(
        facts, cluster, constants, launches, stages, element, host_link
    )
    return StepParts(
        arithmetic=_over_passes("arithmetic_s", block, head, encoder, stages, passes),
        operands=_over_passes("operand_s", block, head, encoder, stages, passes),
        stream=_over_passes("stream_s", block, head, encoder, stages, passes),
        dispatch=_over_passes("operators", block, head, encoder, stages, passes)
        * constants.operator_s,
        tensor=tensor + shape,
        sequence=sequence + shape,
        experts=experts + shape,
        transfer=transfer + shape,
        host_now=np.where(column.activations_async, 0.0, moved),
        host_behind=np.where(column.activations_async, moved, 0.0),
        sync=_sync(facts, cluster, constants, launches, stages, element, host_link),
        sync_share=_sync_share(constants, column) + shape,
        update=update,
        offload=offload,
        offload_behind=behind,
        host_update=host_update,
        m=column.m,
        memory_rate=np.ones_like(column.m),
    )


def _sync(
    facts: ModelFacts,
    cluster: Cluster,
    constants: Constants,
    launches: Launches,
    stages: Stages,
    element: float,
    host_link: float,
) -> np.ndarray:
    """Seconds of data parallelism's and ZeRO's collectives in a step.

    Stages 0 and 1 reduce once a step (and stage 1 gathers what each rank updated); stage 2 reduces
    every micro-batch and gathers once; stage 3 gathers forward and backward and reduces, every
    micro-batch (DeepSpeed's engine refuses no_sync for stages 2 and 3). Parameters that live on
    the host come up for each of the two gathers.
    """
    column = launches[:, None]
    plain, experts = stage_parameters(facts, launches, stages)
    inside = constants.reduce_efficiency
    usual = (inside, inside * constants.reduce_over_network)
    seconds = np.zeros_like(plain)
    for parameters, ranks, apart in (
        (plain, column.replicas, column.t),
        (experts, np.maximum(1.0, column.replicas / column.e), column.t * column.e),
    ):
        rails = np.clip(cluster.devices_per_node / apart, 1.0, ranks)
        link = link_of(cluster, constants, ranks * apart, rails=rails, efficiency=usual)
        once = all_gather_s(parameters * element, ranks, link)
        rounds = np.select(
            [column.z <= 1, column.z == 2],
            [2.0 * np.ones_like(column.m), column.m + 1],
            3 * column.m,
        )
        # ZeRO-3 gathers block by block: its rounds are each block's.
        blocks = np.where(column.z == 3, np.maximum(stages.blocks, 1.0) - 1, 0.0)
        waiting = rounds * blocks * (ranks - 1) * link.latency_s
        seconds = seconds + np.where(ranks > 1, rounds * once + waiting, 0.0)
        # All ranks of a node share its drive; the link to the host is each rank's own.
        on_node = np.minimum(column.ranks, cluster.devices_per_node)
        drive = np.minimum(constants.nvme_Bps / on_node, host_link)
        source = np.where(column.parameters_nvme, drive, host_link)
        fetched = 2 * column.m * parameters / ranks * element / source
        seconds = seconds + np.where(column.parameters_offloaded & (column.z == 3), fetched, 0.0)
    return seconds


def _sync_share(constants: Constants, column: Launches) -> np.ndarray:
    """Slots of compute that the collectives of a step can hide behind."""
    last_backward = constants.reduce_overlap * 2 / 3
    return np.select(
        [column.z <= 1, column.z == 2],
        [last_backward * np.ones_like(column.m), last_backward * column.m],
        constants.gather_overlap * column.m,
    )


def _optimizer(
    facts: ModelFacts,
    cluster: Cluster,
    constants: Constants,
    launches: Launches,
    stages: Stages,
    element: float,
    host_link: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of a step: (offload exposed, offload hidden where it can, host update, update)."""
    column = launches[:, None]
    plain, experts = stage_parameters(facts, launches, stages)
    shards = np.where(column.z >= 1, column.replicas, 1.0)
    share = plain / shards + experts / np.maximum(1.0, shards / column.e)
    bandwidth = constants.memory_efficiency * cluster.device.memory_bandwidth_Bps
    update = ADAM_BYTES * share / bandwidth
    if cluster.device.type == "cpu":  # device and host are one memory
        none = np.zeros_like(share)
        return none, none, none, update
    on_node = np.minimum(column.ranks, cluster.devices_per_node)
    memory = constants.host_memory_efficiency * (cluster.host_memory_Bps or HOST_MEMORY_BPS)
    adam = ADAM_BYTES * share * on_node / memory
    transfer = share * element / host_link  # one way
    offloaded, later = column.offload, column.offload_async
    # Synchronously the last gradients go down, Adam runs, parameters come up. Asynchronously
    # (SuperOffload) all but the last bucket hides behind the backward pass, and fp32 is moved, cast
    # on the device: twice the bytes.
    now = np.where(offloaded & ~later, 2 * transfer + adam, np.where(later, 0.1 * transfer, 0.0))
    swapped = NVME_BYTES * share * on_node / constants.nvme_Bps
    now = now + np.where(column.offload_nvme, swapped, 0.0)
    behind = np.where(later, 4 * transfer + adam, 0.0)
    return now, behind, np.where(offloaded, adam, 0.0), np.where(offloaded, 0.0, update)
