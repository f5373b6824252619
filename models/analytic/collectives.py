"""Cost of collectives, from their algorithm, link and latency per round.

Algorithms are rings, as NCCL uses for large messages; a group inside a node uses the links between
its devices, a group across nodes each device's share of the network. Arguments are the bytes that
one rank holds or sends and the number of ranks, as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tuner.models.analytic.constants import Constants
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
