"""Peak memory of the fullest rank, on the device and on its host.

Arrays are of shape (launches, kinds of stage); the peak is the largest sum over the stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tuner.models.analytic.compute import (
    activation_bytes_per_token,
    encoder_block_bytes,
    sharded_over,
    stored_score_bytes,
)
from tuner.models.analytic.constants import Launches, Setup, Stages
from tuner.search_spaces.job import Program
from tuner.search_spaces.model_facts import model_state_parts

#: Names of the parts of the device's memory.
DEVICE_PARTS = (
    *("parameters", "gradients", "optimizer"),
    *("activations", "temporary", "communication", "context", "offloaded"),
)

#: Parameters that ZeRO-3 keeps gathered if it will use them again soon: DeepSpeed's defaults of
#: stage3_max_live_parameters and stage3_max_reuse_distance. Counted in steps of DeepSpeed 0.19.8
#: (`PartitionedParameterCoordinator`): a model of P parameters gathers 2 P - 1e9 a micro-batch.
LIVE_PARAMETERS = 1e9

#: Bytes per logit at the peak: 16-bit logits, their fp32 log-softmax, and its gradient in fp32 and
#: in 16 bits (2 + 4 + 4 + 2), as torch counts them in transformers' loss (benchmarks.fit); in fp32
#: logits, log-softmax and gradient (4 + 4 + 4).
LOGIT_BYTES = 12.0
#: The same of a fused loss: 16-bit logits, whose gradient takes their place, and fp32 exponentials.
FUSED_LOGIT_BYTES = 6.0
#: What the logits of an fp32 head beside a quantized model add: one more copy of them, as the peaks
#: of `benchmarks.validation.qlora` show.
WIDE_LOGIT_BYTES = 4.0


@dataclass(frozen=True)
class MemoryParts:
    """Parts of the memory, bytes; arrays of shape (launches, kinds of stage)."""

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    activations: np.ndarray  # values kept for the backward pass, of all micro-batches in flight
    # values of the block that is recomputed or differentiated, and of the loss.
    temporary: np.ndarray
    communication: np.ndarray
    context: np.ndarray
    # a rank's share of `host` where the device has no memory but the host's; 0 elsewhere.
    offloaded: np.ndarray
    # memory of one node's host: offloaded states and activations of the node's ranks.
    host: np.ndarray

    @property
    def device(self) -> np.ndarray:
        """Memory of the device, the sum of its parts."""
        return np.asarray(sum(getattr(self, name) for name in DEVICE_PARTS))


def stage_parameters(
    setup: Setup, launches: Launches, stages: Stages
) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters of one rank of each stage before ZeRO: (all but experts, experts).

    Quantized weights are counted as the elements of the job's precision that they take.
    """
    facts, element = setup.facts, setup.element
    t, e = launches.t[:, None], launches.e[:, None]
    outside = facts.parameters - facts.block_parameters
    embedding = outside if facts.tied else outside - facts.head_parameters
    head = facts.head_parameters * (0.0 if facts.tied and len(stages.kind) == 1 else 1.0)
    per_block = (facts.block_elements(element) - facts.expert_parameters) / facts.layers
    plain = stages.blocks * per_block + stages.embeds * embedding + stages.heads * head
    experts = stages.blocks * facts.expert_parameters / facts.layers
    return plain / t, experts / t / e


def trained(setup: Setup, launches: Launches, stages: Stages) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters of `stage_parameters` that have a gradient; LoRA adapters whole on
    every rank."""
    facts = setup.facts
    plain, experts = stage_parameters(setup, launches, stages)
    if facts.lora is None:
        return plain, experts
    adapters = stages.blocks * facts.lora.block_parameters
    return adapters + np.zeros_like(plain), np.zeros_like(experts)


def memory_parts(setup: Setup, launches: Launches, stages: Stages) -> MemoryParts:
    """Return the peak bytes of each part."""
    column = launches.column
    facts, element = setup.facts, setup.element
    plain, experts = stage_parameters(setup, launches, stages)
    updated = trained(setup, launches, stages)
    (weights, gradients, optimizer), offloaded = _states(setup, column, *updated)
    if facts.lora is not None:
        weights = weights + _frozen_bytes(setup, column, stages, plain, experts)
    # Offload to the host leaves nothing of the states that it moves on the device.
    fetched = np.where(column.parameters_offloaded & (column.z == 3), weights, 0.0)
    activations, in_block, on_host = _activations(setup.widened, column, stages)
    in_block, at_loss = _temporary_bytes(setup, column, stages, in_block)
    # The loss is done with its logits before the first block is recomputed or differentiated.
    peak = np.maximum(in_block, at_loss)

    parameters, reduced = plain + experts, updated[0] + updated[1]
    if facts.lora is not None:
        parameters = parameters + reduced
    communication = _communication_bytes(setup, column, parameters, reduced)
    if launches.fsdp.any():
        gathered_at_loss, gathered_in_block = _fsdp_bytes(setup, column, stages, parameters)
        loss_is_peak = at_loss + gathered_at_loss >= in_block + gathered_in_block
        peak = np.where(column.fsdp, np.where(loss_is_peak, at_loss, in_block), peak)
        gathered = np.where(loss_is_peak, gathered_at_loss, gathered_in_block)
        communication = np.where(column.fsdp, gathered, communication)

    on_node = np.minimum(column.ranks, setup.cluster.devices_per_node)
    states = np.where(column.offload, _host_bytes(setup, column) * offloaded, 0.0)
    held = np.where(column.parameters_nvme, 0.0, fetched)
    second_copy = np.where(column.second_copy > 1, 1 / column.second_copy, 0.0)
    if not setup.cluster.device.has_own_memory:
        host = np.zeros_like(weights)
    else:
        host = on_node * (states + held + on_host)
    shares = setup.cluster.device.shares_host_memory
    return MemoryParts(
        parameters=weights - fetched + (setup.program.copies + second_copy) * element * parameters,
        # From stage 2 on gradients go to the host as they are reduced (DeepSpeed 0.19.8:
        # runtime/zero/stage_1_and_2.py, copy_grads_in_partition; stage3.py, whose flat buffer of
        # gradients is on the CPU). Stage 1 keeps them until the step.
        gradients=np.where(column.offload & (column.z >= 2), 0.0, gradients),
        optimizer=np.where(column.offload, 0.0, optimizer),
        activations=activations,
        temporary=peak,
        communication=communication,
        context=np.where(
            column.ranks == 1, setup.constants.context_alone_bytes, setup.constants.context_bytes
        )
        + np.zeros_like(weights),
        offloaded=host / on_node if shares else np.zeros_like(host),
        host=host,
    )


def _temporary_bytes(
    setup: Setup, column: Launches, stages: Stages, in_block: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the values of a block and of the loss.

    Args:
        in_block: bytes of the block's values without those that the program adds.
    """
    facts, element = setup.facts, setup.element
    tokens = column.b * setup.job.sequence_length / column.u
    each = FUSED_LOGIT_BYTES if setup.program.fused_loss else LOGIT_BYTES
    if setup.widened is not setup and not setup.program.fused_loss:
        each += WIDE_LOGIT_BYTES
    at_loss = stages.heads * each * tokens * facts.vocab / column.t
    at_loss = at_loss * setup.program.logits
    if setup.program.fp32_gradients:
        # A product's gradient is made in 16 bits, and then added to that in fp32.
        in_block = (
            in_block + element * (1 + facts.gated) * facts.hidden * facts.intermediate / column.t
        )
        at_loss = at_loss + stages.heads * element * facts.head_parameters / column.t
    if facts.lora is not None and facts.lora.frozen_bytes is not None:
        # A product computes with its weights in the job's precision, one layer's at a time.
        widest = max(facts.intermediate, facts.heads * facts.head_dim)
        in_block = in_block + element * facts.hidden * widest / column.t
    return in_block, at_loss


def _communication_bytes(
    setup: Setup, column: Launches, parameters: np.ndarray, reduced: np.ndarray
) -> np.ndarray:
    """Return the bytes of the buffers of DeepSpeed and of the parameters that it has gathered.

    Args:
        parameters: of one rank of each stage before ZeRO.
        reduced: those of them whose gradients are reduced.
    """
    element = setup.element
    live = np.maximum(2.0 * _largest_layer(setup), LIVE_PARAMETERS)
    gathered = np.where(column.z == 3, np.minimum(live, parameters) * element, 0.0)
    if setup.program.fp32_gradients:  # which are the buffers that are reduced
        return gathered
    bucket = np.minimum(setup.constants.buffer_elements, reduced) * element
    buckets = np.where(column.replicas > 1, np.where(column.z >= 1, 2.0, 1.0), 0.0)
    return buckets * bucket + gathered


def _host_bytes(setup: Setup, column: Launches) -> np.ndarray:
    # As in DeepSpeed 0.19.8: Adam's moments, the weights that it updates and their gradients in the
    # same width, and a buffer in the job's precision (of weights in stages 1 and 2, of gradients in
    # stage 3); under accumulation stage 2 keeps the sum there, too
    # (single_partition_of_fp32_groups, param_buffer_of_bit16_for_cpu_offload_groups and
    # accumulated_grads_in_cpu in stage_1_and_2.py; fp32_partitioned_groups_flat and
    # grad_partitions_flat_buffer in stage3.py).
    held = setup.states.moments + 2 * setup.updated_element
    summed = np.where((column.z == 2) & (column.m > 1), setup.element, 0.0)
    return np.asarray(setup.element + np.where(column.offload_nvme, 0.0, held + summed))


def _largest_layer(setup: Setup) -> float:
    facts = setup.facts
    if facts.lora is None or facts.lora.frozen_bytes is None:
        return facts.largest_layer
    return max(facts.block_elements(setup.element) / facts.layers, facts.head_parameters)


def _states(
    setup: Setup, column: Launches, plain: np.ndarray, experts: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    # Returns ([parameters, gradients, optimizer] before offload, parameters of a rank's Adam).
    z, replicas = column.z, column.replicas
    expert_replicas = np.maximum(1.0, replicas / column.e)

    def parts_of(parameters: np.ndarray, shards: np.ndarray) -> list[np.ndarray]:
        how = setup.job.precision, setup.program
        each = [model_state_parts(parameters, k, shards, *how) for k in range(4)]  # type: ignore[arg-type]
        return [np.select([z == k for k in range(4)], part) for part in zip(*each, strict=True)]

    both = zip(parts_of(plain, replicas), parts_of(experts, expert_replicas), strict=True)
    offloaded = plain / np.where(z >= 1, replicas, 1.0) + experts / np.where(
        z >= 1, expert_replicas, 1.0
    )
    parts = [one + other for one, other in both]
    if setup.program.fp32_gradients and setup.element == 2.0:
        parts[1] = 2.0 * parts[1]
    if column.fsdp.any():
        each = (setup.updated_element, setup.updated_element, setup.states.moments)
        by_torch = [size * (plain + experts) / column.shards for size in each]
        parts = [np.where(column.fsdp, a, b) for a, b in zip(by_torch, parts, strict=True)]
    return parts, offloaded


def _frozen_bytes(
    setup: Setup, column: Launches, stages: Stages, plain: np.ndarray, experts: np.ndarray
) -> np.ndarray:
    whole = setup.element * (plain + experts)
    wider = setup.widened.element - setup.element
    if wider:  # of what is in no block: tables and head
        blocks = stages.blocks * setup.facts.block_elements(setup.element) / setup.facts.layers
        whole = whole + wider * np.maximum(0.0, plain + experts - blocks / column.t)
    shards = np.where(column.z == 3, column.replicas, np.where(column.fsdp, column.shards, 1.0))
    return np.asarray(whole / shards)


def _norm_bytes(setup: Setup, t: np.ndarray) -> np.ndarray:
    # Beside their input: the RMS norm of transformers (families with a gated MLP) converts it to
    # fp32 and keeps that and the normalized values, which are for the gradient of the gain: a
    # frozen one does not keep them. A fused layer norm keeps its input alone. Some families norm
    # queries and keys, too.
    facts, element = setup.facts, setup.element
    if not facts.gated or setup.program.fused_blocks:
        return np.zeros_like(t)
    width = 2.0 * facts.hidden + np.zeros_like(t)
    if facts.qk_norm:
        width = width + (facts.heads + facts.kv_heads) * facts.head_dim / t
    if facts.lora is not None:
        return width * (0.0 if element == 4.0 else 4.0)
    return width * (element if element == 4.0 else 4.0 + element)


def _products_bytes(setup: Setup, t: np.ndarray) -> np.ndarray:
    # What selective checkpointing keeps: the outputs of matrix products and of attention
    # (`KEPT_OPERATORS` of the training program), and the block's input.
    facts, element, k = setup.facts, setup.element, max(setup.facts.experts_per_token, 1)
    q, kv = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    between = facts.visited_width * (2 if facts.gated else 1)
    scores = 0 if setup.program.fused_attention else setup.job.sequence_length * facts.heads
    whole = facts.hidden * (2 + k)
    if facts.lora is not None:  # adapters' products
        whole += facts.lora.outputs + facts.lora.rank * facts.lora.adapters
    return np.asarray(element * (whole + (2 * q + 2 * kv + between + scores) / t))


def _in_flight(column: Launches, stages: Stages) -> np.ndarray:
    # Stage i of p keeps p - i under 1F1B. Over v virtual stages it has begun (v - 1) p + 2 (p - i -
    # 1) + 1 parts of 1/v each when its first backward pass begins (Korthikanti et al. 2022, arXiv
    # 2205.05198, section 4.2.3). Zero bubble fills every stage up to p (Qi et al. 2023, arXiv
    # 2401.10241, ZB-H1).
    p, v, first = len(stages.kind), column.v, stages.first
    interleaved = ((v - 1) * p + 2 * (p - first - 1) + 1) / v
    plain = np.where(v > 1, interleaved, p - first)
    return np.asarray(np.minimum(column.m, np.where(column.zero_bubble, p, plain)))


def _kept_ratio(setup: Setup) -> float:
    # What the model's own layers keep, as its library runs them, over what the formula says of
    # them there; 1 for the layers that the formulas describe.
    facts = setup.facts
    kept = facts.kept_16 if setup.element == 2.0 else facts.kept_32
    if not kept:
        return 1.0
    plain = replace(setup, job=replace(setup.job, lora=None), program=Program())
    formula = activation_bytes_per_token(plain, np.ones(1)) + _norm_bytes(plain, np.ones(1))
    return float(kept / formula[0])


def _activations(
    setup: Setup, column: Launches, stages: Stages
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Returns (kept, temporary, on the host).
    facts, element, t = setup.facts, setup.element, column.t
    tokens = column.b * setup.job.sequence_length / column.u
    block = tokens * (activation_bytes_per_token(setup, t) + _norm_bytes(setup, t))
    block = _kept_ratio(setup) * block
    if not setup.program.fused_attention:
        scores = stored_score_bytes(setup) * setup.job.sequence_length * facts.heads / t
        block = block + tokens * scores
    # Gathered keys and values of the other ranks' tokens are kept for the backward pass.
    others = tokens * (column.u - 1) * 2 * facts.kv_heads * facts.head_dim * element / t
    block = block + np.where(column.gathered, others, 0.0)
    again = column.recomputed
    inputs = element * tokens * facts.hidden / sharded_over(setup, t)
    kept = again * inputs + (1 - again) * block
    kept = np.where(column.selective, tokens * _products_bytes(setup, t), kept)
    in_flight = _in_flight(column, stages)
    # Offloaded activations leave two blocks' worth on the device: one in use, one in transit.
    resident = np.where(column.activations, np.minimum(2.0, stages.blocks), stages.blocks)
    on_device = resident * np.where(column.activations, 1.0, in_flight) * kept
    on_host = np.where(column.activations, stages.blocks * in_flight * kept, 0.0)
    # The block under recomputation, or the gradients of the block being processed.
    running = np.where(again > 0, block, 0.5 * block)
    running = np.where(column.selective, np.maximum(block - kept, running), running)
    if facts.vision is not None:
        patches = column.b * setup.job.frames * facts.vision.patches / column.u
        one = encoder_block_bytes(setup, patches, t)
        encoded = again * element * patches * facts.vision.hidden + (1 - again) * one
        split = 4 * facts.vision.hidden + facts.vision.intermediate
        outputs = element * patches * (3 * facts.vision.hidden + split / t)
        encoded = np.where(column.selective, outputs, encoded)
        in_all = facts.vision.layers * in_flight
        resident = np.where(column.activations, 2.0, in_all)
        on_device = on_device + stages.embeds * resident * encoded
        on_host = on_host + np.where(column.activations, stages.embeds * in_all * encoded, 0.0)
        running = running + np.where(again > 0, stages.embeds * one, 0.0)
    overhead = 1 + setup.constants.memory_overhead
    return on_device * overhead, running * overhead, on_host


def fsdp_units(
    setup: Setup, column: Launches, stages: Stages, parameters: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return FSDP2's parameters of (one block, those gathered between the passes).

    Torch's `fully_shard` makes every block a unit, and a token table and an output projection that
    are not one matrix; what is left is the root's. The last of them stays gathered: the projection
    or, if that is the table, the root. States are fp32 on the shard; in mixed precision units are
    gathered in 16 bits and gradients are reduced in fp32 (torch 2.13,
    _fully_shard/_fsdp_param_group.py).
    """
    facts = setup.facts
    block = facts.block_elements(setup.element) / facts.layers / column.t
    if facts.lora is not None:
        block = block + facts.lora.block_parameters
    if facts.tied:
        return block, parameters - stages.blocks * block
    return block, stages.heads * facts.head_parameters / column.t + np.zeros_like(parameters)


def _fsdp_bytes(
    setup: Setup, column: Launches, stages: Stages, parameters: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    # Gathered parameters and unreduced gradients: (at the loss, in a block). At the loss the
    # projection is gathered; a root that holds it has begun to gather the last block. In the
    # backward pass of a block its parameters are there and those of the next one on their way, its
    # gradients become complete, and the input of the last reduction is still held. Without
    # resharding everything stays gathered until its gradients are complete.
    element = setup.element
    block, kept = fsdp_units(setup, column, stages, parameters)
    with_next = element * (kept + (block if setup.facts.tied else 0.0))
    own = block if setup.facts.lora is None else setup.facts.lora.block_parameters
    gradients = (element + setup.updated_element) * own
    between = 2 * element * block + (element * kept if setup.facts.tied else 0.0)
    at_loss = np.where(column.reshard, with_next, element * parameters)
    in_block = np.where(column.reshard, between, element * parameters) + gradients
    return at_loss, in_block
