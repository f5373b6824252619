"""Memory and communication of FSDP2 (torch's `fully_shard`), as the training program applies it.

Every block is a unit, and so are a token table and an output projection that are not one matrix;
what is left is the root's. States are fp32 on the shard; in mixed precision units are gathered in
16 bits and gradients are reduced in fp32, as by torch 2.13 (_fully_shard/_fsdp_param_group.py).
"""

from __future__ import annotations

import numpy as np

from tuner.models.analytic.collectives import all_gather_s, all_reduce_s, link_of
from tuner.models.analytic.layout import Launches
from tuner.models.analytic.setup import Setup
from tuner.models.analytic.stages import Stages


def _width(setup: Setup) -> float:
    return 2.0 if setup.program.pure_bf16 else 4.0


def states(setup: Setup, column: Launches, parameters: np.ndarray) -> list[np.ndarray]:
    """Return the bytes of [parameters, gradients, optimizer] on one rank."""
    each = (_width(setup), _width(setup), setup.states.moments)
    return [size * parameters / column.shards for size in each]


def _units(
    setup: Setup, column: Launches, stages: Stages, parameters: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    # (One block, what stays gathered between the passes): the latter the projection's, or the
    # root's if that holds the table.
    facts = setup.facts
    block = facts.block_elements(setup.element) / facts.layers / column.t
    if facts.lora is not None:
        block = block + facts.lora.block_parameters
    if facts.tied:
        return block, parameters - stages.blocks * block
    return block, stages.heads * facts.head_parameters / column.t + np.zeros_like(parameters)


def communication_bytes(
    setup: Setup, column: Launches, stages: Stages, parameters: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of gathered parameters and unreduced gradients: (at the loss, in a block).

    At the loss the projection is gathered; a root that holds it has begun to gather the last block.
    In the backward pass of a block its parameters are there and those of the next one on their way,
    its gradients become complete, and the input of the last reduction is still held. Without
    resharding everything stays gathered until its gradients are complete.
    """
    element = setup.element
    block, kept = _units(setup, column, stages, parameters)
    with_next = element * (kept + (block if setup.facts.tied else 0.0))
    own = block if setup.facts.lora is None else setup.facts.lora.block_parameters
    gradients = (element + _width(setup)) * own
    between = 2 * element * block + (element * kept if setup.facts.tied else 0.0)
    at_loss = np.where(column.reshard, with_next, element * parameters)
    in_block = np.where(column.reshard, between, element * parameters) + gradients
    return at_loss, in_block


def sync_s(
    setup: Setup,
    column: Launches,
    stages: Stages,
    parameters: np.ndarray,
    trained: np.ndarray,
) -> np.ndarray:
    """Return the seconds of a step's collectives.

    In every micro-batch parameters are gathered for the forward pass, those that were freed again
    for the backward pass (recomputation shares that), and gradients are reduce-scattered, all
    within a group of HSDP. The groups sum their shards of the gradients once a step. Gradients are
    those of `trained`, the parameters that are not frozen.
    """
    cluster, constants = setup.cluster, setup.constants
    inside = constants.reduce_efficiency
    usual = (inside, inside * constants.reduce_over_network)
    shards = column.shards
    rails = np.clip(cluster.devices_per_node / column.t, 1.0, shards)
    span = shards * column.t
    link = link_of(cluster, constants, span, rails=rails, members=rails, efficiency=usual)
    _, kept = _units(setup, column, stages, parameters)
    gathered = parameters + np.where(column.reshard, parameters - kept, 0.0)
    once = all_gather_s(setup.element * gathered, shards, link)
    once = once + all_gather_s(_width(setup) * trained, shards, link)
    # Rounds are each block's own.
    rounds = (2.0 + column.reshard) * np.maximum(0.0, stages.blocks - 1)
    each = once + rounds * (shards - 1) * link.latency_s
    apart = shards * column.t
    rails = np.clip(cluster.devices_per_node / apart, 1.0, column.groups)
    span = column.groups * apart
    across = link_of(cluster, constants, span, rails=rails, members=rails, efficiency=usual)
    summed = all_reduce_s(_width(setup) * trained / shards, column.groups, across)
    return np.asarray(column.m * each + np.where(column.groups > 1, summed, 0.0))
