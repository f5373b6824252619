"""Peak memory of the fullest rank, on the device and on its host.

Parameters, gradients and optimizer states as ZeRO shards them; activations of every micro-batch in
flight; logits; DeepSpeed's buffers; what the framework holds before any model. Each is one
function, each returns arrays of shape (launches, kinds of stage), and the peak is the largest sum
over the stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.compute import activation_bytes_per_token, encoder_block_bytes
from models.constants import Constants
from models.layout import Launches
from models.stages import Stages
from search_spaces.job import TrainingJob
from search_spaces.model_facts import ModelFacts, model_state_bytes

__all__ = ["MemoryParts", "memory_parts", "stage_parameters"]

#: Bytes a logit at the peak: 16-bit logits, their fp32 copy, and the gradient (2 + 4 + 4).
LOGIT_BYTES = 10.0
#: Bytes a score that attention without a fused kernel keeps for the backward pass: softmax output,
#: dropout output and mask (Korthikanti et al. 2022, arXiv 2205.05198: 5 a s^2 b a layer).
SCORE_BYTES = 5.0


@dataclass(frozen=True)
class MemoryParts:
    """Where the memory goes, bytes; arrays of shape (launches, kinds of stage).

    Attributes:
        states: parameters, gradients and optimizer states on the device.
        activations: what is kept for the backward pass, of all micro-batches in flight.
        logits: the loss's own.
        buffers: communication buckets and what ZeRO-3 gathers.
        context: CUDA and NCCL contexts (or the interpreter), allocator overhead.
        host: on one node's host: offloaded states and activations of the node's ranks.
    """

    states: np.ndarray
    activations: np.ndarray
    logits: np.ndarray
    buffers: np.ndarray
    context: np.ndarray
    host: np.ndarray

    @property
    def device(self) -> np.ndarray:
        return self.states + self.activations + self.logits + self.buffers + self.context


def stage_parameters(
    facts: ModelFacts, launches: Launches, stages: Stages
) -> tuple[np.ndarray, np.ndarray]:
    """Parameters of one rank of each stage before ZeRO: (all but experts, its experts).

    A head that shares its table with the embedding is a copy where it stands on another stage.
    """
    t, e = launches.t[:, None], launches.e[:, None]
    outside = facts.parameters - facts.block_parameters
    embedding = outside if facts.tied else outside - facts.head_parameters
    head = facts.head_parameters * (0.0 if facts.tied and len(stages.kind) == 1 else 1.0)
    a_block = (facts.block_parameters - facts.expert_parameters) / facts.layers
    plain = stages.blocks * a_block + stages.embeds * embedding + stages.heads * head
    experts = stages.blocks * facts.expert_parameters / facts.layers
    return plain / t, experts / t / e


def memory_parts(
    job: TrainingJob,
    facts: ModelFacts,
    constants: Constants,
    launches: Launches,
    stages: Stages,
    *,
    element: float,
    fused_attention: bool,
    devices_per_node: int,
    on_cpu: bool,
) -> MemoryParts:
    """Peak bytes by part; `element` is bytes an activation."""
    column = launches[:, None]
    t, u, m, z = column.t, column.u, column.m, column.z
    replicas = column.replicas
    plain, experts = stage_parameters(facts, launches, stages)
    expert_replicas = np.maximum(1.0, replicas / column.e)

    def states_of(parameters: np.ndarray, shards: np.ndarray) -> np.ndarray:
        each = [model_state_bytes(parameters, k, shards, job.precision) for k in range(4)]  # type: ignore[arg-type]
        return np.select([z == k for k in range(4)], each)

    states = states_of(plain, replicas) + states_of(experts, expert_replicas)
    # What offload takes away: fp32 weights and moments (12 bytes a parameter; 8 in fp32).
    moments = 8.0 if job.precision == "fp32" else 12.0
    moved = moments * (
        plain / np.where(z >= 1, replicas, 1.0) + experts / np.where(z >= 1, expert_replicas, 1.0)
    )
    states = states - np.where(column.offload, moved, 0.0)
    fetched = element * (plain / replicas + experts / expert_replicas)
    fetched = np.where(column.parameters_offloaded & (z == 3), fetched, 0.0)
    states = states - fetched

    tokens = column.b * job.sequence_length / u
    block = tokens * activation_bytes_per_token(facts, t, element)
    if not fused_attention:
        scores = SCORE_BYTES * element / 2 * job.sequence_length * facts.heads / t
        block = block + tokens * scores
    again = column.recomputed
    kept = again * element * tokens * facts.hidden + (1 - again) * block
    in_flight = np.minimum(m, len(stages.kind) - stages.first)
    # Offloaded activations leave two blocks' worth on the device: one in use, one in transit.
    resident = np.where(column.activations, np.minimum(2.0, stages.blocks), stages.blocks)
    activations = resident * np.where(column.activations, 1.0, in_flight) * kept
    left = np.where(column.activations, stages.blocks * in_flight * kept, 0.0)
    if facts.vision is not None:
        seen = column.b * job.frames * facts.vision.patches / u
        one = encoder_block_bytes(facts, seen, t, element, fused_attention=fused_attention)
        encoded = again * element * seen * facts.vision.hidden + (1 - again) * one
        in_all = facts.vision.layers * in_flight
        held = np.where(column.activations, 2.0, in_all)
        activations = activations + stages.embeds * held * encoded
        left = left + np.where(column.activations, stages.embeds * in_all * encoded, 0.0)
        activations = activations + np.where(again > 0, stages.embeds * one, 0.0)
    # The block under recomputation, or the gradients of the block in work.
    activations = activations + np.where(again > 0, block, 0.5 * block)
    logits = stages.heads * LOGIT_BYTES * element / 2 * tokens * facts.vocab / t
    activations = activations * (1 + constants.memory_overhead)

    parameters = plain + experts
    bucket = np.minimum(constants.buffer_elements, parameters) * element
    gathered = np.where(z == 3, np.minimum(2.0 * facts.largest_layer, parameters) * element, 0.0)
    sharded = replicas > 1
    buffers = np.where(sharded, np.where(z >= 1, 2.0, 1.0), 0.0) * bucket + gathered
    context = np.full_like(states, constants.context_bytes)

    on_node = np.minimum(column.ranks, devices_per_node)
    # DeepSpeed keeps a 16-bit (or fp32) gradient buffer beside the fp32 states on the host.
    # What lies on a drive is not in host memory: there only its gradients are.
    kept_there = np.where(column.offload_nvme, 0.0, moved)
    on_host = np.where(column.offload, kept_there + element * moved / moments, 0.0)
    fetched = np.where(column.parameters_nvme, 0.0, fetched)
    host = np.zeros_like(states) if on_cpu else on_node * (on_host + fetched + left)
    return MemoryParts(states, activations, logits, buffers, context, host)
