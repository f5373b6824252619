"""Binding of ranks to cores and memory: what today's command asks for, or that of offload.

On a node with several sockets a rank that offloads works on memory of its processor; where it runs
then changes the step time by a third (DeepSpeed, pull request 7474). Launch files start a
configuration with the binding under which it was measured.
"""

from __future__ import annotations

import os
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import KNOBS
from tuner.workload.node.host import core_ranges
from tuner.workload.node.rank_group import ServerError
from tuner.workload.node.rank_server import RankServer
from tuner.workload.platforms import Platform, platform_of

#: The binding of the built-in program's ranks under offload: each has cores of its own, of those
#: nearest to its GPU, and its memory is allocated there because it runs there.
OFFLOAD_RULE = "numa:exclusive"
_OFFLOAD = ("optimizer_offload", "parameter_offload", "activation_offload")


def rule_of(configuration: Configuration, job: TrainingJob, cluster: Cluster | None) -> str:
    """Return the rule by which ranks are bound (`tuner.workload.node.vendor_binding`), or ""."""
    if hasattr(job, "launcher"):  # a script, which is started as today
        return job.launcher.binding if job.launcher is not None else ""
    offloads = any(configuration.get(name) != KNOBS[name].default for name in _OFFLOAD)
    binds = cluster is None or platform_of(cluster).binds_offload
    return OFFLOAD_RULE if offloads and binds else ""


def bound_ranks(
    rule: str, server: RankServer, ranks: int, *, platform: Platform, asked: bool
) -> tuple[list[dict[str, Any]], str]:
    """Return the ranks' binding, and why there is none; InputError if it is asked for in vain."""
    try:
        nodes = platform.memory_nodes()
        if rule.startswith("numa:") and nodes is None:
            raise ServerError("torch asks CUDA for the memory node of each GPU, and there is none")
        bound = server.bind(rule, ranks, nodes or [])
        granted = os.sched_getaffinity(0)
        if other := {core for own in bound for core in own["cpus"]} - granted:
            raise ServerError(
                f"cores {core_ranges(other)} are not among {core_ranges(granted)}, which may be "
                "used here"
            )
        return bound, ""
    except ServerError as error:
        why = str(error).strip().splitlines()[0]
    if asked:
        kind, _, value = rule.partition(":")
        option = f"--numa-binding {value}" if kind == "numa" else "--bind_cores_to_rank"
        raise InputError(
            f"{option} cannot be applied on this node: {why}; leave it out of the command"
        )
    return [], why
