"""Parts of one optimizer step: per micro-batch of each kind of stage, and once per step.

A micro-batch's slot is arithmetic (which the SM clock scales), memory traffic, the host's dispatch,
collectives inside the layers and the transfer to the next stage (which it does not).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.communication import collectives_s, sync_s, sync_share
from tuner.models.analytic.compute import ATTENTION_BACKWARD, OPERATORS_PER_PRODUCT, Passes
from tuner.models.analytic.constants import Constants, Setup
from tuner.models.analytic.layout import Launches, Rows, Stages
from tuner.models.analytic.memory import trained

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
    # host_now, host_behind: transfer of a micro-batch's activations to the host and back, exposed
    # or hidden behind the rest of its slot.
    host_now: np.ndarray
    host_behind: np.ndarray
    # sync, sync_share: collectives of gradients and ZeRO in a step, and the number of slots of
    # compute that they can hide behind.
    sync: np.ndarray
    sync_share: np.ndarray
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
            + self.host_s(clock, constants)
        )

    def sync_s(self, slot: np.ndarray, constants: Constants) -> np.ndarray:
        """Return the seconds that collectives of gradients and ZeRO add to the step."""
        hidden = np.minimum(self.sync, self.sync_share * slot)
        return np.asarray(self.sync - hidden + constants.overlap_slowdown * hidden)

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
        hidden = np.minimum(self.sync, self.sync_share * slot)
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
    column = launches[:, None]
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
    attention = block.attention_s[:, None] * stages.blocks * backward
    return StepParts(
        arithmetic=over_passes("arithmetic_s", passes, frozen) + attention,
        operands=over_passes("operand_s", passes, frozen),
        stream=over_passes("stream_s", streams) + forward.cast_s()[:, None] * stages.blocks * casts,
        dispatch=over_passes("operators", streams, frozen / OPERATORS_PER_PRODUCT)
        * np.where(column.compiled, constants.compiled_operator_s, constants.operator_s)
        + _recomputation_s(setup, column) * stages.blocks,
        tensor=tensor + shape,
        sequence=sequence + shape,
        experts=experts + shape,
        transfer=transfer + shape,
        host_now=np.where(column.activations_async, 0.0, moved),
        host_behind=np.where(column.activations_async, moved, 0.0),
        sync=sync_s(setup, launches, stages),
        sync_share=sync_share(constants, column) + shape,
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
    column = launches[:, None]
    plain, experts = trained(setup, launches, stages)
    shards = np.where(column.z >= 1, column.replicas, np.where(column.fsdp, column.shards, 1.0))
    share = plain / shards + experts / np.maximum(1.0, shards / column.e)
    # Weights, moments and gradients are read, the first two written: 28 bytes with fp32 states.
    in_and_out = 2 * (setup.updated_element + setup.states.moments)
    moved = in_and_out + setup.updated_element
    update = moved * share / setup.bandwidth_Bps
    if not cluster.device.is_gpu:  # device and host are one memory
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
    crossed = np.select(
        [column.z == 3, column.m <= 1, column.z == 2],
        [2 * column.m, np.zeros_like(column.m), 2 * column.m - 1],
        2.0,
    )
    return np.asarray(4.0 + setup.element * crossed)
